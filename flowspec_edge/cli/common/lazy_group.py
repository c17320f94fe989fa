"""A group whose commands are imported when one of them runs, and ``--help-all``."""

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from flowspec_edge.errors import UsageError
from flowspec_edge.util.terminal import did_you_mean


@dataclass(frozen=True)
class LazyCommand:
    """A command that is imported once it is used.

    location  "module:attribute" below ``flowspec_edge.cli``: a function, or a ``Typer`` with a group
    summary   its line in the group's help

    A function's ``command_class``, if it has one, parses its arguments.
    """

    location: str
    summary: str
    panel: str | None = None
    hidden: bool = False

    def load(self) -> Any:
        module, _, attribute = self.location.partition(":")
        return getattr(import_module(f"flowspec_edge.cli.{module}"), attribute)


class QuickGroup(TyperGroup):
    """A group that leaves out options that were not given: typer needs pydantic to read even their defaults."""

    _named_first = False  # whether the arguments begin with a command, not with an option of the group

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._named_first = bool(args) and not args[0].startswith("-")
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        return [] if self._named_first else super().get_params(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, commands = args[0] if args else "-", self.list_commands(ctx)
        if name not in commands and not name.startswith("-") and not ctx.resilient_parsing:
            raise UsageError(f"no command {name!r}; {did_you_mean(name, commands)}"
                             f"{ctx.command_path} --help lists them")
        return super().resolve_command(ctx, args)


class LazyGroup(QuickGroup):
    """A group whose subclasses list ``lazy``, the commands by name."""

    lazy: ClassVar[dict[str, LazyCommand]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.lazy, *(name for name in super().list_commands(ctx) if name not in self.lazy)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command without its options, which a list does not need."""
        if cmd_name in self.commands or cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        about = self.lazy[cmd_name]
        return TyperCommand(cmd_name, help=about.summary, hidden=about.hidden, rich_help_panel=about.panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.lazy:
            self.load(args[0])
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> Any:
        """Import the command with its options."""
        if name not in self.commands:
            loaded = self.lazy[name].load()
            if isinstance(loaded, typer.Typer):
                loaded.info.cls = QuickGroup
                command: Any = typer.main.get_group(loaded)
            else:
                alone = typer.Typer(add_completion=False)
                alone.command(name, cls=getattr(loaded, "command_class", None))(loaded)
                command = typer.main.get_command(alone)
            command.name, command.hidden = name, self.lazy[name].hidden
            _add_full_help(command)
            self.commands[name] = command
        return self.commands[name]


def _add_full_help(command: Any) -> None:
    """Add ``--help-all`` to commands that have hidden options of a panel."""
    for child in getattr(command, "commands", {}).values():
        _add_full_help(child)
    rare = [p for p in command.params if getattr(p, "hidden", False) and getattr(p, "rich_help_panel", None)]
    if not rare:
        return

    def show(context: typer.Context, requested: bool) -> None:
        if requested:
            for parameter in rare:
                parameter.hidden = False
            print(context.get_help())
            raise typer.Exit

    def template(*, full: Annotated[bool, typer.Option(
            "--help-all", is_eager=True, expose_value=False, callback=show,
            help="Show the rarer options, too.")] = False) -> None:
        """Let typer make the option: its class' parameters differ between releases."""

    alone = typer.Typer(add_completion=False)
    alone.command()(template)
    command.params += typer.main.get_command(alone).params

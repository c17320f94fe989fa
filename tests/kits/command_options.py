"""The options of every command, from the signatures that typer reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

import typer

from flowspec_edge.cli.main import Commands


def all_commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command's path, and its function."""
    for name, lazy in Commands.lazy.items():
        loaded = lazy.load()
        if isinstance(loaded, typer.Typer):
            yield from commands(loaded, (name,))
        else:
            yield (name,), loaded


def commands(app: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for command in app.registered_commands:
        assert command.callback is not None
        yield (*path, command.name or command.callback.__name__.replace("_", "-")), command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        assert isinstance(group.name, str)
        yield from commands(group.typer_instance, (*path, group.name))


def options(function: Any) -> Iterator[tuple[str, set[type], Any]]:
    """Each option's name ("--seed"), its types, and typer's description; arguments are left out."""
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if get_origin(parameter.annotation) is Annotated:
            hint, info, *_ = get_args(parameter.annotation)
            if type(info).__name__ == "OptionInfo":
                declared = [name.split("/")[0] for name in info.param_decls if name.startswith("--")]
                name = (declared or [f"--{parameter.name.replace('_', '-')}"])[0]
                yield name, set(get_args(hint) or [hint]), info


def refusal(words: Sequence[str]) -> str:
    """What the command would refuse, "" for nothing; it is not run."""
    from flowspec_edge.cli.main import app

    node: Any = typer.main.get_command(app)
    context = None
    try:
        while hasattr(node, "commands"):
            context = node.context_class(node, parent=context, info_name=node.name)
            name, _, words = node.resolve_command(context, list(words))
            node = node.get_command(context, name)
        node.make_context(node.name, list(words), parent=context)
    except Exception as error:  # of the command line parser that typer brings along
        return getattr(error, "message", "") or repr(error)
    return ""

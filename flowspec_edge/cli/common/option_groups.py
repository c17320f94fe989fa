"""Options made from the fields of dataclasses: sampling, the parameters of strategies, a benchmark's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import Field, fields, replace
from functools import partial, wraps
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from flowspec_edge.cli.common.options import SAMPLING, STRATEGY
from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params

_SAMPLING_HELP = {
    "temperature": "0 takes the likeliest token.",
    "top_k": "Sample from the k likeliest tokens; 0 keeps all.",
    "top_p": "Sample from the smallest set of tokens with this mass.",
    "min_p": "Leave out tokens less likely than this share of the likeliest one's probability.",
    "seed": "Seed of the noise; a seed gives the same text with every strategy.",
}
_SET = "set"  # the name is also what errors call it
SetOption = Annotated[list[str] | None, typer.Option(
    "--set", metavar="NAME=VALUE", show_default=False, rich_help_panel=STRATEGY,
    help="A parameter of the strategy; may be given several times.  flowspec strategies NAME lists them.")]
_DRAFT = "draft"
DraftOption = Annotated[str | None, typer.Option(
    "--draft", metavar="KIND", show_default=False, rich_help_panel=STRATEGY,
    help="What guesses: a kind of draft model that the model has, such as eagle3; mtp; ngram, which needs none; own: "
         "the strategy's own kind.  Default: own, in bench and sweep the model's head for all.")]
# From the values of a command's parameters to the strategies that it runs; None: any.
StrategySelector = Callable[[Mapping[str, Any]], Sequence[str] | None]


def with_dataclasses(without: Collection[str] = (), strategies: StrategySelector | None = None,
                     rare: Collection[str] = ("top_k", "min_p"), **groups: Any,
                     ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace each named parameter of a command by one option per dataclass field not in ``without``.

    A group is a dataclass, or a ``partial`` of one with other defaults, which is called when the command runs.
    ``rare`` fields are shown by ``--help-all`` alone.  ``Params`` become ``--set``, which takes the parameters of
    ``strategies`` alone, and ``--draft``, which every strategy that drafts takes.
    """
    shapes = {name: group.func() if isinstance(group, partial) else group() for name, group in groups.items()}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command_parameters = inspect.signature(command, eval_str=True).parameters.values()
        plain_parameters = [parameter for parameter in command_parameters if parameter.name not in groups]
        options = [option for group in shapes.values() for option in _options(group, without, rare)]

        @wraps(command)
        def run(**arguments: Any) -> Any:
            group_values = {}
            for name, group in shapes.items():
                if isinstance(group, Params):
                    settings, draft = arguments.pop(_SET) or [], arguments.pop(_DRAFT)
                    group_values[name] = _drafting(groups[name](), draft, settings)
                    continue
                values = {f.name: arguments.pop(f.name) for f in _fields(group, without)}
                group_values[name] = replace(groups[name](), **values)
            for name, group in shapes.items():
                if isinstance(group, Params) and settings:
                    strategy_names = strategies({**arguments, **group_values}) if strategies else None
                    group_values[name] = _set(group_values[name], settings, strategy_names, without)
            return command(**arguments, **group_values)

        run.__signature__ = inspect.Signature([*plain_parameters, *options])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*plain_parameters, *options)}
        return run

    return decorate


def select_strategy(arguments: Mapping[str, Any]) -> Sequence[str]:
    """Return the strategy of ``--strategy``."""
    return [arguments["strategy"]]


def _set(params: Params, settings: Sequence[str], names: Sequence[str] | None, without: Collection[str],
         ) -> Params:
    from flowspec_edge.strategies.params import all_parameters, set_parameters
    from flowspec_edge.strategies.registry import parameters_of, strategy_class

    read = [parameters_of(strategy_class(name)) for name in names] if names else [all_parameters()]
    parameters = {name: parameter for by_name in read for name, parameter in by_name.items() if name not in without}
    whose = ", ".join(names) if names else "any strategy"
    return set_parameters(params, settings, parameters, whose)


def _drafting(params: Params, draft: str | None, settings: Sequence[str]) -> Params:
    """Return ``params`` with the kind of ``--draft``."""
    if draft is None:
        return params
    if any(setting.partition("=")[0].strip() == _DRAFT for setting in settings):
        raise UsageError("give --draft KIND or --set draft=KIND, not both")
    from flowspec_edge.strategies.params import all_parameters

    return params.changed(draft=all_parameters()[_DRAFT].read(draft))


def _fields(group: Any, without: Collection[str]) -> list[Field[Any]]:
    """Return the fields that become options."""
    return [field for field in fields(group) if field.name not in without]


def _options(group: Any, without: Collection[str], rare: Collection[str]) -> list[inspect.Parameter]:
    if isinstance(group, Params):
        return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
                for name, option in ((_DRAFT, DraftOption), (_SET, SetOption))]
    hints = get_type_hints(type(group), include_extras=True)
    return [inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(group, field.name),
        annotation=_annotated(hints[field.name], group, field.name, field.name in rare))
        for field in _fields(group, without)]


def _annotated(hint: Any, group: Any, name: str, rare: bool) -> Any:
    option = name.replace("_", "-")
    if isinstance(group, Sampling):
        return Annotated[hint, typer.Option(f"--{option}", help=_SAMPLING_HELP[name],
                                            rich_help_panel=SAMPLING, hidden=rare)]
    assert get_origin(hint) is Annotated  # the field describes its option itself
    if not rare:
        return hint
    option_info = copy(hint.__metadata__[0])
    option_info.hidden = True
    return Annotated[hint.__origin__, option_info]

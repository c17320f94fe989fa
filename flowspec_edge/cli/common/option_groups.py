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
# From the values of a command's parameters to the strategies that it runs; None: any.
StrategiesOf = Callable[[Mapping[str, Any]], Sequence[str] | None]


def with_dataclasses(without: Collection[str] = (), strategies: StrategiesOf | None = None,
                     rare: Collection[str] = ("top_k", "min_p"), **groups: Any,
                     ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace each named parameter of a command by one option per dataclass field not in ``without``; a group
    is a dataclass, or a ``partial`` of one with other defaults, which is called when the command runs.

    ``rare`` fields are shown by ``--help-all`` alone.  ``Params`` become ``--set``, which takes the
    parameters of ``strategies`` alone, and a hidden option for each that all strategies have; ``QuickGroup``
    reads options of the others.
    """
    shapes = {name: group.func() if isinstance(group, partial) else group() for name, group in groups.items()}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        given_own = inspect.signature(command, eval_str=True).parameters.values()
        own = [parameter for parameter in given_own if parameter.name not in groups]
        options = [option for group in shapes.values() for option in _options(group, without, rare)]

        @wraps(command)
        def run(**given: Any) -> Any:
            built = {}
            for name, group in shapes.items():
                values = {f.name: given.pop(f.name) for f in _fields(group, without)}
                if isinstance(group, Params):
                    values = {field: value for field, value in values.items() if value is not None}
                    settings = given.pop(_SET) or []
                built[name] = replace(groups[name](), **values)
            for name, group in shapes.items():
                if isinstance(group, Params) and settings:
                    named = strategies({**given, **built}) if strategies else None
                    built[name] = _set(built[name], settings, named, without)
            return command(**given, **built)

        run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
        return run

    return decorate


def of_strategy(given: Mapping[str, Any]) -> Sequence[str]:
    """The strategy of ``--strategy``."""
    return [given["strategy"]]


def _set(params: Params, settings: Sequence[str], names: Sequence[str] | None, without: Collection[str],
         ) -> Params:
    from flowspec_edge.strategies.params import all_parameters, set_parameters
    from flowspec_edge.strategies.registry import parameters_of, strategy_class

    read = [parameters_of(strategy_class(name)) for name in names] if names else [all_parameters()]
    known = {name: one for described in read for name, one in described.items() if name not in without}
    whose = ", ".join(names) if names else "any strategy"
    return set_parameters(params, settings, known, whose)


def _fields(group: Any, without: Collection[str]) -> list[Field[Any]]:
    """Those that become options; ``Params.own`` has names of its own."""
    return [field for field in fields(group) if field.name not in (*without, "own")]


def _options(group: Any, without: Collection[str], rare: Collection[str]) -> list[inspect.Parameter]:
    hints = get_type_hints(type(group), include_extras=True)
    found = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY,
            default=None if isinstance(group, Params) else getattr(group, field.name),
            annotation=_annotated(hints[field.name], group, field.name, field.name in rare))
        for field in _fields(group, without)
    ]
    if isinstance(group, Params):
        found.append(inspect.Parameter(_SET, inspect.Parameter.KEYWORD_ONLY, default=None,
                                       annotation=SetOption))
    return found


def _annotated(hint: Any, group: Any, name: str, rare: bool) -> Any:
    option = name.replace("_", "-")
    if isinstance(group, Params):
        kind = hint.__origin__
        declared = f"--{option}/--no-{option}" if kind is bool else f"--{option}"
        return Annotated[kind | None, typer.Option(declared, hidden=True)]
    if isinstance(group, Sampling):
        return Annotated[hint, typer.Option(f"--{option}", help=_SAMPLING_HELP[name],
                                            rich_help_panel=SAMPLING, hidden=rare)]
    assert get_origin(hint) is Annotated  # the field describes its option itself
    if not rare:
        return hint
    option_info = copy(hint.__metadata__[0])
    option_info.hidden = True
    return Annotated[hint.__origin__, option_info]

"""Values of strategies' parameters, by name: what a request carries, and what ``--set name=value`` makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flowspec_edge.errors import UsageError
from flowspec_edge.strategies.parameters import Declared, Parameter, Parameters, parameters
from flowspec_edge.strategies.registry import declared_by_strategies
from flowspec_edge.util.terminal import did_you_mean

DEFAULT_STRATEGY = "flowspec_plus"  # of requests without one


@dataclass(frozen=True, init=False)
class Params(Parameters):
    """Values of any strategies' parameters by name, such as ``Params(segment=8, pipedec_width=16)``.

    A strategy takes those that it declares; ``flowspec strategies NAME`` lists them.

    specific  names and values of those that only some strategies have

    UsageError for a name that no strategy declares, and for a value out of range.
    """

    specific: tuple[tuple[str, Any], ...] = ()

    def __init__(self, specific: Iterable[tuple[str, Any]] = (), **values: Any) -> None:
        values_by_name = {**dict(specific), **values}
        for name, parameter in parameters(Parameters).items():
            object.__setattr__(self, name, values_by_name.pop(name, parameter.default))
        object.__setattr__(self, "specific", tuple(sorted(values_by_name.items())))
        self.select(Parameters)
        if values_by_name:
            declarations = declared_by_strategies()
            if unknown := values_by_name.keys() - {name for declared in declarations for name in parameters(declared)}:
                available = all_parameters()
                raise UsageError(f"no parameter {min(unknown)!r}; {did_you_mean(min(unknown), available)}"
                                 "flowspec strategies NAME lists those of a strategy")
            for declared in declarations:
                if values_by_name.keys() & parameters(declared).keys():
                    self.select(declared)

    def select(self, declared: type[Declared]) -> Declared:
        """Return the values of the parameters that ``declared`` has; UsageError if they do not fit together."""
        values = {**{name: getattr(self, name) for name in parameters(Parameters)}, **dict(self.specific)}
        return declared(**{name: values[name] for name in parameters(declared) if name in values})

    def changed(self, **values: Any) -> Params:
        """Return a copy with other values of parameters."""
        return replace(self, **values)

    def flat(self) -> dict[str, Any]:
        """Every parameter of all strategies, by name."""
        specific = dict(self.specific)
        return {name: getattr(self, name, specific.get(name, parameter.default))
                for name, parameter in all_parameters().items()}

    def largest_segment(self) -> int:
        """Rows of the longest segment that any strategy may send."""
        return max(self.select(declared).largest_segment() for declared in declared_by_strategies())

    def largest_tree(self) -> int:
        """Nodes that any strategy may draft before one of them is verified."""
        return max(self.select(declared).largest_tree() for declared in declared_by_strategies())


def all_parameters() -> dict[str, Parameter]:
    """Every parameter of all strategies, by name."""
    declared_by_name = dict(parameters(Parameters))
    for declared in declared_by_strategies():
        declared_by_name = {**parameters(declared), **declared_by_name}
    return declared_by_name


def set_parameters(params: Params, settings: Iterable[str], parameters: Mapping[str, Parameter], owner: str,
                   ) -> Params:
    """Return ``params`` with every "name=value" of ``settings``; a dash counts as an underscore.

    UsageError for a name that is not in ``parameters``, the parameters of ``owner``, or for a value out of range.
    """
    changes = {}
    for setting in settings:
        written_name, equals, text = setting.partition("=")
        name = written_name.strip().replace("-", "_")
        if not equals or not name:
            first = next(iter(parameters.values()))
            raise UsageError(f"--set takes name=value, not {setting!r}, such as --set {first.name}="
                             f"{first.default}")
        if name not in parameters:
            raise UsageError(f"{owner} has no parameter {name!r}: {did_you_mean(name, parameters)}"
                             f"there are {', '.join(parameters)}")
        if name in changes:
            raise UsageError(f"--set gives {name} twice")
        changes[name] = parameters[name].read(text.strip())
    return params.changed(**changes)

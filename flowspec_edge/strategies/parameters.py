"""One parameter of a strategy, described for lists, and the reading of ``name=value``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

from flowspec_edge.errors import UsageError
from flowspec_edge.strategies.params import LONGEST_LOOK_UP, MAY_BE_ZERO, MOST, Params
from flowspec_edge.util.suggest import did_you_mean

COMMON = ("prefill_chunk", "segment")  # of all strategies
DRAFTED = ("draft", "rank", "tau", "ngram", "ngram_max", "ngram_min")  # of all that draft
_RANGES = {"tau": f"above 0, to {MOST}", "ngram_max": f"ngram_min to {LONGEST_LOOK_UP}",
           "ngram_min": "1 to ngram_max"}
_SWITCH = {"true": True, "yes": True, "on": True, "1": True,
           "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Parameter:
    """``kind``: its type; a Literal has its values as arguments."""

    name: str
    kind: Any
    default: Any
    meaning: str

    @property
    def range(self) -> str:
        if self.name in _RANGES:
            return _RANGES[self.name]
        if choices := get_args(self.kind):
            return ", ".join(choices)
        if self.kind is bool:
            return "true, false"
        if self.kind is str:
            return "text"
        least = "1" if self.kind is int and self.name not in MAY_BE_ZERO else "0"
        return f"{least} to {MOST}"

    def read(self, text: str) -> Any:
        """UsageError for a text that is not of the type; ``Params`` checks the range."""
        try:
            if self.kind is bool:
                return _SWITCH[text.lower()]
            return self.kind(text) if self.kind in (int, float) else text
        except (ValueError, KeyError):
            what = {int: "a whole number", float: "a number", bool: "true or false"}[self.kind]
            shown = text if len(text) <= 40 else f"{text[:40]}…"
            raise UsageError(f"{self.name} must be {what} ({self.range}), not {shown!r}") from None


def all_parameters() -> dict[str, Parameter]:
    hints = get_type_hints(Params, include_extras=True)
    return {f.name: Parameter(f.name, hints[f.name].__origin__, f.default, hints[f.name].__metadata__[0])
            for f in fields(Params)}


def set_parameters(params: Params, settings: Iterable[str], known: Collection[str], whose: str) -> Params:
    """``params`` with every "name=value" of ``settings``; a dash counts as an underscore.

    UsageError for a name that is not in ``known``, the parameters of ``whose``, or for a value out of range.
    """
    changes = {}
    every = all_parameters()
    for setting in settings:
        given, equals, text = setting.partition("=")
        name = given.strip().replace("-", "_")
        if not equals or not name:
            raise UsageError(f"--set takes name=value, not {setting!r}, such as --set {next(iter(known))}="
                             f"{every[next(iter(known))].default}")
        if name not in known:
            raise UsageError(f"{whose} has no parameter {name!r}: {did_you_mean(name, known)}"
                             f"there are {', '.join(known)}")
        if name in changes:
            raise UsageError(f"--set gives {name} twice")
        changes[name] = every[name].read(text.strip())
    return replace(params, **changes)

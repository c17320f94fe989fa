"""How a strategy declares its parameters, and the parameters that all strategies have.

Defaults are the papers' (FlowSpec: section IV-A).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import DRAFTS, OWN
from flowspec_edge.sampling.settings import Rank

LONGEST_BLOCK = 64  # PEARL's, when a draft pass costs next to nothing
LONGEST_LOOK_UP = 32  # steps and index entries a token
MOST = 65_536  # of any number
_MOST_ROWS = 8192  # of a segment: beyond, a stage's attention mask alone would need gigabytes
Declared = TypeVar("Declared", bound="Parameters")

COMMON = ("prefill_chunk", "segment")  # of all strategies
DRAFTED = ("draft", "rank", "tau", "ngram", "ngram_max", "ngram_min")  # of all that draft
_RANGES = {"tau": f"above 0, to {MOST}", "ngram_max": f"ngram_min to {LONGEST_LOOK_UP}",
           "ngram_min": "1 to ngram_max"}
_SWITCH = {"true": True, "yes": True, "on": True, "1": True,
           "false": False, "no": False, "off": False, "0": False}
_STRATEGY_DEFAULT = "own"  # the text of None, for a switch that each strategy sets by itself


def _number(value: float) -> str:
    return f"{value:.15g}"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a strategy.

    kind         its type; a Literal has its values as arguments, and a ``bool | None`` leaves the choice to
                 the strategy
    least, most  bounds of a number
    words        what a text may be; None: anything.  Its ``advice``, if it has one, ends the error for another text
    """

    name: str
    kind: Any
    default: Any
    meaning: str
    least: float
    most: float
    words: Collection[str] | None = None

    @property
    def range(self) -> str:
        if self.name in _RANGES:
            return _RANGES[self.name]
        if self.is_switch:
            return "true, false" if self.kind is bool else f"true, false, {_STRATEGY_DEFAULT}"
        choices = get_args(self.kind) or self.words
        if choices is not None:
            return ", ".join(choices)
        return "text" if self.kind is str else f"{_number(self.least)} to {_number(self.most)}"

    @property
    def is_switch(self) -> bool:
        return bool in (self.kind, *get_args(self.kind))

    def read(self, text: str) -> Any:
        """Raise UsageError for a text that is not of the type; :meth:`check` is for the range."""
        try:
            if self.is_switch:
                words = _SWITCH if self.kind is bool else {**_SWITCH, _STRATEGY_DEFAULT: None}
                return words[text.lower()]
            return self.kind(text) if self.kind in (int, float) else text
        except (ValueError, KeyError):
            type_name = {int: "a whole number", float: "a number"}.get(self.kind, "true or false")
            shortened = text if len(text) <= 40 else f"{text[:40]}…"
            raise UsageError(f"{self.name} must be {type_name} ({self.range}), not {shortened!r}") from None

    def check(self, value: Any) -> None:
        name, choices = self.name, get_args(self.kind) or self.words
        if self.is_switch and not (isinstance(value, bool) or (value is None and self.kind is not bool)):
            raise UsageError(f"{name} must be one of {self.range}, not {value!r}")
        if choices is not None and not self.is_switch and value not in choices:
            advice = getattr(self.words, "advice", "")
            raise UsageError(f"{name} must be {' or '.join(choices)}, not {value!r}{advice}")
        if self.kind not in (int, float):
            return
        allowed = (int, float) if self.kind is float else int
        if not isinstance(value, allowed) or isinstance(value, bool):
            type_name = "a number" if self.kind is float else "a whole number"
            raise UsageError(f"{name} must be {type_name} ({self.range}), not {value!r}")
        if not math.isfinite(value):
            raise UsageError(f"{name} must be a number ({self.range}), not {value}")
        if value < self.least:
            raise UsageError(f"{name} must be at least {_number(self.least)}, not {value}")
        if value > self.most:
            raise UsageError(f"{name} must be at most {_number(self.most)}, not {value}")


def parameters(declared: type[Parameters]) -> dict[str, Parameter]:
    """Return the parameters that a class declares, inherited ones first."""
    return _described(declared)  # type: ignore[arg-type]  # mypy takes the hash of its instances


@cache
def _described(declared: type[Parameters]) -> dict[str, Parameter]:
    by_name = {}
    for name, hint in get_type_hints(declared, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, (meaning, *bounds) = hint.__origin__, hint.__metadata__
            words = bounds.pop() if kind is str and bounds else None
            least = bounds[0] if bounds else int(kind is int)
            most = bounds[1] if len(bounds) > 1 else MOST
            by_name[name] = Parameter(name, kind, getattr(declared, name), meaning, least, most, words)
    return {name: by_name[name] for name in declared.__dataclass_fields__ if name in by_name}


@dataclass(frozen=True)
class Parameters:
    """The parameters that all strategies have.

    A strategy with more derives a frozen dataclass and names it as ``Strategy.parameters``.

    Lengths count tokens, depths count tree levels below the root.  A field is
    ``name: Annotated[kind, meaning, least, most] = default`` with a kind of int, float, bool, str, or a
    Literal of texts.  ``least`` and ``most`` are a number's bounds; without them an int begins at 1 and a
    float at 0, and both end at 65,536.  NaN and infinity are refused.  A derived
    ``__post_init__`` calls this one, and may raise UsageError.
    """

    prefill_chunk: Annotated[int, "prompt tokens a segment; 0: as many as give the first token soonest, by the stages' "
                                  "times", 0] = 0
    segment: Annotated[int, "l: the longest segment; a turn is the time of a full one"] = 16
    draft: Annotated[str, "what guesses: own, the strategy's own kind of draft model, or another; ngram needs none",
                     DRAFTS] = OWN
    rank: Annotated[Rank, "order of children when sampling: by the draft's confidence (draft), or with the noise that "
                          "the target will be sampled with (noise)"] = "noise"
    tau: Annotated[float, "softness of the noise ranking"] = 0.6
    ngram: Annotated[bool | None, "whether continuations from earlier in the text are drafted, too; own: by FlowSpec+ "
                                  "alone"] = None
    ngram_max: Annotated[int, "the longest run of tokens that is looked up in the text"] = 4
    ngram_min: Annotated[int, "the shortest run of tokens that is looked up"] = 2

    def __post_init__(self) -> None:
        for name, parameter in parameters(type(self)).items():
            parameter.check(getattr(self, name))
        if not self.tau > 0:
            raise UsageError(f"tau must be positive, not {self.tau}")
        if not self.ngram_min <= self.ngram_max <= LONGEST_LOOK_UP:
            raise UsageError(f"ngram_max must be ngram_min ({self.ngram_min}) to {LONGEST_LOOK_UP}, "
                             f"not {self.ngram_max}")
        if (rows := self.largest_segment()) > _MOST_ROWS:
            raise UsageError(f"a segment of {rows} rows is more than {_MOST_ROWS}: lower the tree, width, "
                             "gamma or branching that asks for it")

    def select(self, declared: type[Declared]) -> Declared:
        """Return the values of the parameters that ``declared`` has; defaults for those not given."""
        if isinstance(self, declared):
            return self
        values = {name: getattr(self, name) for name in parameters(declared) if hasattr(self, name)}
        return declared(**values)

    def largest_segment(self) -> int:
        """Rows of the longest segment that a strategy with these parameters may send."""
        return 1 + max(self.segment, LONGEST_BLOCK)

    def largest_tree(self) -> int:
        """Nodes that such a strategy may draft before any of them is verified; 0: few."""
        return 0

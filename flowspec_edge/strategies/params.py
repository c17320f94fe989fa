"""Parameters of all strategies, with their meanings; defaults are the papers' (FlowSpec: section IV-A)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import Annotated, Literal, get_args, get_type_hints

from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.settings import Rank
from flowspec_edge.util.suggest import did_you_mean

LONGEST_BLOCK = 64  # PEARL's, when a draft pass costs next to nothing
Draft = Literal["own", "eagle2", "eagle2-deep", "eagle3", "lm", "ngram"]
DEFAULT_STRATEGY = "flowspec_plus"  # of requests without one
PLUS_IDEAS = ("ahead", "curve", "learn", "lookup")
Canonical = Literal["all", "needed"]


@dataclass(frozen=True, slots=True)
class Params:
    """Lengths count tokens, depths count tree levels below the root."""

    tree_size: Annotated[int, "L: nodes of the initial tree, root not counted"] = 80
    width: Annotated[int, "k: children per expanded node, and nodes expanded per level"] = 10
    segment: Annotated[int, "l: the longest segment; a turn is the time of a full one"] = 16
    depth: Annotated[int, "d0: levels of the initial tree; EAGLE's depth 5 is 6 here"] = 5
    expand_depth: Annotated[int, "d_exp: levels of a context-aware expansion"] = 5
    expand_size: Annotated[int, "L_exp: nodes of a context-aware expansion"] = 64
    extend_depth: Annotated[int, "levels of a score-aware expansion"] = 2
    extend_size: Annotated[int, "nodes of a score-aware expansion"] = 48
    prefill_chunk: Annotated[int, "prompt tokens a segment"] = 64
    rank: Annotated[Rank, "how children are ranked when sampling: by the draft's confidence alone, or with "
                          "the noise that the target will be sampled with"] = "noise"
    tau: Annotated[float, "softness of the noise ranking"] = 0.6
    draft: Annotated[Draft, "the draft model: each strategy's own kind, or this one for all but SPD; ngram "
                            "looks up in the text and needs no model"] = "own"
    ngram: Annotated[bool, "merge look-up in the text into the draft model's children"] = False
    ngram_max: Annotated[int, "the longest run of tokens that is looked up in the text"] = 4
    ngram_min: Annotated[int, "the shortest run of tokens that is looked up"] = 2
    plus_width: Annotated[int, "nodes that a draft pass of FlowSpec+ expands"] = 10
    plus_rows: Annotated[int, "the longest segment of FlowSpec+; 0: by the stages' curve, else segment"] = 0
    plus_without: Annotated[str, "ideas of FlowSpec+ to switch off, separated by commas: "
                                 "ahead, curve, learn, lookup"] = ""
    pipedec_width: Annotated[int, "w: nodes of a layer (FlowSpec's comparison takes 16)"] = 32
    pipedec_children: Annotated[int, "c: children per node"] = 16
    pipeinfer_tokens: Annotated[int, "the longest micro-batch, in tokens of one sequence"] = 4
    pipeinfer_sequences: Annotated[int, "branches of a micro-batch"] = 3
    pipeinfer_accept: Annotated[float, "confidence cutoff at the start"] = 0.01
    pipeinfer_split: Annotated[float, "confidence from which a second child starts a branch"] = 0.8
    pipeinfer_recovery: Annotated[float, "added to the cutoff by every micro-batch until a run returns"] = 0.4
    pipeinfer_decay: Annotated[float, "taken off the cutoff by every attempt that it stopped"] = 0.01
    pipeinfer_canonical: Annotated[Canonical, "accepted tokens that get a one-token run: all, or only those "
                                              "in no run yet"] = "all"
    pearl_gamma: Annotated[int, "draft tokens a block; 0: as many as fit into one verification"] = 0
    speculative_gamma: Annotated[int, "draft tokens a verification"] = 4
    stpp_branching: Annotated[str, "children per node, level by level (SpecInfer's)"] = "1,1,3,1,1,1,1,1"
    spd_width: Annotated[int, "W: branches kept"] = 1

    def __new__(cls, *values: object, **named: object) -> Params:
        if unknown := [name for name in named if name not in cls.__slots__]:
            raise UsageError(f"no parameter {unknown[0]!r}; {did_you_mean(unknown[0], cls.__slots__)}"
                             "flowspec strategies NAME lists those of a strategy")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for f in fields(self):
            name, kind, value = f.name.replace("_", "-"), _TYPES[f.name], getattr(self, f.name)
            choices, least = get_args(kind), int(f.name not in MAY_BE_ZERO)
            if choices and value not in choices:
                raise UsageError(f"{name} must be {' or '.join(choices)}, not {value!r}")
            if kind is int and value < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")
            if kind is int and value > MOST:
                raise UsageError(f"{name} must be at most {MOST}, not {value}")
            if kind is float and value < 0:
                raise UsageError(f"{name} must not be negative, not {value}")
            if kind is float and not value <= MOST:
                raise UsageError(f"{name} must be a number up to {MOST}, not {value}")
        if not self.tau > 0:
            raise UsageError(f"tau must be positive, not {self.tau}")
        if not self.ngram_min <= self.ngram_max <= LONGEST_LOOK_UP:
            raise UsageError(f"ngram-max must be ngram-min ({self.ngram_min}) to {LONGEST_LOOK_UP}, "
                             f"not {self.ngram_max}")
        self.disabled_ideas()
        if (rows := self.largest_segment()) > _MOST_ROWS:
            raise UsageError(f"a segment of {rows} rows is more than {_MOST_ROWS}: lower the tree, width, "
                             "gamma or branching that asks for it")

    def disabled_ideas(self) -> frozenset[str]:
        names = frozenset(part.strip() for part in self.plus_without.split(",") if part.strip())
        if unknown := sorted(names - set(PLUS_IDEAS)):
            raise UsageError(f"plus-without knows {', '.join(PLUS_IDEAS)}, not {unknown[0]!r}")
        return names

    def stpp_levels(self) -> tuple[int, ...]:
        try:
            levels = tuple(int(part) for part in self.stpp_branching.split(","))
        except ValueError:
            levels = ()
        if not levels or min(levels) < 1:
            raise UsageError("stpp-branching must be positive numbers separated by commas, "
                             f"not {self.stpp_branching!r}")
        return levels

    def largest_segment(self) -> int:
        """Rows of the longest segment that any strategy may send."""
        levels = self.stpp_levels()
        static = sum(prod(levels[: i + 1]) for i in range(len(levels)))
        micro_batch = self.pipeinfer_tokens * self.pipeinfer_sequences
        chain = max(self.pearl_gamma, self.speculative_gamma)
        longest = max(self.segment, self.plus_rows, micro_batch, chain, LONGEST_BLOCK)
        return 1 + max(longest, self.tree_size, self.pipedec_width, self.spd_width, static)


MAY_BE_ZERO = ("pearl_gamma", "plus_rows")
MOST = 65_536  # of any number
LONGEST_LOOK_UP = 32  # steps and index entries a token
_MOST_ROWS = 8192  # of a segment: beyond, a stage's attention mask alone would need gigabytes
_TYPES = get_type_hints(Params)

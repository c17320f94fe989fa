"""Parameters of all strategies; defaults are their papers' values (FlowSpec: section IV-A)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import Literal, get_args, get_type_hints

from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.rule import Rank

LONGEST_BLOCK = 64  # PEARL's, when a draft pass costs next to nothing
Draft = Literal["own", "eagle2", "eagle2-deep", "eagle3", "lm", "ngram"]
DEFAULT_STRATEGY = "flowspec_plus"  # of requests without one
PLUS_IDEAS = ("ahead", "curve", "learn", "lookup")
Canonical = Literal["all", "needed"]


@dataclass(frozen=True, slots=True)
class Params:
    """Lengths count tokens, depths count tree levels below the root."""

    tree_size: int = 80  # L: nodes of the initial tree, root not counted
    width: int = 10  # k: children per expanded node, and nodes expanded per level
    segment: int = 16  # l: the longest segment
    depth: int = 5  # d0: levels of the initial tree
    expand_depth: int = 5  # d_exp: levels of a context-aware expansion
    expand_size: int = 64  # L_exp: nodes of a context-aware expansion
    extend_depth: int = 2  # levels of a score-aware expansion
    extend_size: int = 48  # nodes of a score-aware expansion
    prefill_chunk: int = 64  # prompt tokens a segment
    rank: Rank = "noise"  # how children are ranked when sampling
    tau: float = 0.6  # softness of the noise ranking
    draft: Draft = "own"  # the draft model: each strategy's own kind, or this one for all
    ngram: bool = False  # look-up in the text merged into the draft model's children
    ngram_max: int = 4  # the longest run of tokens that is looked up
    ngram_min: int = 2  # the shortest
    plus_width: int = 10  # nodes that a draft pass of FlowSpec+ expands
    plus_rows: int = 0  # the longest segment of FlowSpec+; 0: by the stages' curve, else ``segment``
    plus_without: str = ""  # ideas of FlowSpec+ to leave out, separated by commas (PLUS_IDEAS)
    pipedec_width: int = 32  # w: nodes of a layer (FlowSpec's comparison takes 16)
    pipedec_children: int = 16  # c: children per node
    pipeinfer_tokens: int = 4  # the longest micro-batch, in tokens of one sequence
    pipeinfer_sequences: int = 3  # branches of a micro-batch
    pipeinfer_accept: float = 0.01  # confidence cutoff at the start
    pipeinfer_split: float = 0.8  # confidence from which a second child starts a branch
    pipeinfer_recovery: float = 0.4  # added to the cutoff by every micro-batch until a run comes back
    pipeinfer_decay: float = 0.01  # taken off the cutoff by every attempt that it stopped
    pipeinfer_canonical: Canonical = "all"  # tokens that get a one-token run of their own
    pearl_gamma: int = 0  # draft tokens a block; 0: as many as fit into one verification
    speculative_gamma: int = 4  # draft tokens a verification
    stpp_branching: str = "1,1,3,1,1,1,1,1"  # children per node, level by level (SpecInfer's)
    spd_width: int = 1  # branches kept (W)

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):
            name, value = f.name.replace("_", "-"), getattr(self, f.name)
            choices = get_args(hints[f.name])
            if choices and value not in choices:
                raise UsageError(f"{name} must be {' or '.join(choices)}, not {value!r}")
            if hints[f.name] is int and value < (f.name not in _MAY_BE_ZERO):
                raise UsageError(f"{name} must be at least {int(f.name not in _MAY_BE_ZERO)}, not {value}")
            if hints[f.name] is int and value > _MOST:
                raise UsageError(f"{name} must be at most {_MOST}, not {value}")
            if hints[f.name] is float and value < 0:
                raise UsageError(f"{name} must not be negative, not {value}")
            if hints[f.name] is float and not value <= _MOST:
                raise UsageError(f"{name} must be a number up to {_MOST}, not {value}")
        if not self.tau > 0:
            raise UsageError(f"tau must be positive, not {self.tau}")
        if not self.ngram_min <= self.ngram_max <= _LONGEST_LOOK_UP:
            raise UsageError(f"ngram-max must be ngram-min ({self.ngram_min}) to {_LONGEST_LOOK_UP}, "
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


_MAY_BE_ZERO = ("pearl_gamma", "plus_rows")
_MOST = 65_536  # of any number
_LONGEST_LOOK_UP = 32  # steps and index entries a token
_MOST_ROWS = 8192  # of a segment: beyond, a stage's attention mask alone would need gigabytes

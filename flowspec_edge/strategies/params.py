"""Parameters of the tree strategies, with the FlowSpec paper's values as defaults (section IV-A)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flowspec_edge.errors import UsageError
from flowspec_edge.sampling import Rank


@dataclass(frozen=True, slots=True)
class Params:
    """All lengths count tokens, all depths count tree levels below the root."""

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

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "rank":
                if value not in ("draft", "noise"):
                    raise UsageError(f"rank must be draft or noise, not {value!r}")
            elif f.name == "tau":
                if not value > 0:
                    raise UsageError(f"tau must be positive, not {value}")
            elif value < 1:
                raise UsageError(f"{f.name.replace('_', '-')} must be at least 1, not {value}")

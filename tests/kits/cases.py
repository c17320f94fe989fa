"""Cases of a test from its axes: few of them, in which every two values of two axes meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

from flowspec_edge.strategies.registry import STRATEGIES

# Every kind of message to the stages is in one of their runs: prunes of a tree that is sent on and on, cancels of
# runs, trees of one round, layers of a tree, taps at every boundary, segments of a group that shares each layer,
# and single rows.  The others differ in what D0 decides, which tests/strategies holds for all of them.
DISTINCT = ("autoregressive", "chunk_pp", "flowspec", "flowspec_plus", "pipedec", "pipeinfer", "megatron", "spd")


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases, of one value of each axis, in which any two values of two axes meet: always the same ones."""
    pairs = list(combinations(range(len(axes)), 2))
    left = {(i, j, a, b) for i, j in pairs for a in range(len(axes[i])) for b in range(len(axes[j]))}
    found = []
    every = list(product(*(range(len(axis)) for axis in axes)))
    while left:
        best = max(every, key=lambda case: sum((i, j, case[i], case[j]) in left for i, j in pairs))
        left -= {(i, j, best[i], best[j]) for i, j in pairs}
        found.append(tuple(axis[place] for axis, place in zip(axes, best, strict=True)))
    return found


def strategies(*among: str) -> list[Any]:
    """The strategies, or those ``among`` them, as a test's parameters: `make soak` alone runs those that are not in
    ``DISTINCT``."""
    return [name if name in DISTINCT else pytest.param(name, marks=pytest.mark.soak)
            for name in among or STRATEGIES]

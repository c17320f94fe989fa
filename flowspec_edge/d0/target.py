"""What D0 asks of the target model: the tokens that follow the rows which come back from the stages.

``lm_head.LmHead`` computes with the output matrix; ``drivers.virtual.recorded.RecordedTarget`` knows what a model said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.d0.request import Likelihood
from flowspec_edge.messages import Payload
from flowspec_edge.sampling.rule import Sampling

# Of n rows, in a form that belongs to the target: tensors on its device, or arrays.  All can be sliced by rows.
States = Any  # [n, H]
Logits = Any  # [n, V]


class Target(Protocol):
    @property
    def vocabulary(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    def first_row_not_finite(self, hidden: Payload) -> int | None:
        """Return the first of the received rows with a NaN or an infinity; None if there is none."""

    def states(self, hidden: Payload) -> States:
        """Take in received post-norm hidden states [n, H]."""

    def stacked(self, rows: Sequence[tuple[States, int]]) -> States:
        """Return each row of these states, [len(rows), H], in memory of its own."""

    def joined(self, parts: Sequence[States]) -> States:
        """Return the rows of all parts."""

    def logits(self, states: States) -> Logits:
        """Compute the rows' logits."""

    def choose(self, logits: Logits, positions: NDArray[np.integer], sampling: Sampling,
               allowed: NDArray[np.uint8] | None = None) -> NDArray[np.int32]:
        """Choose the token after each row, int32 [n].

        ``positions`` [n] are the rows'; ``allowed``: the tokens to choose from, as ``sampler.choose`` takes them.
        """

    def likelihoods(self, states: States, tokens: Sequence[int], most: int) -> list[Likelihood]:
        """Return log-probabilities of the rows' successors ``tokens`` [n], and of the ``most`` likeliest tokens."""

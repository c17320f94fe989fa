"""The protocol of every drafter.

A drafter holds a model and its cache for one session.  It knows the committed text, the target's
features where the target has computed them, and the tree nodes it has expanded below the current
root.  It does not know which nodes were sent, verified or pruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from flowspec_edge.messages import Tap
from flowspec_edge.sampling import Rank, Sampling
from flowspec_edge.tree.requests import DraftRequest, Expansion


class Drafter(Protocol):
    """One draft model, one session at a time.

    ``taps``: after how many layers it must know the hidden state of every row whose successor is
    committed; :meth:`commit` comes after the :meth:`tap` calls with these.  Empty for most.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        """Forget everything; rank the children of the coming session like this."""

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        """Forget all but the first ``tokens`` > 0 committed tokens, for a session that goes on from there
        with other numbers: :meth:`reset`, but for a text that need not be committed again.

        False if it cannot, or has not been given so many: then it must be reset.
        """

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        """Append committed tokens; row i of ``features`` [n, H] *predicted* token i.

        ``features`` are the target's post-norm hidden states, on the drafter's device, and ``rows``
        their numbers in the ledger.  The very first token of a session has no predictor: it comes alone, with
        ``features=None``.  Cheap: the work is done by the next :meth:`expand`.
        """

    def expand(self, request: DraftRequest) -> Expansion:
        """One forward pass: everything committed since the last one, and the request's nodes."""

    def tap(self, message: Tap) -> None:
        """Hidden states of an inner layer, for drafters that asked for them (others ignore), be it
        with ``taps`` or because their strategy asks."""

"""The interface of every drafter, and the errors that they share.

A drafter holds a model and its cache for one session; it does not know what was sent, verified or pruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Tap
from flowspec_edge.sampling.rule import Rank, Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest

if TYPE_CHECKING:
    from torch import Tensor

NO_ROOT = -2  # no node has this id (-1 is the root's parent)


class Drafter(Protocol):
    """One draft model, one session at a time.

    ``taps``: layers after which it needs the hidden state of every row whose successor is committed; :meth:`tap`
    delivers these before :meth:`commit`.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        """Forget everything and begin a session with this ranking."""

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        """Begin anew as by :meth:`reset`, but keep the first ``tokens`` > 0 committed tokens, which get new numbers.

        Return False if the drafter cannot and must be reset.
        """

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        """Append committed tokens; row i of ``features`` [n, H] *predicted* token i.  :meth:`expand` computes.

        ``features`` are the target's post-norm hidden states, on the drafter's device, ``rows`` their
        numbers.  A session's first token has no predictor and comes alone, with ``features=None``.
        """

    def expand(self, request: DraftRequest) -> DraftOutput:
        """One forward pass over everything committed since the last one and the request's nodes."""

    def shares_passes_with(self, other: Drafter) -> bool:
        """Whether :meth:`expand_together` takes both."""
        return False

    @staticmethod
    def expand_together(requests: Sequence[tuple[Any, DraftRequest]]) -> list[DraftOutput]:
        """:meth:`expand` for requests, which have nodes, of drafters that share passes."""
        return [drafter.expand(request) for drafter, request in requests]

    def scores_only(self, request: DraftRequest) -> bool:
        """Whether :meth:`expand` ranks by an earlier pass alone, so that its price is not that of one."""
        return False

    def tap(self, message: Tap) -> None:
        """Hidden states of an inner layer, which ``taps`` or the strategy requested; by default not used."""
        return


def root_misplaced_error(root: DraftNode, tokens: int) -> ProtocolError:
    return ProtocolError(f"the root stands at position {root.position}, but the drafter was given a text of "
                         f"{tokens} tokens: tokens must be committed before they are drafted on")


def parent_missing_error(node: DraftNode) -> ProtocolError:
    return ProtocolError(f"draft node {node.id} was asked for before its parent {node.parent}")

"""The size of a candidate head (``drafting.candidates``), and which models get one; without torch."""

from __future__ import annotations

from dataclasses import dataclass

RANK = 256  # of the factor of the target's lm_head
COUNT = 128  # candidates of a row, of which ten or so become children
LEAST_COUNT = 16  # children of a node that a recorded pass ranks
LEAST_VOCABULARY = 100_000  # of a model that gets one unless it is told otherwise
_STEP = 32  # what the kernels' groups divide
_TILE = 8  # rows that a GPU's layout holds together


@dataclass(frozen=True)
class Candidates:
    """The size of a candidate head.

    ``count``: tokens of each row that are scored with lm_head's own rows; ``rank``: of the factor.
    """

    count: int
    rank: int


def candidates_for(count: int, vocabulary: int, width: int) -> Candidates | None:
    """Return the size of a candidate head for a target's lm_head [vocabulary, width].

    The number of candidates is ``count``, rounded up to whole tiles.  Return None if that is below ``LEAST_COUNT``.
    Return None, too, if lm_head is narrower than 64 or has fewer than four tokens for each candidate.
    """
    rank, count = min(RANK, width // 2 // _STEP * _STEP), -(-count // _TILE) * _TILE
    return Candidates(count, rank) if count >= LEAST_COUNT and rank and vocabulary >= 4 * count else None


def default_count(vocabulary: int) -> int:
    """Return how many candidates a model gets by default; 0: it gets no candidate head."""
    return COUNT if vocabulary >= LEAST_VOCABULARY else 0

"""How many experts of a layer a pass reads; without torch."""

from __future__ import annotations


def independent(experts: int, experts_per_token: int, rows: float) -> float:
    """Distinct experts that ``rows`` touch on average if each chooses ``experts_per_token`` of them by itself."""
    distinct: float = experts * (1 - (1 - experts_per_token / experts) ** rows)
    return distinct


def correlated(experts: int, experts_per_token: int, rows: float, correlation: float) -> float:
    """Return the distinct experts of ``rows`` whose choices have this correlation c: c k + (1 - c) U(n).

    At c = 1 all rows choose the same k experts, and at 0 each chooses by itself: U(n).
    """
    return correlation * experts_per_token + (1 - correlation) * independent(experts, experts_per_token, rows)

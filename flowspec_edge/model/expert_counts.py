"""How many experts of a layer a pass reads; without torch."""

from __future__ import annotations


def independent(experts: int, chosen: int, rows: float) -> float:
    """Distinct experts that ``rows`` touch on average if each chooses ``chosen`` of ``experts`` by itself."""
    distinct: float = experts * (1 - (1 - chosen / experts) ** rows)
    return distinct


def correlated(experts: int, chosen: int, rows: float, correlation: float) -> float:
    """Return the distinct experts of ``rows`` whose choices have this correlation c: c k + (1 - c) U(n).

    At c = 1 all rows choose the same k experts, and at 0 each chooses by itself: U(n).
    """
    return correlation * chosen + (1 - correlation) * independent(experts, chosen, rows)

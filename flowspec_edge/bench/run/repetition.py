"""Texts that repeat themselves: greedy decoding with a small model falls into loops, which are easy to draft
and flatter every figure."""

from __future__ import annotations

from collections.abc import Sequence

PERIOD, TIMES, SHORTEST = 32, 3, 32
DEFINITION = (f"at least {SHORTEST} tokens in a row that repeat with a period of at most {PERIOD} tokens, at "
              f"least {TIMES} times over")


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether ``tokens`` contain a run as in ``DEFINITION``."""
    for period in range(1, PERIOD + 1):
        needed = max(SHORTEST, TIMES * period) - period
        equal = 0  # tokens in a row that are equal to the one a period before
        for earlier, later in zip(tokens, tokens[period:], strict=False):
            equal = equal + 1 if earlier == later else 0
            if equal == needed:
                return True
    return False

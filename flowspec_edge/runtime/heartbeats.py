"""What was added to a stage's counters from one heartbeat to a later one.

Knows that a stage counts anew with each session that has no other beside it.  Does not know what the
counters are called, nor who is shown what they say.
"""

from __future__ import annotations

from collections.abc import Iterable

Counters = dict[str, float]


def growth(before: Counters, after: Counters, keys: Iterable[str]) -> Counters:
    """By how much each of ``keys`` has grown; a counter that a heartbeat does not tell is 0.

    ``before`` is the same stage's heartbeat before ``after``, both on all sessions together; {}: there
    was none.  ``since`` says with which session the counting began: where it differs, all that is
    counted now is new, be it less or already more than before.
    """
    same = before.get("since") == after.get("since")
    return {key: after.get(key, 0.0) - (before.get(key, 0.0) if same else 0.0) for key in keys}

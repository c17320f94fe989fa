"""How the requests of a batch share its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flowspec_edge.strategies.slot_worth import SlotWorth

_FREE = 1.05  # rows cost no time if a batch with them takes at most this many times one row's time
_PROMPT_SLOWDOWN = 1.25  # a prompt's rows may lengthen a batch with other rows by this factor
_STEP = 4  # ratio of the weights of two requests one priority apart; with 2 no difference was measured
_MOST_STEPS = 5  # further steps of priority make no difference: one row is guaranteed at any weight


def divide(offers: Sequence[Sequence[float]], seconds: Callable[[int], float] | None, stages: int,
           most: int, base_rows: int = 0, gained: float = 0.0, weights: Sequence[float] = (),
           slot: SlotWorth | None = None) -> list[int]:
    """Return how many rows of each request go into the batch.

    offers     for each request the probabilities that its rows become text, in the order of sending
    seconds    a stage's time by the number of rows; None if it is unknown
    most       the largest number of rows to return
    base_rows  rows that are in the batch already, which bring ``gained`` tokens
    weights    the requests' guaranteed shares are proportional to these; empty: the shares are equal
    slot       decides how many rows go if the model has experts

    Every request first gets up to its guaranteed share of the rows that cost no time, and at least one row.
    Then the likeliest rows of all requests follow.  Their number is the one with the most tokens per second.
    A stage's time beyond that of one row counts once for each stage, as in a segment of FlowSpec+.
    If the time is unknown, the batch has as many rows as the longest offer, and at least as many as requests.
    """
    if seconds is None:
        most = free = max(len(offers), *(len(offer) for offer in offers))
    else:
        free = _most_within(_FREE * seconds(1), seconds, most)
    weights = weights or [1.0] * len(offers)
    sure = [max(1, int(free * weight / sum(weights))) for weight in weights]
    rows = sorted((index >= sure[request], -worth, index, request) for request, offer in enumerate(offers)
                  for index, worth in enumerate(offer))[:most]
    if seconds is not None:
        if slot is not None:
            # One at least: segments that cannot be divided may take what a slot is worth in every slot.
            rows = rows[:max(1, slot.rows([-gain for _, gain, _, _ in rows], seconds, base_rows))]
        else:
            gains = gained + np.cumsum([-gain for _, gain, _, _ in rows])
            least = seconds(1)
            rates = [gain / (least + stages * (seconds(base_rows + n) - least))
                     for n, gain in enumerate(gains, 1)]
            # Of equal maxima take the last: where the curve is flat, further rows cost no time.
            rows = rows[:len(rows) - int(np.argmax(rates[::-1]))]
    shares = [0] * len(offers)
    for *_, request in rows:
        shares[request] += 1
    return shares


def divide_in_order(offers: Sequence[Sequence[float]], seconds: Callable[[int], float] | None, stages: int,
                    most: int, base_rows: int = 0, gained: float = 0.0) -> list[int]:
    """Divide rows as :func:`divide`, but give the first request the rows that it would get alone.

    Each later request, in turn, gets rows that cost no time beside the first request's, and at least one.
    """
    if seconds is None:
        most = max(len(offers), *(len(offer) for offer in offers))
    shares: list[int] = []
    for number, offer in enumerate(offers, 1):
        room = max(1, most - sum(shares) - (len(offers) - number))  # leaves one for each later request
        [share] = divide([offer[:room]], seconds, stages, room, base_rows, gained)
        base_rows, gained = base_rows + share, gained + sum(offer[:share])
        shares.append(share)
        if seconds is not None and number == 1:
            most = min(most, share + _most_within(_FREE * seconds(base_rows), seconds, base_rows + most) - base_rows)
    return shares


def fair_weights(callers: Sequence[tuple[str, ...]], priorities: Sequence[int]) -> list[float]:
    """Return each request's weight.

    Callers weigh the same at every level of their paths. A caller's requests share its weight; each step of
    priority below the caller's highest divides a request's part by four.
    """
    weights = [1.0] * len(callers)
    for level in range(max(map(len, callers), default=0)):
        for i, caller in enumerate(callers):
            weights[i] /= len({other[:level + 1] for other in callers if other[:level] == caller[:level]})
    for caller in set(callers):
        requests = [i for i, other in enumerate(callers) if other == caller]
        first = min(priorities[i] for i in requests)
        parts = [1 / _STEP ** min(priorities[i] - first, _MOST_STEPS) for i in requests]
        for i, part in zip(requests, parts, strict=True):
            weights[i] *= part / sum(parts)
    return weights


def prompt_rows_beside(seconds: Callable[[int], float] | None, others: int, most: int) -> int:
    """Return how many rows of prompts a batch with ``others`` rows may have without delaying those much.

    At least one, at most ``most``.
    """
    if seconds is None or not others:
        return most
    return max(1, _most_within(_PROMPT_SLOWDOWN * seconds(others), seconds, others + most) - others)


def _most_within(limit: float, seconds: Callable[[int], float], most: int) -> int:
    """Return the most rows whose time does not exceed ``limit``; at least one."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if seconds(middle) <= limit else (low, middle - 1)
    return low

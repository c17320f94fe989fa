"""How many rows go where every row costs time: against the best of all fixed numbers, and a flat curve."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kits.scripted_strategy import ROOT, A, B, Device0

from flowspec_edge.model.expert_counts import correlated
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.slot_worth import SlotWorth


def touching(correlation: float) -> Callable[[int], float]:
    """A stage of Qwen3-30B-A3B: 6 ms, and 0.9 for every expert of 128 that its rows touch, 8 each."""
    return lambda rows: 6.0 + 0.9 * correlated(128, 8, max(1, rows), correlation)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("worths", [[0.9, 0.1, 0.05, 0.01], [0.5, 0.4, 0.3, 0.3], [0.2] * 20])
def test_a_constant_worth_gives_the_best_fixed_number(correlation: float, worths: list[float]) -> None:
    """Time beyond one row's counts once per stage."""
    slot, seconds = SlotWorth(2), touching(correlation)
    sent = [slot.rows(worths, seconds) for _ in range(5)]

    def rate(rows: int) -> float:
        return sum(worths[:rows]) / (seconds(1) + 2 * (seconds(rows) - seconds(1)))

    best = max(range(1, len(worths) + 1), key=rate)
    assert len(set(sent)) == 1
    assert rate(sent[0]) == pytest.approx(rate(best))


def test_one_slot_changes_little_and_many_change_all() -> None:
    slot, seconds = SlotWorth(2), touching(0.0)
    lonely, many = [0.9] + [0.01] * 15, [0.6] * 16
    assert [slot.rows(lonely, seconds) for _ in range(9)] == [1] * 9
    assert slot.rows(many, seconds) < 3
    assert [slot.rows(many, seconds) for _ in range(90)][-1] > 8


def test_rows_that_cost_nothing_all_go() -> None:
    slot = SlotWorth(2)
    assert slot.rows([0.5, 0.001, 0.001], lambda rows: 1.0) == 3
    assert slot.rows([0.5, 0.001, 0.001], lambda rows: 1.0, base_rows=1) == 3
    assert slot.rows([], lambda rows: 1.0) == 0


def test_flowspec_plus_asks_it_for_sparse_models_alone() -> None:
    """A slot with ten rows of .08 after one with a single likely row, which the mean remembers."""
    sent = {}
    for sparse in (False, True):
        pipeline = Pipeline(4, slot_seconds=lambda rows: 1.0 + 0.05 * (rows - 1), sparse=sparse)
        d0 = Device0("flowspec_plus", pipeline, plus_without="learn,lookup")
        d0.send()
        d0.draft({ROOT: [(A, 0.9), (B, 0.001)]})
        assert d0.layer() == [A]
        d0.draft({A: [(1000 + i, 0.09) for i in range(10)]})
        sent[sparse] = len(d0.layer())
    assert sent == {False: 10, True: 1}

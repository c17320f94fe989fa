"""What PipeInfer sends, cancels and drafts, event by event."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kits.scripted_strategy import OTHER, ROOT, A, B, C, D, Device0, E, F, G, tokens

from flowspec_edge.messages import Cancel, Segment, unpack_bits
from flowspec_edge.strategies.pipeinfer import PipeInfer


def cancelled(d0: Device0) -> list[int]:
    hints = d0.strategy.controls()
    assert all(isinstance(hint, Cancel) for hint in hints)
    return [run for hint in hints if isinstance(hint, Cancel) for run in hint.runs]


def eager(stages: int = 4, **params: int | float | str) -> Device0:
    """Micro-batches of one level with branches, and a cutoff that does not rise."""
    return Device0("pipeinfer", stages, **{
        "pipeinfer_tokens": 1, "pipeinfer_sequences": 2, "pipeinfer_split": 0.1,
        "pipeinfer_recovery": 0.0, **params})


def torn(d0: Device0) -> Segment:
    """The root is sent; A or B, then C below A and D below B, then E below C are drafted."""
    root = d0.send()
    d0.draft({ROOT: [(A, 0.5), (B, 0.4)]})
    d0.draft({A: [(C, 0.9)], B: [(D, 0.9)]})
    d0.draft({C: [(E, 0.9)]})
    return root


def test_a_miss_cancels_all_speculation_from_the_back() -> None:
    d0 = eager()
    root = torn(d0)
    runs = [d0.send() for _ in range(3)]
    assert [tokens(run) for run in runs] == [[A, B], [C, D], [E]]
    assert d0.back(root, OTHER) == [(OTHER, False)]
    assert cancelled(d0) == [run.run for run in reversed(runs)]
    assert d0.strategy.controls() == []
    assert d0.layer() == [OTHER]


def test_only_a_run_without_a_living_row_is_cancelled() -> None:
    d0 = eager()
    root = torn(d0)
    runs = [d0.send() for _ in range(3)]
    assert d0.back(root, B) == [(B, True)]
    assert cancelled(d0) == [runs[2].run]
    canonical = d0.send()
    assert tokens(canonical) == [B]
    assert d0.back(runs[0], C, OTHER) == [(OTHER, False)]
    assert cancelled(d0) == [runs[1].run]  # never the canonical one


def test_dead_rows_that_wait_are_not_sent() -> None:
    d0 = eager()
    root = torn(d0)
    d0.send()
    d0.back(root, B)
    assert [d0.layer() for _ in range(3)] == [[B], [D], []]


def test_a_dead_micro_batch_does_not_hold_drafting_back() -> None:
    d0 = eager(stages=1)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.5), (B, 0.4)]})
    d0.draft({A: [(C, 0.9)]})
    assert d0.asked() == []
    d0.back(root, B)
    assert d0.asked() == [B]
    assert [d0.layer(), d0.layer()] == [[B], []]


def test_speculation_goes_on_at_the_root_when_its_tips_died() -> None:
    d0 = eager()
    root = torn(d0)
    for _ in range(3):
        d0.send()
    d0.draft({E: [(F, 0.9)]})
    d0.back(root, B)
    assert d0.asked() == [B]


def test_no_more_micro_batches_than_the_pipeline_holds_and_one() -> None:
    d0 = eager(stages=1)
    d0.send()
    d0.chain(ROOT, A, B)
    assert d0.asked() == []


@pytest.mark.parametrize("canonical", ["all", "needed"])
def test_a_canonical_run_repeats_a_row_without_seeing_it(canonical: str) -> None:
    d0 = eager(pipeinfer_canonical=canonical)
    root = d0.send()
    d0.chain(ROOT, A)
    run = d0.send()
    d0.back(root, A)
    if canonical == "needed":
        assert d0.layer() == []
        return
    again = d0.send()
    assert tokens(again) == [A]
    assert again.positions.tolist() == run.positions.tolist()
    seen = again.base + np.flatnonzero(unpack_bits(again.bits, again.stop - again.base)[0])
    assert seen.tolist() == again.numbers.tolist()  # beside the text, to which A belongs only now
    assert run.numbers[0] not in again.committed
    assert d0.layer() == []
    assert d0.back(run, OTHER) == [(OTHER, False)]
    assert d0.send().committed.tolist() == run.numbers.tolist()


def test_a_canonical_run_waits_for_room() -> None:
    d0 = eager()
    root = torn(d0)
    runs = [d0.send() for _ in range(3)]
    d0.back(root, OTHER)
    fresh = d0.send()
    d0.chain(OTHER, G)
    d0.send()
    assert d0.back(fresh, G) == [(G, True)]
    assert d0.back(runs[0]) == d0.back(runs[1]) == []
    assert d0.layer() == [G]


def test_no_canonical_run_for_a_row_whose_output_is_here() -> None:
    d0 = eager()
    root = d0.send()
    d0.chain(ROOT, A)
    run = d0.send()
    d0.chain(A, B)
    d0.send()
    d0.back(root, A)
    d0.back(run, B)
    assert [d0.layer(), d0.layer()] == [[B], []]


def test_a_miss_before_the_canonical_run_loses_no_commit() -> None:
    d0 = eager()
    root = d0.send()
    d0.chain(ROOT, A)
    run = d0.send()
    d0.back(root, A)
    assert d0.back(run, OTHER) == [(OTHER, False)]
    assert d0.send().committed.tolist() == run.numbers.tolist()


@pytest.mark.parametrize(("split", "rows"), [(0.3, [A, B]), (0.4, [A])])
def test_a_second_child_starts_a_branch_from_the_split_on(split: float, rows: list[int]) -> None:
    d0 = eager(pipeinfer_split=split)
    d0.send()
    d0.draft({ROOT: [(A, 0.5), (B, 0.35)]})
    assert d0.layer() == rows


def test_where_a_micro_batch_ends() -> None:
    d0 = eager(pipeinfer_tokens=3, pipeinfer_accept=0.5)
    d0.send()
    d0.chain(ROOT, A, B)
    assert d0.layer() == []
    d0.chain(B, C)
    assert d0.layer() == [A, B, C]
    d0.chain(C, D)
    d0.chain(D, E, confidence=0.4)
    assert d0.layer() == [D]


def test_the_cutoff_rises_falls_and_is_reset() -> None:
    d0 = eager(pipeinfer_accept=0.01, pipeinfer_recovery=0.4, pipeinfer_decay=0.02)
    strategy = d0.strategy
    assert isinstance(strategy, PipeInfer)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.05)]})
    assert math.isclose(strategy.cutoff, 0.41)
    run = d0.send()
    d0.draft({A: [(B, 0.38)]})
    assert math.isclose(strategy.cutoff, 0.39)
    assert (d0.asked(), d0.layer()) == ([], [])  # another attempt with the same answer
    assert math.isclose(strategy.cutoff, 0.37)
    assert d0.asked() == [B]
    assert d0.layer() == [B]
    assert math.isclose(strategy.cutoff, 0.77)
    assert d0.back(root, A) == [(A, True)]
    assert math.isclose(strategy.cutoff, 0.01)
    d0.back(run, OTHER)
    assert math.isclose(strategy.cutoff, 0.01)


def test_without_decay_a_failed_attempt_waits_for_text() -> None:
    d0 = eager(pipeinfer_accept=0.5, pipeinfer_decay=0.0)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.4)]})
    assert d0.asked() == []
    d0.back(root, OTHER)
    d0.send()
    assert d0.asked() == [OTHER]

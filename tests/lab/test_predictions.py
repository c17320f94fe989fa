"""Predictions against direct runs in virtual time, and against arithmetic."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from kits.planned_boards import board, problem, profile, size

from flowspec_edge.boards.planning.one_board import best_alone
from flowspec_edge.boards.planning.planner import CandidateBoard, plan
from flowspec_edge.boards.planning.scaling import scaled
from flowspec_edge.cli.common.workload import shipped_recording
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import StageCurve
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.recorded import request_of
from flowspec_edge.drivers.virtual.recording import load_recording
from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.predictions import (
    Prediction,
    Workers,
    compare,
    predict,
    predict_alone,
)
from flowspec_edge.strategies.params import Params


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [Request(list(range(7, 7 + n)), max_new_tokens=10, params=Params(draft="eagle2")) for n in (5, 9)]


def test_an_even_plan_is_virtual_time_under_its_profile(model: Path, requests: list[Request]) -> None:
    of = size(layers=8)
    boards = [CandidateBoard(f"b{i}", scaled(profile(), of)[0]) for i in range(3)]
    made = plan(boards, problem(of))
    assert [s.layers for s in made.stages] == [(0, 4), (4, 8)]
    steps: list[str] = []
    found = predict(made, ["flowspec", "chunk_pp"], model, requests, steps.append)
    assert steps == ["flowspec", "flowspec", "chunk_pp", "chunk_pp"]
    cluster = VirtualCluster(model, 2, boards[0].profile)
    for prediction in found:
        stats = [cluster.generate(Request(r.prompt, prediction.strategy, 10, params=r.params)).stats
                 for r in requests]
        assert prediction.tokens_per_second == pytest.approx(sum(s.tokens_per_second for s in stats) / 2)
        assert prediction.tokens_per_turn == pytest.approx(sum(s.alt for s in stats) / 2)
    assert found[0].speedup == pytest.approx(found[0].tokens_per_second / found[1].tokens_per_second)
    assert found[1].speedup == 1
    assert predict(made, ["flowspec"], model, requests[:1])[0].speedup is None


def test_processes_predict_what_one_does() -> None:
    of, recording = size(layers=8), load_recording(shipped_recording("demo"))
    made = plan([CandidateBoard(f"b{i}", scaled(profile(), of)[0]) for i in range(3)], problem(of))
    asked = [request_of(text, recording, 12, params=Params(draft=recording.draft)) for text in recording.texts[:2]]
    steps: list[str] = []
    with Workers([recording], 2) as workers:
        found = predict(made, ["flowspec", "chunk_pp"], recording, asked, steps.append, workers=workers)
        less = predict(made, ["flowspec"], recording, asked, right_children=.5, workers=workers)
    assert steps == ["flowspec", "flowspec", "chunk_pp", "chunk_pp"]
    assert found == predict(made, ["flowspec", "chunk_pp"], recording, asked)
    assert less == predict(made, ["flowspec"], recording, asked, right_children=.5)


def test_a_killed_process_is_one_line() -> None:
    of, recording = size(layers=8), load_recording(shipped_recording("demo"))
    made = plan([CandidateBoard(f"b{i}", scaled(profile(), of)[0]) for i in range(3)], problem(of))
    asked = [request_of(recording.texts[0], recording, 12, params=Params(draft=recording.draft))]
    others = multiprocessing.active_children()
    with Workers([recording], 1) as workers:
        [process] = set(multiprocessing.active_children()).difference(others)
        os.kill(process.pid or 0, signal.SIGKILL)
        with pytest.raises(FlowspecError, match="a process that simulates was killed"):
            predict(made, ["flowspec"], recording, asked, workers=workers)


def test_different_boards_take_their_own_times(model: Path, requests: list[Request]) -> None:
    of = size(layers=9)
    slow, quick = profile(layer_ms=6.0, lm_head_ms=4.0), profile(layer_ms=3.0, mbps=500, latency_ms=1.0)
    profiles = {"d": slow, "slow": slow, "quick": quick}
    boards = [CandidateBoard(name, scaled(p, of)[0]) for name, p in profiles.items()]
    made = plan(boards, problem(of))
    [plain] = predict(made, ["autoregressive"], model, requests)
    hidden = 4096 * 2 * 8
    computes = sum(s.board.profile.stage_seconds(1, s.layers[1] - s.layers[0]) for s in made.stages)
    assert [s.board.name for s in made.stages] == ["quick", "slow"]
    # D0 to quick, quick to slow, slow to D0: a hop goes at the slower port's pace.
    hops = 1.0e-3 + (1.0e-3 + hidden / 500e6) + (0.2e-3 + hidden / 1000e6)
    d0 = made.d0.profile.lm_head.ms / 1e3
    # What is left over are headers: some hundred bytes a hop.
    assert 1 / plain.tokens_per_second == pytest.approx(computes + hops + d0, rel=1e-3)


def test_the_planned_context_is_charged(model: Path, requests: list[Request]) -> None:
    of = size(layers=8)
    curve = StageCurve(layers=1, rows=[64], ms=[5.0], context_ms=[2.0])
    own = scaled(profile(), of)[0].model_copy(update={"stage": curve})
    short, long = problem(of, context=1000), problem(of, context=3000)
    alone = CandidateBoard("big", own)
    [_, at_short] = predict_alone(alone, short, model, requests)
    [_, at_long] = predict_alone(alone, long, model, requests)
    assert at_short.strategy == "autoregressive"
    # D0 and V1 on one board: no link, so a token is its layers and lm_head.
    head = own.lm_head.ms / 1e3
    assert 1 / at_short.tokens_per_second == pytest.approx(8 * 7e-3 + head, rel=1e-6)
    assert 1 / at_long.tokens_per_second == pytest.approx(8 * 11e-3 + head, rel=1e-6)


def test_best_alone_is_the_fastest_board_that_holds_everything() -> None:
    p = problem(size(layers=4))
    boards = [board("small", usable_mb=2500, layer_ms=0.1), board("slow", usable_mb=9000),
              board("quick", usable_mb=9000, layer_ms=3.0)]
    found = best_alone(boards, p)
    assert found is not None
    assert found.name == "quick"
    assert best_alone(boards[:1], p) is None


def test_one_board_is_enough_if_as_fast() -> None:
    own = [Prediction("speculative", 10.0, 1.0), Prediction("autoregressive", 4.0, 1.0)]
    more = [Prediction("flowspec", 10.0, 1.0), Prediction("chunk_pp", 6.0, 1.0)]
    x, p = board("x"), problem(size(layers=2))
    same = compare(x, p, own, 5, more)
    assert same.enough
    for part in ("one board is enough", "x alone", "10.00 tokens/s with speculative",
                 "5 boards 10.00 with flowspec"):
        assert part in same.text
    slower = compare(x, p, own, 5, [Prediction("flowspec", 10.1, 1.0)])
    assert not slower.enough
    assert slower.text.startswith("x alone makes 10.00")
    only = compare(x, p, own, 1, [])
    assert only.text == "one board is enough: x alone makes 10.00 tokens/s with speculative"
    seconds = x.profile.stage_seconds(1, 2, p.context) + x.profile.verify_seconds(1)
    assert only.plain_tokens_per_second == pytest.approx(1 / seconds)

"""PipeInfer: runs, cancellation, and what its paper promises when the draft model is poor."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from flowspec_edge.d0.request import Request, Result
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.clock import EventClock, Span
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.stage import VirtualStage
from flowspec_edge.messages import Cancel, Credit, Open, Output
from flowspec_edge.stage.core import Outgoing
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.strategies.params import Params
from flowspec_edge.tree.segment_builder import SegmentBuilder

PROFILE = load_profile("paper-7b")
SLOT = PROFILE.stage_seconds(1, 8)


@cache
def cluster(model: Path) -> VirtualCluster:
    return VirtualCluster(model, 4, PROFILE)


@cache
def run_once(model: Path, prompt: tuple[int, ...], name: str, params: Params) -> tuple[Result, list[Span]]:
    made = cluster(model)
    result = made.generate(Request(list(prompt), name, 24, params=params))
    return result, list(made.spans)


def run(model: Path, prompt: list[int], name: str, **params: object) -> tuple[Result, list[Span]]:
    """A text in virtual time, which is the same each time, and what the devices did."""
    return run_once(model, tuple(prompt), name, Params(**params))  # type: ignore[arg-type]


def test_a_poor_draft_costs_next_to_nothing(untrained_draft_model: Path,
                                            demo_prompts: list[list[int]]) -> None:
    """Near-zero slowdown at poor acceptance; time to first token as in plain decoding."""
    plain = run(untrained_draft_model, demo_prompts[0], "autoregressive")[0]
    ours = run(untrained_draft_model, demo_prompts[0], "pipeinfer")[0]
    assert ours.tokens == plain.tokens
    assert ours.stats.ttft_s == pytest.approx(plain.stats.ttft_s, rel=0.1)
    assert ours.stats.tokens_per_second > 0.97 * plain.stats.tokens_per_second
    assert ours.stats.itl_p95_s < 1.05 * plain.stats.itl_p95_s


def test_a_cancel_stops_a_stage_between_layers(demo_model: Path, demo_prompts: list[list[int]]) -> None:
    """A stage has 8 of the profile's layers: broken off after 0 to 8 of them, and never in between."""
    _, spans = run(demo_model, demo_prompts[0], "pipeinfer")
    broken_off = [s for s in spans if s.cancelled]
    assert broken_off
    for span in broken_off:
        layers = (span.end - span.start) / (SLOT / 8)
        assert layers == pytest.approx(round(layers), abs=1e-6)
        assert round(layers) <= 8
    assert any(s.end - s.start < 0.9 * SLOT for s in broken_off)


def test_a_cancel_costs_the_layer_that_it_comes_in(eight_layers: Path) -> None:
    """A stage of eight layers, a second each, gets four runs at once; two are cancelled at 9.5 s."""
    clock, builder = EventClock(), SegmentBuilder()
    sent: list[Outgoing] = []
    spans: list[Span] = []
    stage = VirtualStage(1, clock, StageEngine(load_shard(eight_layers / "target", 0, 1, "fp32")),
                         lambda rows, context, correlation, alike: 8.0, 8, sent.append, spans)
    stage.receive(Open(0, 0, 16))
    root = builder.add(1, 0, committed=True)
    stage.receive(builder.seal())
    for token in (2, 3, 4):
        builder.add(token, 1, root)
        stage.receive(builder.seal())
    clock.at(9.5, lambda: stage.receive(Cancel(0, 0, (2, 1))))
    clock.at(12.0, lambda: stage.receive(Cancel(0, 0, (2, 1))))  # again, and late
    while clock.step():
        pass
    assert [(s.start, s.end, s.run, s.cancelled) for s in spans] == [
        (0, 8, 0, False), (8, 10, 1, True), (10, 18, 3, False)]
    assert [(m.run, len(m.numbers)) for m in sent if isinstance(m, Output)] == [
        (0, 1), (1, 0), (2, 0), (3, 1)]
    assert [m.run for m in sent if isinstance(m, Credit)] == [0, 1, 2, 3]
    work = stage.work(0)
    assert (work.cancelled, work.compute_s, work.segments, work.rows) == (2, 18, 2, 2)


def test_real_stages_skip_cancelled_runs(demo_model: Path, demo_prompts: list[list[int]]) -> None:
    """A stage may be through with a run before its cancel comes; of a dozen texts' cancels one is in time."""
    virtual, skipped = VirtualCluster(demo_model, 2, PROFILE), 0.0
    with ProcessCluster(ClusterSpec(demo_model, 2)).start() as cluster:
        for prompt in demo_prompts[:12]:
            request = Request(prompt, "pipeinfer", 32)
            result = cluster.generate(request)
            assert result.tokens == virtual.generate(request).tokens
            skipped += sum(stage["cancelled"] for stage in result.stats.stages)
            if skipped:
                break
    assert skipped > 0

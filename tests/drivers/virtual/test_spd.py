"""SPD against the law of its paper, n N / K = n / (n (1 - a) + a), and against plain decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kits.requests import text

from flowspec_edge.d0.lm_head import LmHead
from flowspec_edge.d0.request import Request, Stats
from flowspec_edge.d0.scheduler import Scheduler
from flowspec_edge.d0.session import DraftPass, DraftSession, Task, Verify
from flowspec_edge.device_profile import DraftCost, Profile, load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.spd.strategy import SPD
from flowspec_edge.messages import Credit, Output, Payload, Segment, Tap
from flowspec_edge.sampling.rule import Rank, Sampling
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import Params
from flowspec_edge.tree.draft_api import DraftOutput, DraftRequest
from flowspec_edge.tree.segment_builder import SegmentBuilder

GREEDY, SAMPLED = Sampling(), Sampling(1.0, seed=8)


def drafts_taking(profile: Profile, ms: float) -> Profile:
    return profile.model_copy(update={"draft": DraftCost(pass_ms=ms, lm_pass_ms=ms, spd_pass_ms=ms)})


@pytest.mark.parametrize(("stages", "width", "sampling"), [
    (1, 1, GREEDY), (4, 4, SAMPLED), (8, 1, GREEDY)])
def test_cycles_are_those_of_the_law(demo_model: Path, demo_prompts: list[list[int]], ideal_profile: Profile,
                                     stages: int, width: int, sampling: Sampling) -> None:
    """K is counted in slots of a stage; a, the share of tokens that were foreseen, from the commits."""
    cluster = VirtualCluster(demo_model, stages, ideal_profile)
    n, tokens, hits, cycles = stages, 0, 0, 0.0
    for prompt in demo_prompts[1:2]:
        s = cluster.generate(Request(prompt, "spd", 25, sampling, Params(spd_width=width))).stats
        tokens, hits, cycles = tokens + 24, hits + s.accepted, cycles + s.turns
        # A text that ends in a hit leaves a round unfinished: its fill of the pipeline is not the law's.
        unfinished = s.rounds - (24 - s.accepted)
        assert unfinished in (0, 1)
        cycles -= unfinished * (n - 1)
    a = hits / tokens
    assert 0.1 < a < 1.0
    assert n * tokens / cycles == pytest.approx(n / (n * (1 - a) + a))


@pytest.mark.slow
def test_a_draft_pass_hides_behind_the_pipelines_step(demo_model: Path, demo_prompts: list[list[int]],
                                                      ideal_profile: Profile) -> None:
    """Section 3.4: it begins when the newest token is sent, so it costs nothing up to a stage's time."""
    slot_ms = ideal_profile.stage_seconds(1, ideal_profile.model.layers / 4) * 1e3

    def run(slots: float) -> Stats:
        profile = drafts_taking(ideal_profile, slots * slot_ms)
        return VirtualCluster(demo_model, 4, profile).generate(Request(demo_prompts[0], "spd", 25)).stats

    free, hidden, slow = run(0), run(0.99), run(1.5)
    assert hidden.accepted == free.accepted
    assert hidden.turns == pytest.approx(free.turns)
    assert slow.turns > 1.1 * free.turns


@pytest.mark.parametrize("width", [1, 4])
def test_more_stages_than_layers_by_far(small_vocabulary_model: Path, width: int) -> None:
    cluster = VirtualCluster(small_vocabulary_model, 5, load_profile("paper-7b"))
    for sampling in (GREEDY, SAMPLED):
        result = cluster.generate(Request([3, 1, 4], "spd", 12, sampling, Params(spd_width=width)))
        assert result.tokens == text(small_vocabulary_model, (3, 1, 4), 12, sampling)
        assert result.stats.accepted > 0


@pytest.mark.parametrize(("depths", "taps", "prompt"), [
    ((2, 4, 6, 8), (1, 2, 3, 4, 6), (4,)),
    ((4, 8), (2, 4), (4,)),
    ((8,), (4,), (4,)),
    ((3, 5, 7), (1, 2, 3, 5), (3,)),
    ((1, 2, 2, 2), (1,), (1,)),  # the last state comes as an output, from whichever stage
    ((1,), (), ()),
])
def test_taps_are_every_boundary_and_its_half(depths: tuple[int, ...], taps: tuple[int, ...],
                                              prompt: tuple[int, ...]) -> None:
    strategy = SPD(Params(draft="lm"), SegmentBuilder(), Pipeline(len(depths), depths))
    assert strategy.segment_taps == taps
    assert strategy.prompt_taps == prompt
    assert strategy.drafts_with(strategy.params) == "spd"  # no other draft model reads the pipeline


class Witness:
    """A drafter that writes down when it was shown a tap and when it was asked."""

    taps = ()

    def __init__(self) -> None:
        self.seen: list[str | int] = []

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self.seen.clear()

    def commit(self, tokens: object, features: object, rows: object = ()) -> None:
        pass

    def expand(self, request: DraftRequest) -> DraftOutput:
        self.seen.append("pass")
        return DraftOutput(np.array([[7]], np.int32), np.array([[-0.1]]))

    def tap(self, message: Tap) -> None:
        self.seen.append(message.layer)


def test_a_pass_works_on_the_states_at_its_beginning() -> None:
    """Section 3.4: at the step's start; what comes during a pass is for the pass after it."""
    drafter = Witness()
    request = Request([1], "spd", 9)
    c = DraftSession(request, lambda builder: SPD(request.params, builder, Pipeline(2, (2, 4))), drafter,
                     LmHead(torch.eye(8)[:, 7:].expand(8, 2)), lambda: 0.0)

    scheduler = Scheduler()
    scheduler.add(c)

    def next_task() -> Task | None:
        job = scheduler.next_job()
        return job and job.parts[0][1]

    def send() -> tuple[int, int, int]:
        segment, = (m for m in scheduler.take_messages() if isinstance(m, Segment))
        rows[segment.run] = segment.numbers
        taps.append(segment.taps)
        scheduler.receive(Credit(segment.session, segment.epoch, segment.run))
        return segment.session, segment.epoch, segment.run

    taps: list[tuple[int, ...]] = []
    rows = {0: np.array([0], np.int32)}
    states = Payload("float32", np.ones((1, 2), np.float32))

    def tap(header: tuple[int, int, int], layer: int) -> None:
        c.receive(Tap(*header, layer, rows[header[2]], states))

    prompt = send()
    tap(prompt, 2)
    c.receive(Output(*prompt, np.array([0], np.int32), states))
    verify = next_task()
    assert isinstance(verify, Verify)
    c.complete(verify)
    root = send()
    draft = next_task()
    assert isinstance(draft, DraftPass)
    tap(root, 1)
    c.complete(draft)
    send()
    assert next_task() is None  # the state that the root has at the step's start is still on its way
    tap((99, 0, 0), 2)  # of another session
    assert next_task() is None
    tap(root, 2)
    again = next_task()
    assert isinstance(again, DraftPass)
    c.complete(again)
    assert drafter.seen == [2, "pass", 1, 2, "pass"]
    assert taps == [(2,), (1, 2), (1, 2)]

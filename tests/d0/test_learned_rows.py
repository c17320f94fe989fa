"""FlowSpec+ where D0 learns from the stages how long segments take: in virtual time and over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from kits.process_clusters import PROMPT
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import Request, Result
from flowspec_edge.d0.run_events import RunEvent, SegmentSent, SessionOpened, StageTimes
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.d0.slot_curve import SlotCurve
from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.messages import Computed
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.parameters import LONGEST_BLOCK
from flowspec_edge.strategies.params import Params
from flowspec_edge.transport.codec import encode
from microbench.curve import CURVES, with_curve

SIZES = range(1, LONGEST_BLOCK + 1)
FIXED = Params(plus_without="curve")


def profile(curve: str) -> Profile:
    corners = CURVES[curve]
    return with_curve(load_profile("paper-7b"), *corners) if corners else load_profile("paper-7b")


# ---- virtual time --------------------------------------------------------------------------------


class Sizes(Observer):
    """Rows of the segments that were sent."""

    def __init__(self) -> None:
        self.sent_rows: list[int] = []

    def observe(self, event: RunEvent) -> None:
        if isinstance(event, SegmentSent):
            self.sent_rows.append(len(event.numbers))


def speed_of(results: list[Result]) -> float:
    return fmean(result.stats.tokens_per_second for result in results)


@pytest.mark.slow
@pytest.mark.parametrize(("curve", "temperature", "prompts"), [
    ("flat to 64", 0.0, 1), ("steep", 0.0, 1),
    *(pytest.param(curve, temperature, 3, marks=pytest.mark.soak)
      for curve in ("flat to 64", "own", "steep") for temperature in (0.0, 1.0))])
def test_to_learn_is_as_fast_as_to_be_told(demo_model: Path, demo_prompts: list[list[int]], curve: str,
                                           temperature: float, prompts: int) -> None:
    """``microbench.curve`` has a dozen prompts; the text is the same in any case."""
    requests = [Request(prompt, "flowspec_plus", 48 if prompts == 1 else 64, Sampling(temperature, seed=1),
                        Params(prefill_chunk=LONGEST_BLOCK))
                for prompt in demo_prompts[1:1 + prompts]]  # the first one's answer has no miss
    sizes = Sizes()
    clusters = [VirtualCluster(demo_model, 4, profile(curve), observer=sizes, learn=True),
                VirtualCluster(demo_model, 4, profile(curve))]
    learned, told = ([cluster.generate(request) for request in requests] for cluster in clusters)
    assert [result.tokens for result in learned] == [result.tokens for result in told]
    speed, wanted = speed_of(learned), speed_of(told)
    assert speed > 0.97 * wanted
    if curve == "flat to 64":
        assert max(sizes.sent_rows) == LONGEST_BLOCK
        fixed = [clusters[1].generate(replace(request, params=FIXED)) for request in requests]
        assert [result.tokens for result in fixed] == [result.tokens for result in told]
        assert speed > 1.05 * speed_of(fixed)  # what a fixed length leaves out


def test_what_a_row_takes_over_a_link_counts(demo_model: Path, demo_prompts: list[list[int]]) -> None:
    """At 50 Mbps it takes more than in a stage, of which the curve is flat here."""
    flat = profile("flat to 64")
    slow = flat.model_copy(update={"link": flat.link.model_copy(update={"mbps": 50.0})})

    def longest(charged: Profile) -> int:
        sizes = Sizes()
        VirtualCluster(demo_model, 4, charged, observer=sizes, learn=True).generate(
            Request(demo_prompts[0][:16], "flowspec_plus", 12, params=Params(prefill_chunk=1)))
        return max(sizes.sent_rows)

    assert longest(slow) < longest(flat)


def test_what_is_learned_is_what_every_stage_told(tiny_model: Path) -> None:
    """Each of the stages has other layers, and the slowest is the last."""
    watch, board = Watch(), load_profile("paper-7b")
    uneven = Devices(board, (board,) * 3, (8, 10, 14), "uneven")
    cluster = VirtualCluster(tiny_model, 3, uneven, observer=watch, learn=True)
    for length in (70, 9):
        cluster.generate(Request(list(range(length)), "flowspec_plus", 12, params=Params(prefill_chunk=64)))
    warm = [(place, rows, round(1e6 * cluster.devices.stage_seconds(place, rows)) * 1e-6)
            for place in (1, 2, 3) for rows in (1, 16, 64)]
    watch.told = warm + watch.told
    watch.link_row_s = cluster.devices.link_row_seconds()
    assert watch.curve() == pytest.approx(watch.expected(), rel=1e-5)


def test_other_boards_are_learned_anew(tiny_model: Path) -> None:
    boards, request = load_profile("orin-nano-8gb"), Request(list(range(30)), "flowspec_plus", 12)
    cluster = VirtualCluster(tiny_model, 3, load_profile("paper-7b"), learn=True)
    cluster.generate(request)
    moved, fresh = cluster.under(boards, 2), VirtualCluster(tiny_model, 2, boards, learn=True)
    assert moved.generate(request).stats == fresh.generate(request).stats


def test_plus_rows_is_the_limit_of_what_is_tried(demo_model: Path, demo_prompts: list[list[int]]) -> None:
    sizes = Sizes()
    params = Params(plus_rows=20, prefill_chunk=20)
    VirtualCluster(demo_model, 2, profile("flat to 64"), observer=sizes, learn=True).generate(
        Request(demo_prompts[0], "flowspec_plus", 16, params=params))
    assert max(sizes.sent_rows) == 20


def test_a_report_weighs_little_and_is_charged(tiny_model: Path) -> None:
    """One a stage and segment, only of requests that use them."""
    month = 30 * 24 * 3600 * 10**6  # microseconds that a board has been up
    report = Computed(month // 1000, 9, 9999, 14, 64, 64, month, month + 10**5, month + 10**5)
    assert sum(map(len, encode(report))) <= 64

    def total(strategy: str, learn: bool, params: Params = FIXED) -> int:
        cluster = VirtualCluster(tiny_model, 3, load_profile("paper-7b"), learn=learn)
        return cluster.generate(Request(list(range(70)), strategy, 8, params=params)).stats.bytes

    assert total("flowspec_plus", True) == total("flowspec_plus", False)
    assert total("chunk_pp", True, Params()) == total("chunk_pp", False, Params())
    few = Params(plus_rows=1)  # a segment is a single row whatever the curve
    assert total("flowspec_plus", True, few) > total("flowspec_plus", False, few)


# ---- processes -----------------------------------------------------------------------------------


class Watch(Observer):
    """Stages' reports while ``timed`` (stage, rows, seconds), and the newest request's draft session."""

    def __init__(self) -> None:
        self.timed = True
        self.link_row_s = 0.0
        self.told: list[tuple[int, int, float]] = []
        self.draft_sessions: list[DraftSession] = []

    @property
    def wants_times(self) -> bool:
        return self.timed

    def observe(self, event: RunEvent) -> None:
        match event:
            case SessionOpened():
                draft_session = event.draft_session()
                assert draft_session is not None
                self.draft_sessions.append(draft_session)
            case StageTimes():
                times = event.times
                self.told.append((times.stage, times.rows, (times.end - times.start) * 1e-6))

    def curve(self) -> list[float]:
        """What the newest request's strategy is told of each length."""
        seconds = self.draft_sessions[-1].strategy.pipeline.slot_seconds
        assert seconds is not None
        return [seconds(rows) for rows in SIZES]

    def expected(self) -> list[float]:
        """What a curve makes of the reports that were seen here, and each row's link time."""
        curve = SlotCurve()
        curve.link_row_s = self.link_row_s
        for stage, rows, seconds in self.told:
            curve.observe(stage, rows, seconds)
        return [curve.seconds(rows) for rows in SIZES]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def cluster(model: Path, watch: Watch) -> Iterator[ProcessCluster]:
    """A cluster whose warm-up has shown short and long segments."""
    with ProcessCluster(ClusterSpec(model, 2, threads=1, observer=watch)).start() as made:
        assert {(stage, rows) for stage, rows, _ in watch.told} == {
            (stage, rows) for stage in (1, 2) for rows in (1, 16, 64)}
        watch.link_row_s = (watch.curve()[-1] - watch.expected()[-1]) / SIZES[-1]
        yield made


def test_a_request_goes_by_what_the_stages_of_this_cluster_told(model: Path, cluster: ProcessCluster,
                                                                watch: Watch) -> None:
    watch.timed = True
    assert watch.link_row_s >= 0  # what the warm-up has shown
    for prompt in (PROMPT, PROMPT[:9]):
        result = cluster.generate(Request(prompt, "flowspec_plus", 16))
        assert result.tokens == PlainDecoder(model).generate(prompt, 16, Sampling())[0]
    assert watch.curve() == pytest.approx(watch.expected())


def test_an_observer_that_wants_no_times_gets_none(cluster: ProcessCluster, watch: Watch,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve itself may stay as it is after new reports, because delays only add time."""
    learned: list[tuple[int, int, float]] = []
    observe = SlotCurve.observe

    def spy(curve: SlotCurve, stage: int, rows: int, seconds: float) -> None:
        learned.append((stage, rows, seconds))
        observe(curve, stage, rows, seconds)

    # The last reports of the request before may still be under way; they arrive before these answers.
    cluster.generate(Request(PROMPT, "autoregressive", 4))
    monkeypatch.setattr(SlotCurve, "observe", spy)
    watch.timed = False
    seen = len(watch.told)
    cluster.generate(Request(PROMPT, "flowspec_plus", 16, params=FIXED))
    assert not learned  # no strategy uses them, so none were sent
    cluster.generate(Request(PROMPT, "flowspec_plus", 16))
    assert {stage for stage, _, _ in learned} == {1, 2}
    cluster.generate(Request(PROMPT, "autoregressive", 4))
    assert len(watch.told) == seen
    watch.told += learned  # other tests compare the curve with all that it was told

"""D0's and the stages' cores over lists: requests, cancels, turns and losses in any order of messages.

No sockets, clocks or threads. Hypothesis chooses which link delivers next, whether a control message comes
between two layers, and when a stage is lost; every answer has to be plain decoding's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kits.core_pipeline import PROMPTS, STAGES, STRATEGIES, Draw, Pipeline, plain, request
from kits.hypothesis_examples import examples
from kits.tiny_model_dir import with_eagle3

from flowspec_edge.d0.capacity import session_rows
from flowspec_edge.d0.events import Abandoned, Finish, Reported, Wait, Worked
from flowspec_edge.d0.request import Request, RequestHandle
from flowspec_edge.d0.request_state import RequestState
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.d0.slot_curve import SlotCurve
from flowspec_edge.errors import PeerLost
from flowspec_edge.stage.core import Emit, Idle

choices = st.lists(st.integers(0, 60), max_size=600)
events = st.lists(st.tuples(st.sampled_from(["start", "cancel", "give way", "lose"]), st.integers(0, 3),
                            st.integers(0, 40)), max_size=8)


@pytest.fixture(scope="module")
def tapped(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a head that reads inner states."""
    return with_eagle3(tiny_model, tmp_path_factory.mktemp("tapped"), drafted=64)


@given(choices, st.lists(st.sampled_from(STRATEGIES), min_size=4, max_size=4), events,
       st.sampled_from([0.0, 1.0]))
@example([0, 1], ["flowspec"] * 4, [("cancel", 0, 1), ("give way", 0, 2)], 0.0)  # ends with a Close under way
@examples(400, quick=12)
def test_any_order_of_messages_gives_the_text(tapped: Path, order: list[int], strategies: list[str],
                                              script: list[tuple[str, int, int]], temperature: float) -> None:
    """Every second request drafts with an EAGLE-3 head: its outputs wait for taps, which come over other links."""
    pipeline = Pipeline(tapped, Draw(order), places=2)
    core, handles, cancelled = pipeline.core, dict[int, RequestHandle](), set[int]()

    def start(place: int) -> None:
        if place not in handles:
            draft = "own" if place % 2 else "eagle3"
            handles[place] = RequestHandle(replace(request(place, strategies[place], temperature, draft),
                                                   caller=(str(place),)))
            pipeline.start(handles[place])

    start(0)
    for event, place, steps in script:
        left = iter(range(steps))
        pipeline.run(lambda left=left: next(left, None) is None or not core.busy)
        match event:
            case "start":
                start(place)
            case "cancel" if place in handles:
                handles[place].cancel()
                cancelled.add(place)
            case "give way":  # every caller's only place, as soon as its turn is over
                pipeline.now += 3.0
                pipeline.carry_out()
            case "lose":
                pipeline.lose()
    pipeline.run(lambda: not core.busy)
    for place, handle in handles.items():
        result = handle.result(0)
        expected = plain(tapped, tuple(PROMPTS[place]), temperature)
        assert result.tokens == (expected[:len(result.tokens)] if place in cancelled else expected)
    assert core.sessions == ()
    assert core.pool._open == {}
    pipeline.deliver_all()
    for stage in pipeline.stages:
        assert not stage.counters.sessions
        while isinstance(action := stage.next(pipeline.now), Emit):
            pass  # for sessions that have ended
        assert isinstance(action, Idle)


def test_a_request_that_loses_the_stages_again_and_again_ends(tiny_model: Path) -> None:
    pipeline = Pipeline(tiny_model, Draw([]))
    handle = RequestHandle(request(0, "flowspec", 0.0))
    pipeline.start(handle)
    pipeline.carry_out()
    for _ in range(5):
        pipeline.lose()
    assert not handle.done()
    pipeline.lose()
    with pytest.raises(PeerLost, match="lost 6 times"):
        handle.result(0)
    assert not pipeline.core.busy


def test_a_request_may_lose_the_stages_often_while_it_gets_on(tiny_model: Path) -> None:
    pipeline, made = Pipeline(tiny_model, Draw([])), list[int]()
    handle = RequestHandle(request(0, "flowspec", 0.0), made.extend)
    pipeline.start(handle)
    losses = 0
    while pipeline.core.busy:
        before = len(made)
        pipeline.run(lambda before=before: len(made) > before or not pipeline.core.busy)
        if pipeline.core.busy:
            pipeline.lose()
            losses += 1
    assert losses > 5
    assert handle.result(0).tokens == plain(tiny_model, tuple(PROMPTS[0]), 0.0)


@pytest.mark.parametrize("done", [False, True], ids=["before its work", "after its work"])
@pytest.mark.parametrize("nth", [0, 2, 5])
def test_a_request_that_is_cancelled_while_the_driver_has_its_work_ends_once(tiny_model: Path, nth: int, done: bool
                                                                             ) -> None:
    """A driver may ask on between Compute and Worked, as one on an event queue does, and then learns of the end."""
    pipeline, seen = Pipeline(tiny_model, Draw([])), 0
    handle = RequestHandle(request(0, "flowspec", 0.0))
    pipeline.start(handle)
    while pipeline.core.busy:
        pipeline.run(lambda: pipeline.work is not None or not pipeline.core.busy)
        if (action := pipeline.work) is None:
            break
        pipeline.work = None
        if done:
            action.work()
        [(draft_session, _)] = action.job.parts
        before = len(draft_session.tokens)
        if seen == nth:
            handle.cancel()
            pipeline.carry_out()
            for session in pipeline.core.closing:
                pipeline.core.feed(Reported(session, [{}] * STAGES))
        if not done:
            action.work()
            assert seen != nth or len(draft_session.tokens) == before  # the first work would have given a token
        seen += 1
        pipeline.core.feed(Worked(pipeline.now, pipeline.now))
        pipeline.carry_out()
    result = handle.result(0)
    assert seen > nth
    assert result.tokens == plain(tiny_model, tuple(PROMPTS[0]), 0.0)[:len(result.tokens)]
    assert pipeline.core.sessions == ()


def answered(pipeline: Pipeline, *requests: Request) -> list[RequestHandle]:
    """The requests' handles after all of them have ended."""
    handles = [RequestHandle(one) for one in requests]
    for handle in handles:
        pipeline.start(handle)
    pipeline.run(lambda: not pipeline.core.busy)
    return handles


@pytest.mark.parametrize(("strategy", "warming_up", "learns"), [
    ("flowspec", False, False), ("flowspec", True, True), ("flowspec_plus", False, True)])
def test_the_curve_learns_in_use_and_in_the_warm_up(
        tiny_model: Path, strategy: str, warming_up: bool, learns: bool) -> None:
    pipeline, fresh = Pipeline(tiny_model, Draw([])), SlotCurve().seconds(64)
    pipeline.core.warming_up = warming_up
    answered(pipeline, request(0, strategy, 0.0))
    assert (pipeline.curve.seconds(64) != fresh) == learns
    pipeline.lose()  # the stages may come back on other devices
    assert pipeline.curve.seconds(64) == fresh


def test_a_loss_takes_the_rows_of_ended_sessions(tiny_model: Path) -> None:
    pipeline = Pipeline(tiny_model, Draw([]))
    for lost, reuses in ((False, False), (False, True), (True, False)):
        if lost:
            pipeline.lose()
        [handle] = answered(pipeline, request(1, "flowspec", 0.0))
        assert (handle.result(0).stats.reused > 0) == reuses
        assert handle.result(0).tokens == plain(tiny_model, tuple(PROMPTS[1]), 0.0)


@pytest.mark.parametrize("lost", [False, True])
def test_bytes_count_over_a_loss_and_energy_does_not(tiny_model: Path, lost: bool) -> None:
    pipeline, made = Pipeline(tiny_model, Draw([])), list[int]()
    core, handle = pipeline.core, RequestHandle(request(0, "flowspec", 0.0), made.extend)
    pipeline.start(handle)
    pipeline.run(lambda: bool(made))
    core.charge(core.sessions[0], 1000)
    if lost:
        pipeline.lose()
    core.charge(core.sessions[0], 200)
    core.charge(core.newest_session + 1, 7)  # another's
    pipeline.run(lambda: not core.is_decoding)
    [session] = core.closing
    boards = [{"session_j": 5.0, "board": float(i), "bytes_out": 10.0} for i in range(STAGES)]
    core.feed(Reported(session, boards, energy={"session_j": 3.0, "board": 9.0}))
    stats = handle.result(0).stats
    assert (stats.bytes, stats.energy_j) == (1220, None if lost else 13.0)
    assert made == handle.result(0).tokens == plain(tiny_model, tuple(PROMPTS[0]), 0.0)


def test_a_loss_resumes_only_unfinished_requests(tiny_model: Path) -> None:
    pipeline = Pipeline(tiny_model, Draw([]))
    core, handles = pipeline.core, [RequestHandle(request(place, "flowspec", 0.0)) for place in (0, 1)]
    pipeline.start(handles[0])
    pipeline.carry_out()
    pipeline.run(lambda: not core.is_decoding)  # finished, but the stages have not closed its session
    pipeline.start(handles[1])
    pipeline.carry_out()
    handles[1].cancel()
    newest = core.newest_session
    pipeline.lose()
    assert not core.busy
    assert core.newest_session == newest
    assert handles[0].result(0).tokens == plain(tiny_model, tuple(PROMPTS[0]), 0.0)
    assert handles[1].result(0).finish_reason == "cancelled"


@pytest.mark.parametrize("where", ["begin", "drafted", "controls", "row_probabilities", "next_segment",
                                   "next_draft", "result"])
def test_an_exception_ends_one_request_and_the_others_go_on(
        tiny_model: Path, where: str, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    """Wherever it is raised, in the middle of the text; the stages close the request's session."""
    usual: Callable[..., object] = getattr(DraftSession, where)

    def broken(draft_session: DraftSession, *arguments: object) -> object:
        if draft_session.request is failing and (where == "result" or len(draft_session.tokens) >= 2):
            raise ZeroDivisionError("a fault of a strategy")
        return usual(draft_session, *arguments)

    requests = [request(place, "flowspec", 0.0) for place in (0, 1, 2)]
    failing, pipeline = requests[1], Pipeline(tiny_model, Draw([]))
    monkeypatch.setattr(DraftSession, where, broken)
    handles = answered(pipeline, *requests)
    pipeline.run(lambda: not any(stage.counters.sessions for stage in pipeline.stages))
    assert isinstance(handles[1].exception(0), ZeroDivisionError)
    for place in (0, 2):
        assert handles[place].result(0).tokens == plain(tiny_model, tuple(PROMPTS[place]), 0.0)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
    assert pipeline.core.pool._open == {}


def test_reports_that_do_not_come_are_not_waited_for(tiny_model: Path) -> None:
    pipeline, handle = Pipeline(tiny_model, Draw([])), RequestHandle(request(0, "flowspec", 0.0))
    core = pipeline.core
    pipeline.start(handle)
    pipeline.run(lambda: bool(core.closing))
    [session] = core.closing
    assert isinstance(core.next(), Wait)
    pipeline.now += 3.0
    assert core.next() == Finish(session)
    core.feed(Reported(session, [{}] * STAGES))
    assert handle.result(0).tokens == plain(tiny_model, tuple(PROMPTS[0]), 0.0)
    assert isinstance(core.next(), Wait)


@pytest.mark.parametrize("by_room", [False, True])
def test_callers_share_the_places_and_the_room(tiny_model: Path, by_room: bool) -> None:
    """Two of three callers begin; when their turns are over, the third has the place of the first."""
    rows = session_rows(request(0, "flowspec", 0.0), STAGES)
    pipeline = Pipeline(tiny_model, Draw([]), 2 * rows + 100 if by_room else None, inf if by_room else 2)
    made: list[list[int]] = [[], [], []]
    handles = [RequestHandle(replace(request(place, "flowspec", 0.0), caller=(str(place),)), tokens.extend)
               for place, tokens in zip((0, 2, 3), made, strict=True)]
    for handle in handles:
        pipeline.start(handle)
    pipeline.run(lambda: bool(made[0] and made[1]))
    assert pipeline.core.sessions == (1, 2)
    assert handles[2].state is (RequestState.PLACED if by_room else RequestState.QUEUED)
    pipeline.now += 3.0
    pipeline.carry_out()
    assert 1 not in pipeline.core.sessions
    assert 3 in pipeline.core.sessions
    assert not made[2]
    pipeline.run(lambda: not pipeline.core.busy)
    for place, handle in zip((0, 2, 3), handles, strict=True):
        assert handle.result(0).tokens == plain(tiny_model, tuple(PROMPTS[place]), 0.0)


def test_who_is_cancelled_after_it_gave_way_keeps_its_text_and_takes_no_place(tiny_model: Path) -> None:
    pipeline, made = Pipeline(tiny_model, Draw([]), places=1), list[int]()
    gone, stays = (RequestHandle(replace(request(place, "flowspec", 0.0), caller=(str(place),)), listener)
                   for place, listener in ((0, made.extend), (2, None)))
    for handle in (gone, stays):
        pipeline.start(handle)
    pipeline.run(lambda: bool(made))
    pipeline.now += 3.0
    pipeline.carry_out()
    assert (gone.state, stays.state) == (RequestState.QUEUED, RequestState.OPEN)
    pipeline.core.queue.places = 2
    gone.cancel()
    pipeline.run(lambda: not pipeline.core.busy)
    assert gone.result(0).tokens == made == plain(tiny_model, tuple(PROMPTS[0]), 0.0)[:len(made)]
    assert stays.result(0).tokens == plain(tiny_model, tuple(PROMPTS[2]), 0.0)


def test_a_held_queue_lets_only_those_beside_it_begin(tiny_model: Path) -> None:
    pipeline = Pipeline(tiny_model, Draw([]), places=1)
    waits, probe = RequestHandle(request(0, "flowspec", 0.0)), RequestHandle(request(1, "flowspec", 0.0))
    pipeline.core.queue.paused = True
    pipeline.start(waits)
    pipeline.core.queue.put_beside(probe)
    pipeline.run(probe.done)
    assert waits.state is RequestState.QUEUED
    pipeline.core.queue.paused = False
    pipeline.run(waits.done)


@pytest.mark.parametrize("patient", [False, True])
def test_who_waits_for_a_place_outlives_the_stages_if_the_queue_is_patient(tiny_model: Path, patient: bool) -> None:
    """A run of stages ends, and another one's core has the same queue."""
    pipeline = Pipeline(tiny_model, Draw([]), places=1)
    queue, lost = pipeline.core.queue, PeerLost("V1 is lost for good")
    begun, waits, probe = (RequestHandle(request(place, "flowspec", 0.0)) for place in range(3))
    queue.patient = patient
    for handle in (begun, waits):
        pipeline.start(handle)
    pipeline.carry_out()
    queue.put_beside(probe)
    queue.fail(lost)
    pipeline.core.feed(Abandoned(lost))
    pipeline.carry_out()
    assert not pipeline.core.sessions
    for handle in (begun, probe, *([] if patient else [waits])):
        assert isinstance(handle.exception(0), PeerLost)
    following = Pipeline(tiny_model, Draw([]), queue=queue)
    following.run(lambda: not following.core.busy)
    assert waits.done()
    assert queue.sizes == (0, 0)

"""What goes ahead of a draft pass: that it does, for whom, and how much of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kits.requests import prompt

from flowspec_edge.d0.jobs import Job
from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.scheduler import Scheduler
from flowspec_edge.d0.session import DraftPass, DraftSession, Verify
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.messages import Batch, Credit, Output, Payload, Segment, parts_of
from flowspec_edge.strategies.params import Params
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

SLOT, PASS = 1.0, 0.4
A_PASS = DraftPass(DraftRequest(0, (DraftNode(0, -1, 1, 1),), 4))  # whose duration alone matters
NOTHING = Payload("float32", np.empty((0, 64), np.float32))
AN_OUTPUT = Verify(Output(1, 0, 0, np.empty(0, np.int32), NOTHING))


class D0:
    """Requests whose prompts are longer than anybody looks here, so there is always a segment to send."""

    def __init__(self, model: Path, *strategies: str, clock: bool = True, without: str = "") -> None:
        self.now = 0.0
        device0 = DraftModels(model)
        self.sessions = Scheduler(clock=(lambda: self.now) if clock else None)
        self.draft_sessions: list[DraftSession] = []
        for session, name in enumerate(strategies, start=1):
            request = Request(prompt(session, 500), name, 4,
                              params=Params(prefill_chunk=16, plus_without=without))
            self.draft_sessions.append(
                device0.draft_session(request, 4, lambda: 0.0, session, lambda kind: 1.0))
            self.sessions.add(self.draft_sessions[-1])

    def job(self, task: DraftPass | Verify) -> Job:
        return Job(((self.draft_sessions[0], task),))

    def send(self) -> Segment:
        """The first segment of what V1 has room for."""
        [message] = self.sessions.take_messages()
        assert isinstance(message, Segment | Batch)
        first = parts_of(message)[0]
        assert isinstance(first, Segment)
        return first

    def done(self, first: Segment) -> None:
        self.sessions.receive(Credit(first.session, first.epoch, first.run))

    def practise(self) -> None:
        """What a segment, a pass and an output take becomes known; then a segment is at V1, sent now."""
        for _ in range(3):
            segment = self.send()
            self.now += SLOT
            self.done(segment)
            self.sessions.worked(self.job(A_PASS), PASS)
            self.sessions.worked(self.job(AN_OUTPUT), PASS)
        self.at_v1 = self.send()

    def ahead(self, task: DraftPass | Verify = A_PASS) -> list[int]:
        """Sessions whose segments would go before this."""
        return [part.session for message in self.sessions.take_ahead(self.job(task))
                for part in parts_of(message)]


def test_one_segment_goes_ahead_of_a_long_pass(tiny_model: Path) -> None:
    d0 = D0(tiny_model, "flowspec_plus")
    d0.practise()
    d0.now += SLOT - PASS - 0.05
    assert d0.ahead() == []  # the pass ends before the segment does
    d0.now += 0.1
    assert d0.ahead() == [1]
    assert d0.ahead() == []  # one more than V1 has room for
    d0.now += 10
    assert d0.ahead() == []


def test_what_went_ahead_is_at_v1_like_any_other(tiny_model: Path) -> None:
    d0 = D0(tiny_model, "flowspec_plus")
    d0.practise()
    d0.now += SLOT - 0.1
    assert d0.ahead() == [1]
    assert d0.sessions.take_messages() == []
    d0.now += 0.1
    d0.done(d0.at_v1)
    assert d0.sessions.take_messages() == []  # V1 has that one
    assert d0.ahead() == []  # for a whole slot
    d0.now += SLOT - 0.1
    assert d0.ahead() == [1]


def test_the_work_that_an_output_makes_is_done_at_once(tiny_model: Path) -> None:
    """It tells what is worth sending."""
    d0 = D0(tiny_model, "flowspec_plus")
    d0.practise()
    d0.now += SLOT - 0.1
    assert d0.ahead(AN_OUTPUT) == []
    assert d0.ahead() == [1]


@pytest.mark.parametrize(("strategies", "without", "ahead"), [
    (["flowspec_plus"], "ahead", []), (["flowspec"], "", []), (["autoregressive", "flowspec"], "", []),
    (["flowspec", "flowspec_plus"], "", []), (["flowspec_plus", "flowspec"], "", []),
    (["flowspec_plus", "flowspec_plus"], "", [1, 2]),
])
def test_what_goes_ahead_if_all_strategies_do(tiny_model: Path, strategies: list[str], without: str,
                                              ahead: list[int]) -> None:
    """A request that sends nothing ahead would have to wait for the others' batch."""
    d0 = D0(tiny_model, *strategies, without=without)
    d0.practise()
    d0.now += SLOT
    assert d0.ahead() == ahead


def test_a_request_that_is_over_keeps_nothing_back(tiny_model: Path) -> None:
    d0 = D0(tiny_model, "flowspec", "flowspec_plus")
    d0.practise()
    d0.now += SLOT
    d0.draft_sessions[0].cancel()
    assert d0.ahead() == [2]


def test_without_a_clock_no_time_is_known(tiny_model: Path) -> None:
    d0 = D0(tiny_model, "flowspec_plus", clock=False)
    d0.practise()
    d0.now += SLOT
    assert d0.ahead() == []


def test_what_does_not_go_ahead(tiny_model: Path) -> None:
    d0 = D0(tiny_model, "flowspec_plus")
    d0.practise()
    d0.done(d0.at_v1)
    d0.now += SLOT
    assert d0.ahead() == []  # what can be sent to it is sent by ``take_messages``
    d0.practise()
    d0.now += SLOT
    d0.draft_sessions[0].cancel()
    assert d0.ahead() == []


@pytest.mark.slow
@pytest.mark.parametrize("stages", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_v1_waits_less_for_draft_passes(demo_model: Path, stages: int) -> None:
    """In virtual time, a pass lasts a fifth of a slot at four stages; the text is the same."""
    cluster = VirtualCluster(demo_model, stages, load_profile("paper-7b"))
    idle, texts = {}, []
    for without in ("", "ahead"):
        result = cluster.generate(Request(prompt(1), "flowspec_plus", 24,
                                          params=Params(plus_without=without)))
        first, end = result.stats.ttft_s, result.stats.ttft_s + result.stats.decode_s
        busy = sum(min(span.end, end) - span.start for span in cluster.spans
                   if span.device == 1 and first <= span.start < end)
        idle[without] = 1 - busy / (end - first)
        texts.append(result.tokens)
    assert texts[0] == texts[1]
    # The pace is learned from the first few segments; after that V1 hardly waits.
    assert idle[""] < 0.8 * idle["ahead"]

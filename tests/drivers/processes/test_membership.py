"""Which stages are missing, ready, isolated, silent or wrong; and the live line."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from flowspec_edge.d0.counters import LiveLines
from flowspec_edge.drivers.processes.membership import Membership
from flowspec_edge.errors import PeerLost, ProtocolError
from flowspec_edge.messages import (
    Close,
    Computed,
    Credit,
    Heartbeat,
    Hello,
    Message,
    SessionReport,
)

V1, V2 = Hello("v1", 1, 2, (0, 3), "d"), Hello("v2", 2, 2, (3, 5), "e")


@pytest.fixture
def members() -> Membership:
    return Membership(["v1", "v2"], dead_after=5.0)


def test_silence_is_counted_from_the_last_message_or_the_request(members: Membership) -> None:
    members.receive("v1", V1, 10.0)
    members.receive("v2", V2, 12.0)
    members.check(15.0)
    with pytest.raises(PeerLost, match="V1 has been silent for 5 s"):
        members.check(15.1)
    members.reset_silence(100.0)
    members.check(105.0)
    members.receive("v1", Heartbeat("v1", 1, {}), 106.0)
    with pytest.raises(PeerLost, match="V2"):
        members.check(106.0)


@pytest.mark.parametrize(("sender", "message", "text"), [
    ("v1", V2, "it says it is V2, but it is set up as V1"),
    ("v2", Heartbeat("v2", 1, {}), "it says it is V1, but it is set up as V2"),
    ("v2", Computed(1, 0, 0, 1, 4, 4, 0, 1, 2), "it says it is V1, but it is set up as V2"),
    ("v1", replace(V1, newest=2**63 - 1), "it knows a session 9223372036854775807"),
    ("v2", Credit(1, 0, 0), "only V1 gives credits"),
    ("v1", Close(1), "a Close is not a stage's"),
    ("v2", V2, ""),
    ("v1", Credit(1, 0, 0), ""),
])
def test_what_a_stage_cannot_say_is_objected_to(members: Membership, sender: str, message: Message, text: str
                                                ) -> None:
    objection = members.objection(sender, message)
    assert text in objection
    assert bool(text) == bool(objection)


@pytest.mark.parametrize(("hello", "text"), [
    (replace(V2, version=99), "speaks protocol version 99"),
    (replace(V2, stages=3), "one of 3 stages"),
    (replace(V2, layers=(4, 5)), "V1 ends at layer 3, but V2 starts at 4"),
])
def test_a_stage_that_does_not_fit_is_refused(members: Membership, hello: Hello, text: str) -> None:
    members.receive("v1", V1, 0.0)
    with pytest.raises(ProtocolError, match=text):
        members.receive("v2", hello, 0.0)


def test_after_a_loss_every_stage_has_to_show_that_it_is_ready() -> None:
    members = Membership(["v1", "v2"], dead_after=5.0, fail_on_rejoin=True)
    for instance, hello in (("v1", V1), ("v2", V2)):
        members.receive(instance, hello, 0.0)
        members.receive(instance, Heartbeat(instance, hello.stage, {}), 0.0)
    assert members.absent() == []
    members.expect_all()
    assert members.absent() == ["V1", "V2"]
    members.receive("v1", Heartbeat("v1", 1, {}, isolated=True), 1.0)
    assert members.absent() == ["V2"]
    members.forget(2)
    members.receive("v2", Heartbeat("v2", 2, {}), 1.0)  # from its former process
    assert members.absent() == members.missing() == ["V2"]
    assert members.silent(6.5) == [1]
    members.receive("v2", V2, 2.0)
    members.receive("v2", Heartbeat("v2", 2, {}), 2.0)
    assert members.absent() == ["V1 (cannot reach V2)"]
    members.receive("v1", Heartbeat("v1", 1, {}), 3.0)
    assert members.absent() == []


def test_a_stage_that_says_hello_again_has_lost_its_sessions() -> None:
    members = Membership(["v1", "v2"], dead_after=5.0, fail_on_rejoin=True)
    members.receive("v1", V1, 0.0)
    with pytest.raises(PeerLost, match="V1 connected again"):
        members.receive("v1", V1, 1.0)
    assert "V1" in members.absent()


def test_a_stage_with_another_shard_is_refused() -> None:
    members = Membership(["v1", "v2"], dead_after=5.0, digests=["d", "0123456789abcdef"])
    members.receive("v1", V1, 0.0)
    with pytest.raises(ProtocolError, match="V2 has the shard fedcba987654…, expected is 0123456789ab…: "
                                            "bring the right one there with: flowspec deploy up"):
        members.receive("v2", replace(V2, digest="fedcba9876543210"), 0.0)
    members.receive("v2", replace(V2, digest="0123456789abcdef"), 0.0)
    assert members.missing() == []


def test_a_session_is_over_when_all_have_reported_on_it(members: Membership) -> None:
    members.receive("v1", SessionReport("v1", 1, 7, {"rows": 3.0}), 0.0)
    assert not members.all_reported(7)
    members.receive("v2", SessionReport("v2", 2, 7), 0.0)
    assert members.all_reported(7)
    assert not members.all_reported(8)
    assert members.take_reports(7)[0]["rows"] == 3
    assert not members.all_reported(7)
    members.receive("v1", SessionReport("v1", 1, 9), 0.0)
    members.drop_reports()
    members.receive("v2", SessionReport("v2", 2, 9), 0.0)
    assert not members.all_reported(9)


def test_a_stage_without_a_report_counts_with_its_last_heartbeat(members: Membership) -> None:
    members.receive("v1", Heartbeat("v1", 1, {"rows": 5.0}), 0.0)
    members.receive("v1", SessionReport("v1", 1, 8, {"rows": 2.0}), 0.0)
    assert [stage.get("rows") for stage in members.take_reports(7)] == [5.0, None]
    assert members.take_reports(8)[0]["rows"] == 2.0


def test_lines_show_what_was_added(caplog: pytest.LogCaptureFixture) -> None:
    lines, counters = LiveLines(), {"since": 1, "compute_s": 0.061, "rows": 412.0}
    with caplog.at_level(logging.INFO, "flowspec_edge.d0.counters"):
        lines.show(Heartbeat("v1", 1, counters))
        for _ in range(2):  # the second says nothing new
            lines.show(Heartbeat("v1", 1, {**counters, "compute_s": 0.1, "rows": 420.0}))
        lines.show(Heartbeat("v1", 1, {**counters, "since": 2, "rows": 430.0}))  # another, longer session
    rows = [int(record.message.split("rows")[1].split()[0]) for record in caplog.records]
    assert rows == [412, 8, 430]

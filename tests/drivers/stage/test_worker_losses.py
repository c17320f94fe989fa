"""A stage that loses D0, its next device, a segment or its parent: when it ends, when only its sessions."""

from __future__ import annotations

import os

from kits.process_clusters import until
from kits.worker_thread import PATIENCE, Start, segment

from flowspec_edge.errors import PeerLost
from flowspec_edge.messages import Close, Credit, Failed, Heartbeat, Hello, Open
from flowspec_edge.stage.engine import StageEngine


def test_a_stage_that_d0_started_ends_without_it(start: Start, real: StageEngine) -> None:
    stage = start(real, lost_after_s=0.1, parent=os.getppid())
    stage.hear(Hello)
    stage.hub.close()
    error = stage.ended()
    assert isinstance(error, PeerLost)
    assert "no connection to D0" in str(error)


def test_a_stage_waits_for_another_d0(start: Start, real: StageEngine) -> None:
    stage = start(real, lost_after_s=0.1)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0))
    stage.result()
    stage.hub.close()
    until(lambda: not real.sessions)
    assert stage.thread.is_alive()
    stage.hub = stage.network.hub("d0", "another D0")


def test_a_stage_without_a_next_one_lives_on(start: Start, real: StageEngine) -> None:
    """Its sessions may have lost messages; but the shard is loaded, and the next device may be back."""
    stage = start(real, broken_after_s=0.1)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0))
    stage.result()
    stage.output.close()
    assert "the connection broke during a session" in stage.hear(Failed).cause
    stage.hear(Heartbeat, lambda beat: beat.isolated)
    stage.give(segment(1))  # of the session that is over
    assert not real.sessions
    stage.output = stage.network.pull("out", "D0 data in")
    stage.hear(Heartbeat, lambda beat: not beat.isolated)
    stage.tell(Open(2, 0, 64))
    stage.give(segment(0, session=2))
    assert stage.result().session == 2


def test_a_gap_in_a_session_ends_the_session_and_not_the_stage(start: Start, real: StageEngine) -> None:
    stage = start(real)
    stage.tell(Open(1, 0, 64))
    stage.give(segment(0))
    stage.result()
    stage.give(segment(2))
    assert "came after segment 0: one is lost" in stage.hear(Failed).cause
    stage.hear(Credit, lambda credit: credit.run == 2)  # V1 has room again
    stage.tell(Open(2, 0, 64))
    stage.give(segment(0, session=2))
    assert stage.result().session == 2


def test_a_segment_from_before_a_loss_does_not_wait_for_its_open(start: Start, real: StageEngine) -> None:
    """D0 tells a restarted stage how far the session numbers have come."""
    stage = start(real, open_within_s=PATIENCE)
    stage.tell(Close(7))
    stage.give(segment(3, session=7))
    stage.hear(Credit, lambda credit: credit.session == 7)
    stage.tell(Open(8, 0, 64))
    stage.give(segment(0, session=8))
    assert stage.result().session == 8


def test_a_stage_does_not_outlive_its_parent(start: Start, real: StageEngine) -> None:
    stage = start(real, parent=1 << 22)  # above any process id of this machine's
    assert isinstance(stage.ended(), PeerLost)

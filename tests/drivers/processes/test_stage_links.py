"""While D0 waits for its stages' first Hello, a stage may leave: systemd starts it again."""

from __future__ import annotations

from kits.process_clusters import PATIENCE

from flowspec_edge.drivers.processes.addresses import Loopback
from flowspec_edge.drivers.processes.membership import Membership
from flowspec_edge.drivers.processes.stage_links import StageLinks
from flowspec_edge.drivers.ring import Addresses
from flowspec_edge.messages import Hello
from flowspec_edge.transport.zmq_links import Tuning, ZmqTransport


def test_v1_may_leave_before_its_hello() -> None:
    """As one of another release does: its data link breaks, with nothing on it."""
    d0, v1 = ZmqTransport(tuning=Tuning(linger_ms=0)), ZmqTransport(tuning=Tuning(linger_ms=0))
    gone = v1.pull("tcp://127.0.0.1:*", "V1 data in")
    links = StageLinks(d0, Addresses("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", gone.endpoint, ["v1"]),
                       Loopback(), Membership(["v1"], PATIENCE, fail_on_rejoin=True), lambda seconds: None,
                       lambda heartbeat, at: None, lambda session: False, lambda session, size: None)
    left: list[bool] = []

    def waiting(stages: list[str]) -> None:
        assert stages == ["V1"]
        if not left and links.reaches_v1:
            gone.close()
            left.append(True)
        elif left == [True] and not links.reaches_v1:
            left.append(True)
            v1.pull(gone_at, "V1 data in")
            assert v1.control(links.control_endpoint, "V1 control", "v1").send(
                Hello("v1", 1, 1, (0, 2), "digest"), PATIENCE)

    gone_at = gone.endpoint
    links.wait_for_hello(PATIENCE, waiting)
    assert left == [True, True]
    for transport in (v1, d0):
        transport.close()

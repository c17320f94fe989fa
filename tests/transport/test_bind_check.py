"""What is beyond loopback, and that no link listens there without keys unless that is meant."""

from __future__ import annotations

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.transport import keys
from flowspec_edge.transport.bind_check import beyond_loopback
from flowspec_edge.transport.zmq_links import Tuning, ZmqTransport


@pytest.mark.parametrize(("endpoint", "beyond"), [
    ("tcp://127.0.0.1:7701", False), ("tcp://127.9.9.9:*", False), ("tcp://localhost:1", False),
    ("tcp://[::1]:7701", False), ("tcp://lo:7701", False), ("inproc://d0", False), ("ipc:///run/x", False),
    ("file:///tmp/group", False), ("d0", False), ("", False),
    ("tcp://10.77.0.2:7701", True), ("tcp://0.0.0.0:7701", True), ("tcp://*:7701", True),
    ("tcp://[::]:7701", True), ("tcp://[2001:db8::5]:7701", True), ("tcp://eth0:7701", True),
    ("tcp://orin-1.lab:7701", True),
])
def test_who_can_reach_it(endpoint: str, beyond: bool) -> None:
    assert beyond_loopback(endpoint) is beyond


def test_without_keys_nothing_listens_beyond_loopback() -> None:
    quick = Tuning(linger_ms=0)
    closed, meant, encrypted = (ZmqTransport(None, quick), ZmqTransport(None, quick, unencrypted=True),
                                ZmqTransport(keys.generate(), quick))
    try:
        for bind in (closed.pull, closed.hub):
            with pytest.raises(UsageError, match=r"^data in: tcp://0\.0\.0\.0:\* is beyond loopback, where"):
                bind("tcp://0.0.0.0:*", "data in")
        assert meant.pull("tcp://0.0.0.0:*", "data in").endpoint
        assert encrypted.pull("tcp://0.0.0.0:*", "data in").endpoint
    finally:
        for transport in (closed, meant, encrypted):
            transport.close()

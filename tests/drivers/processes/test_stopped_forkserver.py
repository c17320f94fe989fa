"""A stage is lost while the fork server, which would restart it, is stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from kits.process_clusters import PROMPT, on_third

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.processes import forkserver
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import FlowspecError


@pytest.mark.slow  # a new fork server here, and another for the next file's workers
def test_one_that_never_answers_ends_the_recovery_and_is_named(model: Path, monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    """Every new one is stopped, too; after the recovery's deadline no other one is tried."""
    tried = []
    with ProcessCluster(ClusterSpec(model, 1, threads=1, rejoin_within=1.0)).start() as cluster:
        preload = forkserver.preload

        def stopped() -> None:
            preload()
            server = forkserver.server_pid()
            assert server is not None
            os.kill(server, signal.SIGSTOP)
            tried.append(server)

        def strike() -> None:
            monkeypatch.setattr(forkserver, "preload", stopped)
            os.kill(cluster.pids[0], signal.SIGKILL)

        with pytest.raises(FlowspecError, match=r"the fork server for workers .* does not answer"):
            cluster.generate(Request(PROMPT, "flowspec", 20), on_third(strike))
        monkeypatch.undo()
    assert len(tried) == 1

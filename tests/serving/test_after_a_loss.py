"""What is told of a cluster that ended, and of the one in its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from clusterkit import on_third

from flowspec_edge.errors import PeerLost
from flowspec_edge.runtime.clusters import LocalClusters
from flowspec_edge.runtime.observer import Observers
from flowspec_edge.runtime.request import Request
from flowspec_edge.serving.desk import Readiness
from flowspec_edge.serving.feed import Feed
from flowspec_edge.serving.metrics import Metrics

PROMPT = [(7 * i + 3) % 90 for i in range(70)]
READY = Readiness(True, "", 0, 0, None)


def test_a_cluster_that_is_lost_and_another_one(model: Path) -> None:
    """A loss that nobody waits out is a loss as well; nothing of those that ran is left."""
    feed, metrics = Feed(), Metrics(2, dict, {})

    def count() -> tuple[int, int]:
        lines = metrics.page("", READY)[0].decode().splitlines()
        told = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return int(float(told["flowspec_losses_total"])), int(float(told["flowspec_recoveries_total"]))

    with LocalClusters(model, 2, threads=1, observer=Observers([metrics, feed])) as clusters:
        clusters.generate(Request(PROMPT, "flowspec", 2))
        assert (feed.lost_why, *count()) == (None, 0, 0)
        running = clusters.running
        assert running
        over = clusters.submit(Request(PROMPT, "flowspec", 3),
                               on_third(lambda: os.kill(running.pids[1], signal.SIGKILL)))
        others = [clusters.submit(Request(PROMPT, "flowspec", 60)) for _ in range(2)]
        with pytest.raises(PeerLost):
            clusters.serve(lambda: False)
        assert len(over.result(0).tokens) == 3  # it waited for nothing but the stages' last counters
        for other in others:
            with pytest.raises(PeerLost):
                other.result(0)
        assert "V2 was killed" in (feed.lost_why or "")
        assert feed.figures.event(0)["running"] == 0
        assert feed._open == metrics._rounds == {}
        assert count() == (1, 0)
        clusters.generate(Request(PROMPT, "flowspec", 2))
        assert (feed.lost_why, *count()) == (None, 1, 1)


def test_after_a_fault_of_ours_nothing_of_those_that_ran_is_left(model: Path) -> None:
    feed, metrics = Feed(), Metrics(2, dict, {})
    with LocalClusters(model, 2, threads=1, observer=Observers([metrics, feed])) as clusters:
        tickets = [clusters.submit(Request(PROMPT, "flowspec", 60)) for _ in range(2)]
        turns = iter(range(20))
        with pytest.raises(StopIteration):
            clusters.serve(lambda: next(turns) < 0)
        assert all(ticket.done for ticket in tickets)
        assert feed._open == metrics._rounds == {}
        assert feed.figures.event(0)["running"] == 0
        assert feed.lost_why is None

"""What is told of a cluster that ended, and of the one in its place."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from kits.process_clusters import PATIENCE, on_third

from flowspec_edge.d0.observer import Observers
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.run_events import SessionEnded, SessionOpened
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import PeerLost
from flowspec_edge.serving.admission import Readiness
from flowspec_edge.serving.dashboard.feed import Feed
from flowspec_edge.serving.metrics import Metrics
from flowspec_edge.strategies.params import Params

PROMPT = [(7 * i + 3) % 90 for i in range(70)]
READY = Readiness(True, "", 0, 0, None)


def read(metrics: Metrics, name: str) -> float:
    lines = metrics.page("", READY)[0].decode().splitlines()
    return float(dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))[f"flowspec_{name}"])


def test_a_cluster_that_is_lost_and_another_one(model: Path) -> None:
    """A loss that no request waits out is a loss as well; nothing of those that ran is left."""
    feed, metrics = Feed(), Metrics(2, dict, {})

    def count() -> tuple[float, float]:
        return read(metrics, "losses_total"), read(metrics, "recoveries_total")

    with open_cluster(ClusterSpec(model, 2, threads=1, observer=Observers([metrics, feed]))) as clusters:
        clusters.generate(Request(PROMPT, "flowspec", 2))
        assert (feed.loss_reason, *count()) == (None, 0, 0)
        pids = clusters.pids
        over = clusters.submit(Request(PROMPT, "flowspec", 3),
                               on_third(lambda: os.kill(pids[1], signal.SIGKILL)))
        others = [clusters.submit(Request(PROMPT, "flowspec", 60)) for _ in range(2)]
        with pytest.raises(PeerLost):
            clusters.serve(lambda: False)
        assert len(over.result(0).tokens) == 3  # it waited for nothing but the stages' last counters
        for other in others:
            with pytest.raises(PeerLost):
                other.result(0)
        assert "V2 was killed" in (feed.loss_reason or "")
        assert feed.stats.event([], 0.0)["running"] == 0
        assert feed._open == {}
        assert count() == (1, 0)
        clusters.generate(Request(PROMPT, "flowspec", 2))
        assert (feed.loss_reason, *count()) == (None, 1, 1)


def test_after_a_fault_of_ours_nothing_of_those_that_ran_is_left(model: Path) -> None:
    feed, metrics = Feed(), Metrics(2, dict, {})
    feed.watched = True
    with open_cluster(ClusterSpec(model, 2, threads=1, observer=Observers([metrics, feed]))) as clusters:
        tickets = [clusters.submit(Request(PROMPT, "flowspec", 60)) for _ in range(2)]
        turns = iter(range(20))
        with pytest.raises(StopIteration):
            clusters.serve(lambda: next(turns) < 0)
        assert all(ticket.done for ticket in tickets)
        assert feed._open == {}
        assert feed.stats.event([], 0.0)["running"] == 0
        assert feed.loss_reason is None
        flow = feed.take_flow()
        opened = [event.session for event in flow if isinstance(event, SessionOpened)]
        assert opened == [event.session for event in flow if isinstance(event, SessionEnded)] != []


def test_rounds_after_a_loss_are_as_deep_as_before(model: Path) -> None:
    """Without drafts none is accepted; text that is read in again, in several segments, is no round."""
    metrics = Metrics(2, dict, {})
    request = Request(PROMPT, "autoregressive", 8, params=Params(prefill_chunk=16))
    with open_cluster(ClusterSpec(model, 2, threads=1, rejoin_within=PATIENCE, observer=metrics)) as clusters:
        clusters.generate(replace(request, max_new_tokens=1))
        pids = clusters.pids
        clusters.generate(request, on_third(lambda: os.kill(pids[0], signal.SIGKILL)))
    assert read(metrics, "losses_total") == read(metrics, "recoveries_total") == 1
    assert read(metrics, "round_accepted_tokens_count") > 0
    assert read(metrics, "round_accepted_tokens_sum") == read(metrics, "accepted_tokens_total") == 0


def test_a_lost_cluster_leaves_no_models_behind(model: Path) -> None:
    """At once, not when the garbage collector next looks: a device has no memory for two of them."""
    with open_cluster(ClusterSpec(model, 2, threads=1)) as clusters:
        clusters.generate(Request(PROMPT, "flowspec", 2))
        running = clusters.running
        assert running
        models, pid = weakref.ref(running.draft_models), clusters.pids[0]
        del running
        gc.disable()
        try:
            with suppress(PeerLost):
                clusters.generate(Request(PROMPT, "flowspec", 60),
                                  on_third(lambda: os.kill(pid, signal.SIGKILL)))
            clusters.generate(Request(PROMPT, "flowspec", 2))
            assert models() is None
        finally:
            gc.enable()

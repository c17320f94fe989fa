"""Requests beside one another in real processes: each gets the tokens of its run alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kits.process_clusters import PATIENCE, served
from kits.requests import own_text, prompt, some, text

from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.run_events import RunEvent, SegmentSent, SessionOpened
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.rule import Sampling


@pytest.fixture(scope="module")
def processes(tiny_model: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(ClusterSpec(tiny_model, 2, threads=1)).start() as made:
        yield made


def test_processes_answer_several_at_once(processes: ProcessCluster, tiny_model: Path) -> None:
    requests = some(4, ["flowspec", "chunk_pp", "pipeinfer"])
    results = processes.generate_many(requests)
    assert [result.tokens for result in results] == [own_text(tiny_model, request) for request in requests]
    alone = processes.generate(requests[1])
    for mine, its in zip(results[1].stats.stages, alone.stats.stages, strict=True):
        # Drafts depend on the moment, so rows may differ, but not by another request's.
        assert mine["segments"] < its["segments"] + 10
        assert mine["rows"] >= len(requests[1].prompt)


class FirstSent(Observer):
    """Notes which request's segment was the first one, after the newest request had begun."""

    def __init__(self) -> None:
        self.priorities: dict[int, int] = {}  # by session
        self.first: int | None = None

    def observe(self, event: RunEvent) -> None:
        match event:
            case SessionOpened():
                self.priorities[event.session] = event.request.priority
                self.first = None
            case SegmentSent() if self.first is None:
                self.first = self.priorities[event.session]


def test_processes_in_order_of_arrival(tiny_model: Path) -> None:
    """But for the priority, which comes first."""
    requests = [replace(request, priority=-i) for i, request in enumerate(some(3, ["flowspec"]))]
    observer = FirstSent()
    with ProcessCluster(ClusterSpec(tiny_model, 2, threads=1, observer=observer,
                                    scheduling_policy="fcfs")).start() as cluster:
        results = cluster.generate_many(requests)
    assert [result.tokens for result in results] == [own_text(tiny_model, request) for request in requests]
    assert observer.first == -2


def test_a_server_takes_requests_from_other_threads(processes: ProcessCluster, tiny_model: Path) -> None:
    """One goes away, one cannot run, one's listener fails; the others get their texts."""
    with served(processes):
        requests = some(3, ["flowspec", "autoregressive"])
        streamed: list[int] = []
        heard = threading.Event()
        endless = processes.submit(Request(prompt(9), "flowspec", 1500), lambda new: heard.set())
        tickets = [processes.submit(requests[0], streamed.extend), processes.submit(requests[1])]
        unfit = processes.submit(Request(prompt(9), "flowspec", 5000))

        def fail(new: list[int]) -> None:
            raise ValueError("the listener is gone")

        failing = processes.submit(requests[2], fail)
        assert heard.wait(PATIENCE)
        endless.cancel()
        result = endless.result(PATIENCE)
        assert result.finish_reason == "cancelled"
        assert 0 < len(result.tokens) < 1500
        assert result.tokens[:20] == text(tiny_model, tuple(prompt(9)), 20, Sampling())[: len(result.tokens)]
        for ticket, request in zip(tickets, requests, strict=False):
            assert ticket.result(PATIENCE).tokens == own_text(tiny_model, request)
        assert streamed == tickets[0].result().tokens
        with pytest.raises(UsageError, match="the model stops at"):
            unfit.result(PATIENCE)
        with pytest.raises(ValueError, match="the listener is gone"):
            failing.result(PATIENCE)
        assert processes.generate(requests[2]).tokens == own_text(tiny_model, requests[2])
    assert processes.generate(requests[1]).tokens == own_text(tiny_model, requests[1])


def test_what_is_cancelled_while_it_waits_is_not_begun(processes: ProcessCluster, tiny_model: Path) -> None:
    request = some(1, ["flowspec"])[0]
    gone, stays = processes.submit(request), processes.submit(request)
    gone.cancel()
    assert processes.busy
    processes.serve(gone.done)
    result = gone.result(0)
    assert (result.tokens, result.finish_reason, result.stats.stages) == ([], "cancelled", ())
    processes.serve(stays.done)
    assert stays.result(0).tokens == own_text(tiny_model, request)
    assert not processes.busy

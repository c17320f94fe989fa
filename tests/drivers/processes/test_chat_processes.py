"""Chats over real processes: each turn reads in only what is new, in the memory that there is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kits.process_clusters import PATIENCE, served
from kits.requests import own_text, prompt

from flowspec_edge.d0.capacity import session_rows
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.run_events import HeartbeatArrived, RunEvent, SessionOpened
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.params import Params

STAGES = 2
ROW = 2 * 2 * 2 * 16 * 4  # bytes in a stage: layers, key and value, kv heads, head_dim, fp32
SMALL = Params(segment=4, width=4, tree_size=20, depth=3, prefill_chunk=16, pipeinfer_split=0.1)
LOOK_UP = replace(SMALL, draft="eagle2", ngram=True, ngram_min=1)
SAMPLED = Sampling(1.0, seed=11)
BUDGET = 2 * 1200


class Watch(Observer):
    """What the stages hold, and who begins when."""

    def __init__(self) -> None:
        self.most_bytes = 0.0
        self.order: list[int] = []  # of the requests: the first token of the prompt

    def observe(self, event: RunEvent) -> None:
        match event:
            case HeartbeatArrived():
                self.most_bytes = max(self.most_bytes, event.beat.counters.get("cache_bytes", 0.0))
            case SessionOpened():
                self.order.append(event.request.prompt[0])


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, watch: Watch) -> Iterator[ProcessCluster]:
    with ProcessCluster(ClusterSpec(tiny_model, STAGES, threads=1, cache_rows=BUDGET,
                                    observer=watch)).start() as made:
        yield made


def test_what_the_cluster_asked_itself_is_not_kept(cluster: ProcessCluster) -> None:
    assert cluster.generate(Request([0] * 90, "autoregressive", 1)).stats.reused == 0  # the first of all


class Chat:
    """One client's: its history, and what of it the stages must have."""

    def __init__(self, seed: int, strategy: str, params: Params, sampling: Sampling) -> None:
        self.seed, self.strategy, self.params, self.sampling = seed, strategy, params, sampling
        self.history, self.known = prompt(seed, 40), 0

    def turn(self, cluster: ProcessCluster, model: Path, tokens: int = 8) -> None:
        request = Request(self.history, self.strategy, tokens, self.sampling, self.params)
        answer = own_text(model, request)
        result = cluster.submit(request).result(PATIENCE)
        assert result.tokens == answer
        # The newest token of a text no stage has seen, unless more was decided with it; one row less
        # than is shared, so that one is computed.
        assert self.known - 1 <= result.stats.reused <= self.known
        assert result.as_json("")["stats"]["reused"] == result.stats.reused
        self.seed += 1
        self.known = max(0, len(self.history) + len(answer) - 1)
        self.history = [*self.history, *answer, *prompt(self.seed, 3)]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_chats_of_several_turns_in_turns(cluster: ProcessCluster, tiny_model: Path, sampling: Sampling
                                         ) -> None:
    """With different drafters, one after the other, so that each one's rows wait for it meanwhile."""
    seed = 1000 * sampling.seed  # nothing of the other's is to be found
    chats = [Chat(seed + 100, "flowspec", SMALL, sampling), Chat(seed + 200, "pipeinfer", SMALL, sampling),
             Chat(seed + 300, "chunk_pp", LOOK_UP, sampling),
             Chat(seed + 400, "autoregressive", SMALL, sampling)]
    with served(cluster):
        for _ in range(3):
            for chat in chats:
                chat.turn(cluster, tiny_model)


def test_one_whose_listener_fails_leaves_its_rows(cluster: ProcessCluster, tiny_model: Path) -> None:
    request = Request(prompt(9, 60), "flowspec", 50, SAMPLED, SMALL)

    def fail(new: list[int]) -> None:
        raise ValueError("the client is gone")

    with served(cluster):
        with pytest.raises(ValueError, match="the client is gone"):
            cluster.submit(request, fail).result(PATIENCE)
        result = cluster.submit(request).result(PATIENCE)
        assert (result.tokens, result.stats.reused) == (own_text(tiny_model, request), 59)


def test_requests_wait_for_room_in_their_order(cluster: ProcessCluster, tiny_model: Path, watch: Watch
                                               ) -> None:
    """Two fit at a time; one that needs all the room runs alone, and no other overtakes it."""
    requests = [Request([i, *prompt(40 + i, 60)], "flowspec", 8, SAMPLED, SMALL) for i in range(1, 6)]
    requests[2] = Request([3, *prompt(43, 60)], "flowspec", 1250, SAMPLED, SMALL)
    assert session_rows(requests[0], STAGES) * 2 < BUDGET < session_rows(requests[0], STAGES) * 3
    assert session_rows(requests[2], STAGES) < BUDGET < session_rows(requests[2], STAGES) + 200
    watch.order.clear()
    heard = threading.Event()
    handles = [cluster.submit(r, (lambda new: heard.set()) if r is requests[2] else None) for r in requests]
    with served(cluster):
        assert heard.wait(PATIENCE)
        handles[2].cancel()
        for i in (0, 1, 3, 4):
            assert handles[i].result(PATIENCE).tokens == own_text(tiny_model, requests[i])
        assert handles[2].result(PATIENCE).finish_reason == "cancelled"
    assert watch.order == [1, 2, 3, 4, 5]
    assert 1200 * ROW < watch.most_bytes <= BUDGET * ROW  # they tell at every Close

    # One that needs more than there is runs alone; the stages keep the memory that they allocate for it.
    request = Request(prompt(60, 40), "autoregressive", 1500, params=SMALL)
    assert session_rows(request, STAGES) > BUDGET
    beside = Request(prompt(61, 40), "flowspec", 8, params=SMALL)
    heard.clear()
    handles = [cluster.submit(r, (lambda new: heard.set()) if r is request else None)
               for r in (beside, request, beside)]
    with served(cluster):
        assert heard.wait(PATIENCE)
        handles[1].cancel()
        for handle in (handles[0], handles[2]):
            assert handle.result(PATIENCE).tokens == own_text(tiny_model, beside)
        assert handles[1].result(PATIENCE).finish_reason == "cancelled"


def test_after_a_fault_nothing_is_kept_and_all_rows_are_free(cluster: ProcessCluster, tiny_model: Path
                                                             ) -> None:
    request = Request(prompt(70, 60), "flowspec", 8, params=SMALL)
    assert cluster.generate(request).tokens == own_text(tiny_model, request)
    endless = [cluster.submit(replace(request, max_new_tokens=n)) for n in (900, 200)]
    turns = iter(range(20))
    with pytest.raises(StopIteration):
        cluster.serve(lambda: next(turns) < 0)
    for handle in endless:
        with pytest.raises(StopIteration):
            handle.result(PATIENCE)
    results = cluster.generate_many([request, request])
    assert [result.tokens for result in results] == [own_text(tiny_model, request)] * 2
    assert [result.stats.reused for result in results] == [0, 0]

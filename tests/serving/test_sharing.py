"""Several clients in the cluster at a time: their texts, their places, and what leaving one sets free."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from kits.http_server import LONG, NAME, Held, Running, Watch, ask, placed, post, read_until, running, served
from kits.plain_answers import plain_text
from kits.process_clusters import PATIENCE, until

from flowspec_edge.d0.capacity import cache_rows
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.serving.access_log import CLIENT_CLOSED_REQUEST
from flowspec_edge.strategies.params import Params


def test_clients_at_once_get_the_texts_of_plain_decoding(processes: ProcessCluster, model: Path) -> None:
    """Nine clients, of whom some stream and some sample, and four have a place at a time."""
    def one(server: Running, i: int) -> str:
        how: dict[str, Any] = {"max_tokens": 8 + 3 * i, "temperature": i % 2, "top_p": 0.9, "seed": i}
        if i % 3:
            return str(ask(server, f"prompt {i}", **how).choices[0].text)
        return "".join(chunk.choices[0].text for chunk in ask(server, f"prompt {i}", stream=True, **how))

    with running(served(model), processes, at_once=4) as server, ThreadPoolExecutor(9) as pool:
        texts = list(pool.map(lambda i: one(server, i), range(9)))
    for i, found in enumerate(texts):
        assert found == plain_text(model, f"prompt {i}", 8 + 3 * i, Sampling(i % 2, 0, 0.9, i) if i % 2 else None)


def test_one_more_than_there_is_room_for_waits_with_its_position(processes: ProcessCluster, model: Path) -> None:
    with running(served(model), processes, at_once=2, capacity=1) as server, ThreadPoolExecutor(1) as pool:
        endless = [post(server, {"prompt": f"endless {i}", "max_tokens": LONG}) for i in range(2)]
        until(lambda: server.http.get("/ready").json()["running"] == 2)
        third = pool.submit(server.client.completions.with_raw_response.create, model=NAME, prompt="third",
                            max_tokens=6)
        until(lambda: server.http.get("/ready").json()["waiting"] == 1)
        with pytest.raises(openai.RateLimitError, match="the queue is full, with 2 running and 1 waiting") as refused:
            ask(server, "fourth")
        assert refused.value.code == "rate_limit_exceeded"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
        assert not third.done()
        endless[1].close()
        answer = third.result(PATIENCE)
        assert answer.headers["x-flowspec-position"] == "1"
        assert answer.parse().choices[0].text == plain_text(model, "third", 6)
        state = server.http.get("/ready").json()
        assert (state["running"], state["waiting"]) == (1, 0)
        endless[0].close()


def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(
        processes: ProcessCluster, watch: Watch, model: Path) -> None:
    long = "a long prompt " * 60
    with running(served(model), processes, at_once=1) as server:
        with ask(server, "runs", max_tokens=LONG, stream=True) as stream:  # of one that runs
            next(iter(stream))
            ran = max(watch.segments)
            waits = post(server, {"prompt": "waits", "max_tokens": 6})  # and of one that waits
            until(lambda: server.admission.readiness().waiting == 1)
            waits.close()
            assert server.records.wait(CLIENT_CLOSED_REQUEST).queued_s is None
            assert server.admission.readiness().waiting == 0
        assert ask(server, "next").choices[0].text == plain_text(model, "next", 6)
        until(lambda: ran in watch.closed)  # their caches are free

        with watch.holding():
            reads = post(server, {"prompt": long, "max_tokens": 1000})  # and of one that is being read in
            assert watch.holds.wait(PATIENCE)
            read, gone = max(watch.segments), len(server.records.seen)
            reads.close()
            until(lambda: len(server.records.seen) > gone)
        assert ask(server, "after").choices[0].text == plain_text(model, "after", 6)
        until(lambda: read in watch.closed)
        assert watch.segments[read] <= 2  # of fourteen
        assert server.admission.readiness().running == 0


def test_a_caller_with_many_requests_gives_one_place_up(processes: ProcessCluster, model: Path) -> None:
    held = Held(processes)
    with running(served(model), held, at_once=2) as server, ThreadPoolExecutor(8) as pool:
        busy = [post(server, {"prompt": "endless", "max_tokens": LONG, "user": "a"}) for _ in range(2)]
        until(lambda: server.admission.readiness().running == 2)
        asked: list[Future[Any]] = []
        for waiting, (user, length) in enumerate([("a", 10), ("a", 20), ("a", 30), ("b", 40)], start=1):
            asked.append(pool.submit(ask, server, "x " * length, user=user))
            until(lambda n=waiting: server.admission.readiness().waiting == n)
        busy[0].close()
        for answer in asked:
            answer.result(PATIENCE)
        busy[1].close()
        lengths = [len(request.prompt) for request in held.started[3:]]
        assert [sorted(lengths).index(length) for length in lengths] == [3, 0, 1, 2]  # a has two, b none


FLOODS: dict[str, dict[str, Any]] = {
    "tokens": {}, "n": {"n": 3}, "priority": {"priority": -10}, "users": {"user": "of each"}}


@pytest.mark.parametrize("flood", [*FLOODS, pytest.param("prompts", marks=pytest.mark.soak)])
def test_a_flood_from_one_address_does_not_keep_another_out(
        processes: ProcessCluster, model: Path, flood: str) -> None:
    """Its answers outlast the test, so what the other caller gets is taken from it."""
    with running(served(model), processes, at_once=2, capacity=4) as server:
        for i in range(8):
            fields = {"user": f"user {i}"} if flood == "users" else FLOODS.get(flood, {"prompt": ["of", "three"]})
            post(server, {"prompt": f"flood {i}", "max_tokens": LONG, **fields})
        until(lambda: sum(placed(server)) >= 5)
        with from_address(server, "127.0.0.2") as other:
            for i in range(2):
                answer = other.completions.create(model=NAME, prompt=f"other {i}", max_tokens=6)
                assert answer.choices[0].text == plain_text(model, f"other {i}", 6)
                assert sum(record.status == 200 for record in server.records.seen) <= i + 1


@pytest.mark.slow
def test_answers_that_give_way_are_those_of_plain_decoding(processes: ProcessCluster, model: Path) -> None:
    """Two long ones of a caller; the newer gives its place to another's short ones, again and again."""
    samplings = [Sampling(), Sampling(1.0, 0, 0.9, 7)]
    with running(served(model), processes, at_once=2) as server, ThreadPoolExecutor(2) as pool:
        long = [pool.submit(ask, server, f"long {i}", max_tokens=150, temperature=sampling.temperature,
                            top_p=0.9, seed=7) for i, sampling in enumerate(samplings)]
        until(lambda: placed(server)[0] == 2)
        with from_address(server, "127.0.0.2") as other:
            for i in range(4):
                answer = other.completions.create(model=NAME, prompt=f"short {i}", max_tokens=6)
                assert answer.choices[0].text == plain_text(model, f"short {i}", 6)
                assert answer.usage is not None
        found = [answer.result(PATIENCE) for answer in long]
    for i, (answer, sampling) in enumerate(zip(found, samplings, strict=True)):
        assert answer.choices[0].text == plain_text(model, f"long {i}", 150, sampling)
        assert answer.usage.completion_tokens == 150
        assert answer.usage.prompt_tokens_details.cached_tokens < answer.usage.prompt_tokens


def test_requests_for_the_whole_cache_give_way_to_others(model: Path) -> None:
    rows = cache_rows(LONG + 100, 1, Params(), 1)
    with (ProcessCluster(ClusterSpec(model, 1, threads=1, at_once=2, cache_rows=rows)).start() as cluster,
          running(served(model), cluster, at_once=2, keep_alive_s=0.05) as server):
        whole = {"prompt": "whole", "max_tokens": LONG, "stream": True}
        first = post(server, whole)
        read_until(first, b"data:")
        second = post(server, whole)
        assert b"data:" not in read_until(second, b": waiting for room in the stages' caches")
        first.close()
        read_until(second, b"data:")
        for _ in range(2):
            post(server, whole)
        with from_address(server, "127.0.0.2") as other:
            answer = other.completions.create(model=NAME, prompt="other", max_tokens=6)
            assert answer.choices[0].text == plain_text(model, "other", 6)
        assert not any(record.status == 200 and record.completion_tokens > 6
                       for record in server.records.seen)  # none of the large ones is over


@contextmanager
def from_address(server: Running, address: str) -> Iterator[openai.OpenAI]:
    with httpx2.Client(transport=httpx2.HTTPTransport(local_address=address), trust_env=False) as http:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)


def test_a_killed_stage_that_may_come_back_loses_nothing(model: Path) -> None:
    prompts = [f"prompt {i}" for i in range(3)]
    with open_cluster(ClusterSpec(model, 2, threads=1, at_once=2, rejoin_within=PATIENCE)) as clusters:
        held = Held(clusters)
        with running(served(model), held, at_once=2) as server, ThreadPoolExecutor(3) as pool:
            # While a piece is held no request begins, so the first one that is held is of a second request's time.
            held.on_piece = lambda: held.may_go.clear() if len(held.started) > 1 else None
            answers = pool.map(lambda prompt: "".join(
                chunk.choices[0].text for chunk in ask(server, prompt, max_tokens=40, stream=True)), prompts)
            until(lambda: not held.may_go.is_set())
            os.kill(clusters.pids[1], signal.SIGKILL)
            held.on_piece = lambda: None
            held.may_go.set()
            until(lambda: server.ready() == (503, "the cluster is recovering: V2 was killed by SIGKILL"))
            assert list(answers) == [plain_text(model, prompt, 40) for prompt in prompts]
            assert server.ready() == (200, "")

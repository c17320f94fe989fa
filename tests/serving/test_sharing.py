"""Several clients in the cluster at a time: their texts, their places, and what leaving one sets free."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from clusterkit import PATIENCE, until
from servekit import LONG, NAME, Held, Running, Watch, ask, post, running, served
from transformers import AutoTokenizer

from flowspec_edge.model.modeldir import ModelDir
from flowspec_edge.runtime.cluster.clusters import LocalCluster
from flowspec_edge.runtime.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.serving.access_log import GONE


@pytest.fixture(scope="module")
def text(model: Path, plain: PlainDecoder) -> Callable[..., str]:
    """Plain decoding's text."""
    tokenizer = AutoTokenizer.from_pretrained(model / "target")

    def of(prompt: str, tokens: int, sampling: Sampling | None = None) -> str:
        ids = tokenizer(prompt)["input_ids"]
        new, _ = plain.generate(ids, tokens, sampling or Sampling(), ModelDir(model).stop_ids)
        return str(tokenizer.decode(new))

    return of


def test_clients_at_once_get_the_texts_of_plain_decoding(processes: LocalCluster, model: Path,
                                                         text: Callable[..., str]) -> None:
    """Nine clients, of whom some stream and some sample, and four have a place at a time."""
    def one(server: Running, i: int) -> str:
        how: dict[str, Any] = {"max_tokens": 8 + 3 * i, "temperature": i % 2, "top_p": 0.9, "seed": i}
        if i % 3:
            return str(ask(server, f"prompt {i}", **how).choices[0].text)
        return "".join(chunk.choices[0].text for chunk in ask(server, f"prompt {i}", stream=True, **how))

    with running(served(model), processes, at_once=4) as server, ThreadPoolExecutor(9) as pool:
        texts = list(pool.map(lambda i: one(server, i), range(9)))
    for i, found in enumerate(texts):
        assert found == text(f"prompt {i}", 8 + 3 * i, Sampling(i % 2, 0, 0.9, i) if i % 2 else None)


def test_one_more_than_there_is_room_for_waits_with_its_position(processes: LocalCluster, model: Path,
                                                                 text: Callable[..., str]) -> None:
    with running(served(model), processes, at_once=2, capacity=1) as server, ThreadPoolExecutor(1) as pool:
        endless = [post(server, {"prompt": f"endless {i}", "max_tokens": LONG}) for i in range(2)]
        until(lambda: server.http.get("/ready").json()["running"] == 2)
        third = pool.submit(server.client.completions.with_raw_response.create, model=NAME, prompt="third",
                            max_tokens=6)
        until(lambda: server.http.get("/ready").json()["waiting"] == 1)
        with pytest.raises(openai.RateLimitError, match="1 requests are waiting already"):
            ask(server, "fourth")
        assert not third.done()
        endless[1].close()
        answer = third.result(PATIENCE)
        assert answer.headers["x-flowspec-position"] == "1"
        assert answer.parse().choices[0].text == text("third", 6)
        state = server.http.get("/ready").json()
        assert (state["running"], state["waiting"]) == (1, 0)
        endless[0].close()


def test_who_leaves_while_it_runs_or_waits_or_is_read_in_leaves_nothing_behind(
        processes: LocalCluster, watch: Watch, model: Path, text: Callable[..., str]) -> None:
    long = "a long prompt " * 60
    with running(served(model), processes, at_once=1) as server:
        with ask(server, "runs", max_tokens=LONG, stream=True) as stream:  # of one that runs
            next(iter(stream))
            ran = max(watch.segments)
            waits = post(server, {"prompt": "waits", "max_tokens": 6})  # and of one that waits
            until(lambda: server.admission.readiness().waiting == 1)
            waits.close()
            assert server.records.wait(GONE).queued_s is None
        assert ask(server, "next").choices[0].text == text("next", 6)
        until(lambda: ran in watch.closed)  # their caches are free

        with watch.holding():
            reads = post(server, {"prompt": long, "max_tokens": 1000})  # and of one that is being read in
            assert watch.holds.wait(PATIENCE)
            read, gone = max(watch.segments), len(server.records.seen)
            reads.close()
            until(lambda: len(server.records.seen) > gone)
        assert ask(server, "after").choices[0].text == text("after", 6)
        until(lambda: read in watch.closed)
        assert watch.segments[read] <= 2  # of fourteen
        assert server.admission.readiness().running == 0


def test_a_caller_with_many_requests_delays_another_by_one(processes: LocalCluster, model: Path) -> None:
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
        assert [sorted(lengths).index(length) for length in lengths] == [0, 3, 1, 2]


def test_a_killed_stage_that_may_come_back_loses_nothing(model: Path, text: Callable[..., str]) -> None:
    prompts = [f"prompt {i}" for i in range(3)]
    with LocalCluster(model, 2, threads=1, at_once=2, rejoin_within=PATIENCE) as clusters:
        held = Held(clusters)
        with running(served(model), held, at_once=2) as server, ThreadPoolExecutor(3) as pool:
            held.may_go.clear()
            answers = pool.map(lambda prompt: "".join(
                chunk.choices[0].text for chunk in ask(server, prompt, max_tokens=40, stream=True)), prompts)
            until(lambda: len(held.started) > 1 and held.pieces > 0)
            assert clusters.running is not None
            os.kill(clusters.running.pids[1], signal.SIGKILL)
            held.may_go.set()
            until(lambda: server.ready() == (503, "the cluster is recovering: V2 was killed by SIGKILL"))
            assert list(answers) == [text(prompt, 40) for prompt in prompts]
            assert server.ready() == (200, "")


def test_a_killed_stage_loses_those_that_run_and_none_that_wait(processes: LocalCluster, model: Path,
                                                               text: Callable[..., str]) -> None:
    with running(served(model), processes, at_once=2) as server, ThreadPoolExecutor(5) as pool:
        began = [threading.Event() for _ in range(2)]

        def endless(i: int) -> None:
            for _ in ask(server, f"endless {i}", max_tokens=LONG, stream=True):
                began[i].set()

        lost = [pool.submit(endless, i) for i in range(2)]
        assert all(event.wait(PATIENCE) for event in began)
        wait = [pool.submit(ask, server, f"waits {i}") for i in range(3)]
        until(lambda: server.admission.readiness().waiting == 3)
        assert processes.running is not None
        os.kill(processes.running.pids[0], signal.SIGKILL)
        for future in lost:
            with pytest.raises(openai.APIError, match="V1 was killed by SIGKILL"):
                future.result(PATIENCE)
        for i, future in enumerate(wait):
            assert future.result(PATIENCE).choices[0].text == text(f"waits {i}", 6)

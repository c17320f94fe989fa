"""Many clients, one cluster: who waits, who is refused, who goes away; judged by events, not by time."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from kits.http_server import LONG, NAME, Held, ask, post, running, served
from kits.process_clusters import PATIENCE, until
from transformers import AutoTokenizer

from flowspec_edge.d0.capacity import cache_rows
from flowspec_edge.d0.request import Result
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.serving.access_log import CLIENT_CLOSED_REQUEST
from flowspec_edge.strategies.params import Params


def received(connection: socket.socket) -> bytes:
    """What comes next, which is something."""
    data = connection.recv(4096)
    assert data
    return data


def broken_off(end: Result | BaseException) -> bool:
    """Whether a request ended because its client no longer waited for it."""
    return isinstance(end, Result) and end.finish_reason == "cancelled" and len(end.tokens) < LONG


def test_eight_at_once_with_room_for_two_to_wait(held: Held, model: Path, plain: PlainDecoder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model / "target")
    prompts = [f"prompt {i}" for i in range(8)]
    refused: list[openai.RateLimitError] = []
    all_refused = threading.Event()

    def one(prompt: str) -> str | None:
        try:
            return str(ask(server, prompt).choices[0].text)
        except openai.RateLimitError as error:
            refused.append(error)
            if len(refused) == 5:
                all_refused.set()
            return None

    with running(served(model), held, capacity=2) as server, ThreadPoolExecutor(8) as pool:
        held.may_go.clear()
        answers = pool.map(one, prompts)
        assert all_refused.wait(PATIENCE)
        held.may_go.set()
        texts = dict(zip(prompts, answers, strict=True))
        assert {error.response.headers["retry-after"] for error in refused} <= {str(s) for s in range(1, 61)}
        assert {error.code for error in refused} == {"rate_limit_exceeded"}
        assert ask(server, prompts[0]).choices[0].text  # nothing is held back for those who were refused
    answered = {prompt: text for prompt, text in texts.items() if text is not None}
    assert len(answered) == 3
    for prompt, text in answered.items():
        new, _ = plain.generate(tokenizer(prompt)["input_ids"], 6, Sampling(), OpenModel(model).stop_ids)
        assert text == tokenizer.decode(new)


def test_the_unmodified_client_comes_back_when_told(held: Held, model: Path) -> None:
    with running(served(model), held, capacity=0) as server, ThreadPoolExecutor(2) as pool:
        held.may_go.clear()
        first = pool.submit(ask, server, "first")
        until(lambda: len(held.started) == 2)  # the probe, and this one
        patient = server.client.with_options(max_retries=3)
        second = pool.submit(patient.completions.create, model=NAME, prompt="second", max_tokens=2)
        server.records.wait(429)
        held.may_go.set()
        assert first.result(PATIENCE).choices[0].text
        assert second.result(PATIENCE).choices[0].text


def test_a_higher_priority_starts_first(held: Held, model: Path) -> None:
    """As with vLLM a lower number is a higher priority."""
    with running(served(model), held) as server, ThreadPoolExecutor(8) as pool:
        held.may_go.clear()
        asked = []
        for waiting, (priority, length) in enumerate([(0, 1), (0, 2), (7, 3), (-1, 4), (0, 5)]):
            asked.append(pool.submit(ask, server, "x " * length, extra_body={"priority": priority}))
            until(lambda n=waiting: (server.admission.readiness().waiting, len(held.started)) == (n, 2))
        assert [(one.priority, one.ahead) for one in server.admission.waiting()] == [
            (-1, 1), (0, 2), (0, 3), (7, 4)]
        held.may_go.set()
        for answer in asked:
            answer.result(PATIENCE)
        shortest = sorted(len(request.prompt) for request in held.started[1:])
        order = [shortest.index(len(request.prompt)) for request in held.started[1:]]
        assert order == [0, 3, 1, 4, 2]
        assert [request.priority for request in held.started[1:]] == [0, -1, 0, 0, 7]
        with pytest.raises(openai.BadRequestError, match="priority"):
            ask(server, "x", extra_body={"priority": "high"})
        for beyond in (-11, 11, -10**9):
            with pytest.raises(openai.BadRequestError, match="-10 to 10") as refused:
                ask(server, "x", extra_body={"priority": beyond})
            assert refused.value.param == "priority"


def test_a_request_waits_for_room_beside_another(model: Path) -> None:
    """It has a place, but the caches are sized for one text of the longest kind."""
    rows = cache_rows(LONG + 100, 1, Params(), 1)
    with (ProcessCluster(ClusterSpec(model, 1, threads=1, at_once=2, cache_rows=rows)).start() as cluster,
          running(served(model), cluster, at_once=2, keep_alive_s=0.05) as server):
        large = {"prompt": "x", "max_tokens": LONG, "stream": True}
        first = post(server, large)
        assert first.recv(100).startswith(b"HTTP/1.1 200 OK")
        second, seen = post(server, large), b""
        while b": waiting for room in the stages' caches" not in seen:
            seen += received(second)
        assert b"data:" not in seen
        first.close()
        while b"data:" not in seen:
            seen += received(second)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(held: Held, model: Path, stream: bool) -> None:
    with running(served(model), held) as server:
        held.may_go.clear()
        connection = post(server, {"prompt": "x", "max_tokens": LONG, "stream": stream})
        until(lambda: (len(held.started), held.pieces) == (2, 1))
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        connection.close()
        line = server.records.wait(CLIENT_CLOSED_REQUEST)
        assert line.completion_tokens <= 1
        held.may_go.set()
        assert ask(server, "next").choices[0].text
    assert broken_off(held.ends[1])
    assert len(held.started) == 3


def test_the_official_client_closing_its_stream_is_seen(held: Held, model: Path) -> None:
    with running(served(model), held) as server:
        with ask(server, "x", max_tokens=LONG, stream=True) as stream:
            assert next(iter(stream)).choices[0].finish_reason is None
        assert ask(server, "next").choices[0].text
        server.records.wait(CLIENT_CLOSED_REQUEST)
    assert broken_off(held.ends[1])


def test_a_stop_string_frees_the_cluster(held: Held, model: Path) -> None:
    with running(served(model), held) as server:
        first = ask(server, "x").choices[0].text[0]
        assert ask(server, "x", max_tokens=LONG, stop=first).choices[0].finish_reason == "stop"
        assert ask(server, "next").choices[0].text
    assert broken_off(held.ends[2])


def test_who_goes_away_while_waiting_leaves_the_queue(held: Held, model: Path) -> None:
    with running(served(model), held, capacity=1) as server, ThreadPoolExecutor(1) as pool:
        held.may_go.clear()
        first = pool.submit(ask, server, "first")
        until(lambda: len(held.started) == 2)
        connection = post(server, {"prompt": "never", "max_tokens": 2})
        until(lambda: server.admission.readiness().waiting == 1)
        connection.close()
        assert server.records.wait(CLIENT_CLOSED_REQUEST).queued_s is None
        assert server.admission.readiness().waiting == 0
        held.may_go.set()
        assert first.result(PATIENCE).choices[0].text
        assert ask(server, "last").choices[0].text
    assert len(held.started) == 3  # the probe, the first and the last


def test_the_end_of_the_server_is_told_to_everybody(held: Held, model: Path) -> None:
    with ThreadPoolExecutor(2) as pool, running(served(model), held) as server:
        held.may_go.clear()
        asked = [pool.submit(ask, server, "x", max_tokens=LONG) for _ in range(2)]
        until(lambda: (len(held.started), server.admission.readiness().waiting) == (2, 1))
        server.admission.close()
        for answer in asked:
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                answer.result(PATIENCE)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            ask(server, "late")
        assert server.ready() == (503, "the server is shutting down")
    held.serve(lambda: len(held.ends) >= 3)  # the probe's, and both requests': the next server has no use for them
    assert all(map(broken_off, held.ends[1:]))

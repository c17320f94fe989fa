"""Many clients, one cluster: who waits, who is refused, who goes away; judged by events, not by time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from kits.http_server import LONG, NAME, Held, ask, post, running, served
from kits.process_clusters import PATIENCE, until

from flowspec_edge.d0.request import Result
from flowspec_edge.serving.access_log import CLIENT_CLOSED_REQUEST


def broken_off(end: Result | BaseException) -> bool:
    """Whether a request ended because its client no longer waited for it."""
    return isinstance(end, Result) and end.finish_reason == "cancelled" and len(end.tokens) < LONG


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


def test_a_refusal_counts_places_and_foretells_by_what_runs(held: Held, model: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that came together one has not begun yet, but does not wait for another's place."""
    clock = held.queue.clock
    with running(served(model), held, capacity=1, at_once=2) as server, ThreadPoolExecutor(3) as pool:
        held.may_go.clear()
        asked = [pool.submit(ask, server, "first")]
        until(lambda: (len(held.started), held.pieces) == (2, 1))  # now the thread that gives places is held
        asked += [pool.submit(ask, server, prompt) for prompt in ("second", "third")]
        until(lambda: held.queue.sizes == (1, 2))
        monkeypatch.setattr(held.queue, "clock", lambda: clock() + 20)
        with pytest.raises(openai.RateLimitError, match="with 2 running and 1 waiting; try again") as refused:
            ask(server, "one too many")
        assert 30 <= int(refused.value.response.headers["retry-after"]) <= 60  # three of 20 s or more, two at a time
        monkeypatch.undo()
        held.may_go.set()
        for answer in asked:
            answer.result(PATIENCE)


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


def test_a_stop_string_frees_the_cluster(held: Held, model: Path) -> None:
    with running(served(model), held) as server:
        first = ask(server, "x").choices[0].text[0]
        assert ask(server, "x", max_tokens=LONG, stop=first).choices[0].finish_reason == "stop"
        assert ask(server, "next").choices[0].text
    assert broken_off(held.ends[2])


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

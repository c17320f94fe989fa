"""Ready means that a token came: at the start, without requests, and before and after a stage was killed."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from kits.http_server import NAME, Held, Running, running, served
from kits.plain_answers import plain_text
from kits.process_clusters import PATIENCE, alive, until

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.errors import PeerLost, RequestFailed
from flowspec_edge.serving.admission import Admission, ClusterUnavailable

PROMPT = "def f(x): return"


def stream(server: Running, tokens: int) -> Any:
    return server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=tokens, stream=True)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_after_a_killed_stage_ready_waits_for_a_token(processes: ProcessCluster, model: Path) -> None:
    held, text = Held(processes), plain_text(model, PROMPT, 20)
    with running(served(model), held) as server, ThreadPoolExecutor(1) as pool:
        assert server.ready() == (200, "")
        held.may_go.clear()
        lost = stream(server, 1000)
        next(lost)
        waits = pool.submit(lambda: text_of(stream(server, 20)))
        until(lambda: server.admission.readiness().waiting == 1)
        held.may_start.clear()
        pids = processes.pids
        os.kill(pids[1], signal.SIGKILL)
        held.may_go.set()
        with pytest.raises(openai.APIError, match="the cluster was lost: V2 was killed by SIGKILL") as caught:
            list(lost)
        assert caught.value.code == "cluster_unavailable"
        status, reason = server.ready()
        assert (status, "V2 was killed by SIGKILL" in reason) == (503, True)
        assert server.http.get("/health").status_code == 200
        with pytest.raises(openai.InternalServerError, match="V2 was killed") as refused:
            stream(server, 1)
        assert refused.value.response.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) > 0
        held.may_start.set()  # a new cluster may come up
        assert waits.result(PATIENCE) == text
        assert server.ready() == (200, "")
        assert text_of(stream(server, 20)) == text
    assert not any(map(alive, pids))


def test_without_requests_tokens_come_now_and_then(held: Held, model: Path) -> None:
    with running(served(model), held, recent_s=0.2) as server:
        until(lambda: len(held.ends) >= 4)
        assert server.http.get("/ready").json()["token_age_s"] >= 0
        assert {request.max_new_tokens for request in held.started} == {1}
        assert server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=2).choices[0].text


def test_a_request_that_fails_leaves_the_cluster_ready(held: Held, model: Path) -> None:
    with running(served(model), held) as server:
        held.broken = RequestFailed("activations overflow float16")
        with pytest.raises(openai.InternalServerError, match="activations overflow float16") as caught:
            stream(server, 5)
        assert caught.value.response.status_code == 500
        held.broken = None
        assert server.ready() == (200, "")
        assert text_of(stream(server, 5))


def test_who_waits_for_a_cluster_that_does_not_come_back_is_told(held: Held, model: Path) -> None:
    with running(served(model), held, patience_s=0) as server, ThreadPoolExecutor(2) as pool:
        held.may_go.clear()
        asked = [pool.submit(lambda: text_of(stream(server, 5))) for _ in range(2)]
        until(lambda: (len(held.started), held.pieces, server.admission.readiness().waiting) == (2, 1, 1))
        held.broken = PeerLost("V1 is on fire")
        held.may_go.set()
        until(lambda: all(future.done() for future in asked))
        assert server.ready() == (503, "the cluster was lost: V1 is on fire")
        held.broken = None
        until(lambda: server.ready()[0] == 200)
        assert text_of(stream(server, 5))
    errors = [future.exception() for future in asked]
    assert sorted(type(error).__name__ for error in errors) == ["InternalServerError", "NoneType"]


def test_a_fault_of_ours_is_not_shown_to_clients(held: Held, model: Path,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    with running(served(model), held) as server:
        held.broken = ZeroDivisionError("with secrets in it")
        with pytest.raises(openai.InternalServerError, match="internal error") as caught:
            stream(server, 5)
        held.broken = None
        until(lambda: server.ready()[0] == 200)
    assert "secrets" not in str(caught.value)
    assert "(ZeroDivisionError)" in str(caught.value)
    assert "with secrets in it" in caplog.text


def test_ready_is_a_token_that_came_and_not_long_ago(held: Held, model: Path) -> None:
    now, ready = [100.0], threading.Event()
    admission = Admission(served(model).probe(), recent_s=60, clock=lambda: now[0])
    held.may_start.clear()
    owner = threading.Thread(target=admission.run, args=(held, ready.set))
    owner.start()
    state = admission.readiness()
    assert (state.ready, state.reason) == (
        False, "no token has come through the pipeline yet: the cluster is starting")
    with pytest.raises(ClusterUnavailable, match="is starting"):
        admission.submit(served(model).probe(), "me", print)
    held.may_start.set()
    assert ready.wait(PATIENCE)
    now[0] += 59
    assert admission.readiness().ready
    now[0] += 2
    assert admission.readiness().reason == "no token for 61 s"
    admission.close()
    owner.join(PATIENCE)
    assert not owner.is_alive()

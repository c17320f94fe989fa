"""Streams that have no token to send yet: what keeps their connections alive, on the wire."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from kits.http_server import LONG, Held, Watch, ask, post, read_until, running, served
from kits.process_clusters import PATIENCE, until

SHORT = 0.05  # seconds


def test_who_waits_is_told_so_in_comments_after_the_headers(held: Held, model: Path) -> None:
    with running(served(model), held, keep_alive_s=SHORT) as server:
        held.may_go.clear()
        first = post(server, {"prompt": "first", "max_tokens": LONG, "stream": True})
        until(lambda: (len(held.started), held.pieces) == (2, 1))
        second = post(server, {"prompt": "second", "max_tokens": 3, "stream": True})
        said = read_until(second, b": waiting, 1 before you\n\n")
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"text/event-stream" in head
        assert b"x-flowspec-position: 1" in head
        assert b"data:" not in body
        third = post(server, {"prompt": "third", "max_tokens": 3, "stream": True})
        read_until(third, b": waiting, 2 before you\n\n")
        first.close()
        held.may_go.set()
        assert b"data: {" in read_until(second, b"data: [DONE]\n\n")
        read_until(third, b"data: [DONE]\n\n")


def test_one_that_is_read_in_or_stands_still_is_told_so_too(held: Held, watch: Watch, model: Path) -> None:
    with running(served(model), held, keep_alive_s=SHORT) as server:
        with watch.holding():
            stream = post(server, {"prompt": "x", "max_tokens": 3, "stream": True})
            read_until(stream, b": working\n\n")
            held.lost = "V2 was\nkilled"
            read_until(stream, b": waiting: the cluster is recovering: V2 was killed\n\n")
            assert server.ready() == (503, "the cluster is recovering: V2 was\nkilled")
            held.lost = None
        read_until(stream, b"data: [DONE]\n\n")


@pytest.mark.parametrize("chat", [True, False])
def test_the_official_client_takes_no_notice(held: Held, model: Path, chat: bool) -> None:
    with running(served(model), held, keep_alive_s=SHORT) as server, ThreadPoolExecutor(1) as pool:
        quick = server.client.completions.create(model="tiny", prompt="x", max_tokens=5).choices[0].text
        held.may_go.clear()
        if chat:
            how = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
            chunks = pool.submit(lambda: list(server.client.chat.completions.create(**how, stream=True)))
        else:
            chunks = pool.submit(lambda: list(ask(server, "x", max_tokens=5, stream=True)))
        until(lambda: (len(held.started), held.pieces) == (3, 1))
        notes = post(server, {"prompt": "y", "max_tokens": 1, "stream": True})
        read_until(notes, b": waiting, 1 before you\n\n", 3)  # time enough for the other one's, too
        held.may_go.set()
        found = chunks.result(PATIENCE)
        read_until(notes, b"[DONE]")
        if chat:
            assert found[0].choices[0].delta.role == "assistant"
            assert [chunk.choices[0].delta.role for chunk in found[1:]] == [None] * (len(found) - 1)
        else:
            assert "".join(chunk.choices[0].text for chunk in found) == quick


def test_an_error_after_a_comment_is_the_last_event(held: Held, model: Path) -> None:
    with running(served(model), held, keep_alive_s=SHORT) as server:
        held.may_go.clear()
        first = post(server, {"prompt": "first", "max_tokens": LONG, "stream": True})
        until(lambda: (len(held.started), held.pieces) == (2, 1))
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(lambda: list(ask(server, "second", stream=True)))
            until(lambda: server.admission.readiness().waiting == 1)
            notes = post(server, {"prompt": "third", "stream": True})
            read_until(notes, b": waiting, 2 before you\n\n", 2)
            server.admission.close()
            with pytest.raises(openai.APIError, match="shutting down"):
                waits.result(PATIENCE)
            said = read_until(notes, b"cluster_unavailable")
        assert b"[DONE]" not in said
        first.close()

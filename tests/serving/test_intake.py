"""Long prompts: refused before they cost time, prepared beside the event loop, held in bounded memory."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from kits.http_server import NAME, Held, Running, ask, running, served
from kits.process_clusters import PATIENCE, until

from flowspec_edge.model.text import Tokenizer
from flowspec_edge.serving import app as app_module
from flowspec_edge.serving.intake import MAX_BODY_BYTES, Intake

LONG, SLOW = "a" * (MAX_BODY_BYTES - 1000), "def f(x):"


class Counting(Tokenizer):
    calls = 0

    def encode(self, text: str, special: bool = True) -> list[int]:
        self.calls += 1
        return super().encode(text, special)


class Waiting(Tokenizer):
    """Takes a while for f's definition: until another client has been answered."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.begun, self.may_end = threading.Event(), threading.Event()

    def encode(self, text: str, special: bool = True) -> list[int]:
        if text == SLOW:
            self.begun.set()
            assert self.may_end.wait(PATIENCE)
        return super().encode(text, special)


@pytest.mark.slow
def test_a_prompt_that_cannot_fit_is_not_tokenised(held: Held, model: Path) -> None:
    what = served(model)
    tokenizer = Counting(what.model, "vicuna")
    with running(replace(what, tokenizer=tokenizer), held) as server:
        tokenizer.calls = 0
        for body in ({"prompt": LONG}, {"prompt": [1] * 100_000}):
            with pytest.raises(openai.BadRequestError, match="context is 2048 tokens here") as caught:
                ask(server, **body)
            assert caught.value.code == "context_length_exceeded"
        turns = [{"role": ("user", "assistant")[i % 2], "content": ""} for i in range(3_999)]
        for messages in ([{"role": "user", "content": LONG[:1_000_000]}], turns):
            with pytest.raises(openai.BadRequestError, match="context is 2048 tokens here") as caught:
                server.client.chat.completions.create(model=NAME, messages=messages)  # type: ignore[arg-type]
            assert caught.value.code == "context_length_exceeded"
        assert tokenizer.calls == 0
        assert ask(server, SLOW).usage.prompt_tokens == 9


def test_the_queue_before_the_threads_is_bounded_and_fair(held: Held, model: Path) -> None:
    what = served(model)
    tokenizer = Waiting(what.model, "vicuna")
    with (running(replace(what, tokenizer=tokenizer), held, capacity=64) as server,
          ThreadPoolExecutor(40) as pool):
        def one(caller: str, prompt: str = SLOW) -> int:
            answer = server.http.post("/v1/completions", json={
                "model": NAME, "prompt": prompt, "max_tokens": 1, "user": caller})
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
            return int(answer.status_code)

        many = [pool.submit(one, "greedy") for _ in range(35)]
        assert tokenizer.begun.wait(PATIENCE)
        until(lambda: any(done.done() for done in many))  # those above the bound
        assert one("modest", "x") == 200
        tokenizer.may_end.set()
        assert sorted({done.result() for done in many}) == [200, 429]


def test_bodies_together_are_bounded(held: Held, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "Intake", lambda: Intake(max_held_bytes=1000))
    with running(served(model), held) as server:
        def refusal() -> openai.InternalServerError | None:
            try:
                ask(server, "a" * 600, max_tokens=1)
            except openai.InternalServerError as error:
                return error
            return None

        with sent_half(server, 900):
            until(lambda: refusal() is not None)  # once the server has read the half
            error = refusal()
        assert error is not None
        assert (error.status_code, error.code) == (503, "overloaded")
        assert error.response.headers["retry-after"] == "5"
        server.records.wait(499)  # the half is given up, and held no longer
        assert ask(server, "a" * 600, max_tokens=1).usage.prompt_tokens == 600


def sent_half(server: Running, size: int) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), PATIENCE)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                       b"Content-Type: application/json\r\n"
                       b"Content-Length: 1000000\r\n\r\n" + b" " * size)
    return connection

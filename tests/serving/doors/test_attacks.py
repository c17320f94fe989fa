"""Malformed requests at every door: one error in the door's own format, no fault of the program, and the server
stays up."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import ollama
import pytest
from kits.http_server import NAME, Running, Says

from flowspec_edge.errors import RequestFailed
from flowspec_edge.serving.intake import MAX_BODY_BYTES

ASK: list[Any] = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": NAME, "messages": ASK, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"model": NAME, "prompt": "hello", "stream": False, "options": {"num_predict": 1}},
    "/v1/messages": {"model": NAME, "messages": ASK, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": NAME, "messages": ASK},
    "/api/show": {"model": NAME},
    "/v1/chat/completions": {"model": NAME, "messages": ASK, "max_tokens": 1},
    "/v1/completions": {"model": NAME, "prompt": "hello", "max_tokens": 1},
    "/v1/responses": {"model": NAME, "input": "hello", "max_output_tokens": 1}}
OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
JSON = "application/json"
# What a field may be replaced with, at any depth.
ODD: list[Any] = [None, True, 7, -1, 1e308, 10**30, "", "x" * 3000, [], {}, [[]], [None], [7], {"type": None},
                  {"a": []}, {"type": "text"}, {"type": "tool_use", "id": 1}, "\ud83d\ude42", "\x00", {"": ""}]


def message(path: str, body: Any) -> str:
    """The error's, if the body has the form of the path's API."""
    if path.startswith("/api/"):
        assert body.keys() == {"error"}
        return str(body["error"])
    if path in OPENAI:
        assert (body.keys(), body["error"].keys()) == ({"error"}, {"message", "type", "param", "code"})
        return str(body["error"]["message"])
    assert body.keys() == {"type", "error"}
    assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("content", "kind", "status", "says"), [
    (b"", JSON, 400, "not valid JSON"), (b"{", JSON, 400, "not valid JSON"), (b"[]", JSON, 400, "a JSON object"),
    (b"\xff\xfe", JSON, 400, "not UTF-8"), (b'{"model": "\xed\xa0\x80"}', JSON, 400, "not UTF-8"),
    (b'{"model": NaN}', JSON, 400, "NaN is no JSON"),
    (b'{"a":' * 50_000, JSON, 400, "nested too deeply"), (b'{"model": "\\ud83d"}', JSON, 400, "no character"),
    (b'{"model": 1' + b"0" * 5000 + b"}", JSON, 400, "too many digits"),
    (b"{}", JSON, 400, ": "), (b"{}", "text/plain", 400, "Content-Type: application/json"),
    (b" " * (MAX_BODY_BYTES + 1), JSON, 413, "larger than")])
def test_bodies_that_are_none(server: Running, path: str, content: bytes, kind: str, status: int, says: str
                              ) -> None:
    answer = server.http.post(path, content=content, headers={"Content-Type": kind})
    assert answer.status_code == status
    assert says in message(path, answer.json())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_bodies_without_a_type_come_from_programs_alone(server: Running, path: str, kind: str | None) -> None:
    """LiteLLM's requests to Ollama have no type, and those of Ollama's own documents are ``curl -d``'s."""
    named = {} if kind is None else {"Content-Type": kind}

    def ask(**headers: str) -> httpx2.Response:
        return server.http.post(path, content=json.dumps(BODIES[path]).encode(), headers=named | headers)

    assert ask().status_code == 200
    for header, value in (("Origin", "null"), ("Origin", "http://page.example"), ("Referer", "http://page.example/"),
                          ("Sec-Fetch-Site", "cross-site")):
        answer = ask(**{header: value})
        assert answer.status_code == 400, header
        assert "Content-Type: application/json" in message(path, answer.json())


def replaced(value: Any, rng: random.Random) -> Any:
    """A copy in which one thing is an odd one."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.3:
        return rng.choice(ODD)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [replaced(item, rng) if i == at else item for i, item in enumerate(value)]
    name = rng.choice([*value])
    return {key: replaced(item, rng) if key == name else item for key, item in value.items()}


@pytest.mark.parametrize("path", BODIES)
def test_odd_values_are_the_clients_errors(server: Running, path: str, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(path)
    full = BODIES[path] | {
        "system": [{"type": "text", "text": "a"}], "stop_sequences": ["a"], "tool_choice": {"type": "auto"},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"}, "metadata": {"user_id": "a"}, "format": {"type": "object"}, "think": True,
        "raw": True, "logprobs": True, "top_logprobs": 1, "flowspec": {"tokens": True}}
    with caplog.at_level(logging.ERROR):
        for _ in range(60):
            chosen = {**BODIES[path], **{name: full[name] for name in rng.sample([*full], 3)}}
            data = json.dumps(replaced(chosen, rng)).encode()
            answer = server.http.post(path, content=data, headers={"Content-Type": JSON})
            assert answer.status_code in (200, 400, 404), (data, answer.text)
            if answer.status_code != 200 and answer.headers["content-type"] == JSON:
                said = message(path, answer.json())
                assert said, data
                assert "\n" not in said, data
                assert "Traceback" not in said, data
    assert not caplog.records
    assert server.http.post(path, json=BODIES[path]).status_code == 200


def test_an_error_within_a_stream_is_its_last_event(server: Running, cluster: Says, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    def fail() -> None:
        raise RequestFailed("no more")

    def ollamas() -> Iterator[Any]:
        with ollama.Client(server.url, trust_env=False) as client:
            yield from client.chat(NAME, ASK, stream=True, options={"num_predict": 1000})

    def anthropics() -> Iterator[Any]:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            yield from client.messages.create(model=NAME, messages=ASK, stream=True, max_tokens=1000)

    for ask, kind in ((ollamas, ollama.ResponseError), (anthropics, anthropic.APIStatusError)):
        cluster.forget()
        cluster.may_go.clear()
        events = ask()
        next(events)  # the headers are sent
        with monkeypatch.context() as patched:
            patched.setattr(cluster, "on_piece", fail)
            cluster.may_go.set()
            with pytest.raises(kind, match="no more"):
                list(events)
    assert server.http.post("/v1/messages", json=BODIES["/v1/messages"]).status_code == 200

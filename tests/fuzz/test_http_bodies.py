"""Damaged request bodies are requests, or errors of the client that can be sent to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from kits.byte_mutations import amounts, corpus, fuzz
from kits.http_server import served
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.prepare import PreparedRequest, ServedModel
from flowspec_edge.serving.openai.responses import Answer
from flowspec_edge.serving.openai.responses_endpoint import ResponseAnswer, ResponsesBody
from flowspec_edge.serving.openai.schemas import Body, ChatBody, CompletionBody, read_body

DEEP = [b"[" * 100_000, b'{"model":' * 20_000, b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"]


@pytest.fixture(scope="module")
def what(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served(tiny_model_dir(tmp_path_factory.mktemp("model"), layers=1, hidden=32))


def handled(kind: type[Body], prepare: Callable[[Any], PreparedRequest], data: bytes) -> None:
    """What an endpoint does with a body, up to the queue; the answer can be encoded."""
    try:
        body = read_body(kind, data)
        prepared = prepare(body)
    except ApiError as error:
        if not 400 <= error.status < 500 or len(error.response().body) > 10_000:
            raise AssertionError(f"status {error.status}: {error}") from error
        raise
    assert prepared.request.max_new_tokens >= 1
    answer = ResponseAnswer(body, prepared) if isinstance(body, ResponsesBody) else Answer(body, prepared)
    whole = answer.complete([answer.choice(0, [""], "stop")], answer.usage(0, [None]), answer.figures([None]))
    json.dumps(whole, ensure_ascii=False).encode()


@amounts
@pytest.mark.parametrize("target", ["http_chat", "http_completion", "http_responses"])
def test_a_damaged_body_is_a_request_or_the_clients_error(what: ServedModel, target: str, count: int) -> None:
    kind, prepare = {"http_chat": (ChatBody, what.chat), "http_responses": (ResponsesBody, what.chat),
                     "http_completion": (CompletionBody, what.completion)}[target]
    accepted = fuzz(lambda data: handled(kind, prepare, data), [*corpus(target), *DEEP], count, ApiError)
    assert accepted > count / 100

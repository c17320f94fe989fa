"""Damaged request bodies are requests, or errors of the client that can be sent to it."""

from __future__ import annotations

import json
from functools import partial

import pytest
from kits.byte_mutations import amounts, corpus, fuzz
from kits.http_server import served
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.serving.anthropic import requests as anthropic
from flowspec_edge.serving.anthropic.answers import MessageAnswer
from flowspec_edge.serving.door import Door, Ready
from flowspec_edge.serving.ollama import requests as ollama
from flowspec_edge.serving.ollama.answers import ChatAnswer, GenerateAnswer
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.prepare import ServedModel
from flowspec_edge.serving.openai.responses_endpoint import ResponseAnswer, ResponsesBody
from flowspec_edge.serving.openai.schemas import ChatBody, CompletionBody, read_body

DEEP = [b"[" * 100_000, b'{"model":' * 20_000, b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"]


@pytest.fixture(scope="module")
def what(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served(tiny_model_dir(tmp_path_factory.mktemp("model"), layers=1, hidden=32))


def handled(what: ServedModel, door: Door, data: bytes) -> None:
    """What an endpoint does with a body, up to the queue; the answer can be encoded."""
    try:
        body = door.read(data)
        if isinstance(body, Ready):
            return
        prepared = what.prepared(body)
    except ApiError as error:
        if not 400 <= error.status < 500 or len(door.with_own_names(error).response().body) > 10_000:
            raise AssertionError(f"status {error.status}: {error}") from error
        raise
    assert prepared.request.max_new_tokens >= 1
    answer = door.answer(body, prepared)
    whole = answer.complete([answer.choice(0, [""], "stop")], answer.usage(0, [None]), answer.figures([None]))
    json.dumps(whole, ensure_ascii=False).encode()


@amounts
@pytest.mark.parametrize("target", ["http_chat", "http_completion", "http_responses", "http_ollama_chat",
                                    "http_ollama_generate", "http_messages"])
def test_a_damaged_body_is_a_request_or_the_clients_error(what: ServedModel, target: str, count: int) -> None:
    door = {"http_chat": Door(partial(read_body, ChatBody)),
            "http_completion": Door(partial(read_body, CompletionBody)),
            "http_responses": Door(partial(read_body, ResponsesBody), ResponseAnswer),
            "http_ollama_chat": Door(partial(ollama.read_chat, what), ChatAnswer, ollama.NAMES),
            "http_ollama_generate": Door(partial(ollama.read_generate, what), GenerateAnswer, ollama.GENERATE_NAMES),
            "http_messages": Door(partial(anthropic.read_messages, what), MessageAnswer, anthropic.NAMES)}[target]
    accepted = fuzz(lambda data: handled(what, door, data), [*corpus(target), *DEEP], count, ApiError)
    assert accepted > count / 100

"""OpenAI's own client, unmodified, against the endpoint: texts, counts, stop strings, seeds, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from kits.http_server import NAME, Running, ask, running, served
from kits.plain_answers import plain_text, tokenizer_of
from kits.process_clusters import until

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.model.chat import Message
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.settings import Sampling

PROMPT = "def f(x): return"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(model: Path, processes: ProcessCluster) -> Iterator[Running]:
    with running(served(model), processes) as it:
        yield it


def test_a_completion_is_plain_decodings_text(server: Running, model: Path) -> None:
    done = server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20)
    assert done.choices[0].text == plain_text(model, PROMPT, 20)
    assert (done.object, done.choices[0].finish_reason, done.model) == ("text_completion", "length", NAME)
    assert done.usage is not None
    length = len(tokenizer_of(model)(PROMPT)["input_ids"])
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == \
           (length, 20, length + 20)
    run = done.model_dump()["flowspec"]
    assert run["strategy"] == "flowspec"
    assert run["tokens_per_second"] > 0


def test_a_streamed_completion_is_the_same_text(server: Running, model: Path) -> None:
    chunks = list(server.client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    *text, last, counts = chunks
    assert "".join(chunk.choices[0].text for chunk in text) == plain_text(model, PROMPT, 20)
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in text)
    assert last.choices[0].finish_reason == "length"
    assert counts.choices == []
    assert counts.usage is not None
    assert counts.usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_raw_stream_ends_with_done(server: Running) -> None:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 3, "stream": True}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in answer.text


def test_a_chat_streamed_and_not(server: Running, model: Path) -> None:
    turns: list[Any] = [{"role": "developer", "content": "be brief"},
                        {"role": "user", "content": [{"type": "text", "text": "he"},
                                                     {"type": "text", "text": "llo"}]}]
    ids = Tokenizer(OpenModel(model), "vicuna").chat([Message("system", "be brief"), Message("user", "hello")])
    answer = plain_text(model, ids, 24)
    whole = server.client.chat.completions.create(model=NAME, messages=turns)  # 24: the server's own limit
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == answer
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(ids)
    chunks = list(server.client.chat.completions.create(model=NAME, messages=turns, stream=True,
                                                        max_completion_tokens=24))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_token_ids_are_a_prompt_too(server: Running, model: Path) -> None:
    ids = tokenizer_of(model)(PROMPT)["input_ids"]
    texts = {server.client.completions.create(model=NAME, prompt=prompt, max_tokens=8).choices[0].text
             for prompt in (PROMPT, [PROMPT], ids, [ids])}
    assert len(texts) == 1


def test_sampling_is_plain_decodings_with_the_same_seed(server: Running, model: Path) -> None:
    def sampled(**how: Any) -> Any:
        return server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=16, temperature=1,
                                                top_p=0.9, **how)

    for strategy in ("flowspec", "autoregressive"):
        one = sampled(seed=7, extra_body={"top_k": 20, "flowspec": {"strategy": strategy}})
        assert one.choices[0].text == plain_text(model, PROMPT, 16, Sampling(1.0, 20, 0.9, 7))
        assert one.flowspec["strategy"] == strategy
    free, other = sampled(), sampled()
    seeds = [done.flowspec["seed"] for done in (free, other)]
    assert seeds[0] != seeds[1]  # none given: any; and it is told, so that the text can be had again
    assert sampled(seed=seeds[0]).choices[0].text == free.choices[0].text
    assert sampled(seed=-1).choices[0].text == sampled(seed=2**63 - 1).choices[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("at", "length"), [(0, 1), (3, 2), (9, 5)])
def test_stop_strings_cut_wherever_tokens_end(server: Running, model: Path, at: int, length: int, stream: bool
                                              ) -> None:
    text = plain_text(model, PROMPT, 20)
    stop = text[at : at + length]
    how: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 20, "stop": ["never that", stop]}
    if stream:
        chunks = list(server.client.completions.create(**how, stream=True))
        found, why = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        done = server.client.completions.create(**how)
        found, why = done.choices[0].text, done.choices[0].finish_reason
        assert done.usage.completion_tokens <= 20
    assert (found, why) == (text[: text.index(stop)], "stop")


def test_tokens_and_figures_come_with_the_answer(server: Running) -> None:
    plain = ask(server, "abc", max_tokens=8)
    wanted = {"flowspec": {"tokens": True}}
    whole = ask(server, "abc", max_tokens=8, extra_body=wanted)
    assert plain.choices[0].text == whole.choices[0].text
    assert not {"tokens", "stats"} & {*plain.model_extra["flowspec"]}
    details = whole.model_extra["flowspec"]
    assert len(details["tokens"]) == whole.usage.completion_tokens == 8
    assert details["stats"]["turns"] > 0
    assert len(details["stats"]["stages"]) == 2

    chunks = [*ask(server, "abc", max_tokens=8, stream=True, extra_body=wanted)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert [bool(chunk.model_extra) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].model_extra["flowspec"]["tokens"] == details["tokens"]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_models(server: Running) -> None:
    assert [model.id for model in server.client.models.list()] == [NAME]
    assert server.client.models.retrieve(NAME).owned_by == "flowspec"
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        server.client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="there is 'tiny'") as caught:
        server.client.completions.create(model="gpt-4", prompt=PROMPT)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(("change", "param", "says"), [
    ({"n": 9}, "n", "less than or equal to 8"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "greater than or equal to -2"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]", "less than or equal to 100"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"97": 1}}, "logit_bias", "from 0 to 96"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "chat template has no tools"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name", "pattern"),
    ({"tool_choice": "required"}, None, "required needs tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"temperature": 0.0001}, "temperature", "0.001 to 100"),
    ({"top_p": -1}, "top_p", "greater than or equal to 0"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 5000}, None, "the model's context is 2048 tokens"),
    ({"stop": ["a"] * 65}, "stop", "at most 64"),
    ({"stop": ["a" * 999] * 5}, "stop", "at most 4000 characters of all"),
    ({"stop": "a" * 1001}, "stop", "at most 1000 characters a stop string, not 1001"),
    ({"stop": ""}, "stop", "not empty"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'assistant' or 'tool'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "message 1 is the tool's"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content",
     "text only"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "user"),
])
def test_what_cannot_be_done_is_a_bad_request(server: Running, change: dict[str, Any], param: str | None,
                                              says: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(**{"model": NAME, "messages": HELLO, **change})
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert says in str(caught.value)


@pytest.mark.parametrize(("prompt", "says"), [
    ("", "the prompt is empty"), (["a", ""], "the prompt is empty"), ([97], "from 0 to 96"),
    ([[1], [-1]], "from 0 to 96"), ([], "a string"), ([[]], "a string"), (["a", 1], "a string"),
    ({}, "a string"), (["a"] * 65, "at most 64"), (["a"] * 18, "at most 17 answers at once"),
])
def test_prompts_that_are_none(server: Running, prompt: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        server.client.completions.create(model=NAME, prompt=prompt)
    assert caught.value.param == "prompt"


def test_a_pair_of_escapes_is_a_character(server: Running) -> None:
    content = b'{"model": "tiny", "max_tokens": 1, "prompt": "a\\ud83d\\ude42"}'
    answer = server.http.post("/v1/completions", content=content,
                              headers={"Content-Type": "application/json; charset=utf-8"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/v1/embeddings", 404)])
def test_paths_that_are_none(server: Running, method: str, path: str, status: int) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_the_log_has_what_a_request_took_and_not_what_it_said(server: Running) -> None:
    done = server.client.completions.create(model=NAME, prompt="a secret", max_tokens=5)
    # It is written when the answer has been sent, which may be after the client has read it.
    until(lambda: any(record.id == done.id for record in server.records.seen))
    line = next(record for record in reversed(server.records.seen) if record.id == done.id)
    assert done._request_id == done.id
    assert (line.status, line.completion_tokens, line.finish) == (200, 5, "length")
    assert line.queued_s is not None
    assert line.seconds >= line.queued_s
    assert "secret" not in line.as_json() + str(line)
    assert done.choices[0].text not in line.as_json()

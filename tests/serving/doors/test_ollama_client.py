"""Ollama's own client, unmodified, against its door: the chat's texts, options, tools, reasoning, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from kits.http_server import NAME, Held, Running, Says, running, served

from flowspec_edge.serving.ollama.fields import OPTIONS, TABLE
from flowspec_edge.serving.ollama.requests import read_chat
from flowspec_edge.serving.openai.prepare import ServedModel
from flowspec_edge.serving.openai.schemas import ChatBody, body_of

ASK: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"], "additionalProperties": False}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.",
                                                         "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(server.url, trust_env=False) as it:
        yield it


def plain_chat(server: Running, **how: Any) -> Any:
    return server.client.chat.completions.create(**{"model": NAME, "messages": ASK, "max_tokens": 12, **how})


def test_a_chat_is_the_other_doors_chat(server: Running, client: ollama.Client) -> None:
    wanted = plain_chat(server)
    options = {"num_predict": 12}
    for name in (NAME, f"{NAME}:latest"):
        whole = client.chat(name, ASK, options=options)
        assert whole.message.content == wanted.choices[0].message.content
    assert (whole.done, whole.done_reason, whole.message.role, whole.model) == (True, "length", "assistant", NAME)
    assert (whole.prompt_eval_count, whole.eval_count) == (wanted.usage.prompt_tokens, 12)
    parts = [whole.load_duration, whole.prompt_eval_duration, whole.eval_duration]
    assert all(part >= 0 for part in parts)
    assert abs(sum(parts) - whole.total_duration) <= 3  # nanoseconds
    *lines, last = client.chat(NAME, ASK, options=options, stream=True)
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert not any(line.done for line in lines)
    assert (last.done, last.done_reason, last.eval_count, last.message.content) == (True, "length", 12, "")


def test_options_are_the_chats_fields(server: Running, client: ollama.Client) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    for options, fields in (
            (how, how), ({**how, "top_k": 5, "min_p": 0.1}, {**how, "extra_body": {"top_k": 5, "min_p": 0.1}}),
            ({**how, "repeat_penalty": 1.5, "repeat_last_n": -1}, {**how, "extra_body": {"repetition_penalty": 1.5}}),
            ({"presence_penalty": 1.5, "frequency_penalty": 1.0}, {"presence_penalty": 1.5,
                                                                  "frequency_penalty": 1.0})):
        found = client.chat(NAME, ASK, options={**options, "num_predict": 12, "num_ctx": 512, "num_thread": 2})
        assert found.message.content == plain_chat(server, **fields).choices[0].message.content, options
    text = plain_chat(server).choices[0].message.content
    stopped = client.chat(NAME, ASK, options={"num_predict": 12, "stop": [text[4:7]]})
    assert (stopped.message.content, stopped.done_reason) == (text[:text.index(text[4:7])], "stop")
    assert client.chat(NAME, ASK, options={"num_predict": -1}).eval_count == 24  # the server's own limit


def test_a_text_is_generated(server: Running, client: ollama.Client) -> None:
    asked = {"options": {"num_predict": 12}}
    whole = client.generate(NAME, "hello", system="be brief", **asked)
    assert whole.response == plain_chat(server).choices[0].message.content
    lines = list(client.generate(NAME, "hello", system="be brief", stream=True, **asked))
    assert "".join(line.response for line in lines) == whole.response
    assert lines[-1].done
    raw = client.generate(NAME, "def f(x):", raw=True, **asked)
    assert raw.response == server.client.completions.create(model=NAME, prompt="def f(x):", max_tokens=12
                                                            ).choices[0].text
    assert client.generate(NAME, "def f(x):", raw=True).eval_count == 24


def test_a_request_without_a_prompt_loads_the_model(client: ollama.Client) -> None:
    for loaded in (client.generate(NAME), client.chat(NAME, [])):
        assert (loaded.done, loaded.done_reason) == (True, "load")


def test_what_the_model_is(server: Running, client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model == NAME
    assert listed.modified_at is not None
    shown = client.show(NAME)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["llama.context_length"] == 2048
    assert client.ps().models[0].model == NAME
    assert server.http.get("/api/version").json()["version"].count(".") == 2
    with pytest.raises(ollama.ResponseError, match="does not exist here") as caught:
        client.show("other")
    assert caught.value.status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_a_schema(client: ollama.Client, stream: bool) -> None:
    found = client.chat(NAME, ASK, format=SCHEMA, stream=stream, options={"num_predict": 200})
    text = "".join(line.message.content for line in found) if stream else found.message.content
    assert json.loads(text)["city"] in ("Rome", "Oslo")
    assert client.generate(NAME, "x", format="json", options={"num_predict": 4}).response.startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results(client: ollama.Client, cluster: Says, stream: bool) -> None:
    calls = "".join(f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
                    for city in ("Rome", "Oslo"))
    cluster.text = f"<think>\nhm\n</think>\n\nLet me see.\n{calls}"
    found = client.chat(NAME, ASK, tools=[TOOL], stream=stream, options={"num_predict": 400})
    messages = [line.message for line in found] if stream else [found.message]
    made = [call.function for message in messages for call in message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in made] == [("weather", {"city": "Rome"}),
                                                              ("weather", {"city": "Oslo"})]
    assert "".join(message.content for message in messages) == "Let me see."
    assert "".join(message.thinking or "" for message in messages) == "hm"
    cut = client.chat(NAME, ASK, tools=[TOOL], options={"num_predict": cluster.text.index("Rome")})
    assert (cut.message.tool_calls, cut.done_reason) == (None, "length")


def test_messages_become_the_chats(what: ServedModel) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns = [*ASK, {"role": "assistant", "thinking": "why", "tool_calls": [call]},
             {"role": "tool", "content": "sunny", "tool_name": "weather"}]
    chat = [*ASK, {"role": "assistant", "reasoning_content": "why", "tool_calls": [call]},
            {"role": "tool", "content": "sunny", "name": "weather"}]

    def prompt(fields: dict[str, Any]) -> list[int]:
        body = read_chat(what, json.dumps({"model": NAME, **fields}).encode())
        assert isinstance(body, ChatBody)
        return list(what.chat(body).request.prompt)

    def chats(**fields: Any) -> list[int]:
        return list(what.chat(body_of(ChatBody, {"model": NAME, **fields}, ())).request.prompt)

    assert prompt({"messages": turns, "tools": [TOOL]}) == chats(messages=chat, tools=[TOOL])
    begun = [*ASK, {"role": "assistant", "content": "Well, "}]
    assert prompt({"messages": begun}) == chats(messages=begun, continue_final_message=True)
    for think, effort in ((False, "none"), (True, "medium"), ("high", "high")):
        assert prompt({"messages": ASK, "think": think}) == chats(messages=ASK, reasoning_effort=effort)
    assert prompt({"messages": ASK, "think": False}) != prompt({"messages": ASK, "think": True})


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_apart(client: ollama.Client, cluster: Says, stream: bool) -> None:
    cluster.text = "<think>\nwhy\n</think>\n\nHello"
    how: dict[str, Any] = {"stream": stream, "think": True, "options": {"num_predict": 200}}
    for ask, text in ((lambda: client.chat(NAME, ASK, **how), lambda line: line.message.content),
                      (lambda: client.generate(NAME, "x", **how), lambda line: line.response)):
        lines = list(ask()) if stream else [ask()]
        thoughts = [getattr(line, "message", line).thinking or "" for line in lines]
        assert ("".join(thoughts), "".join(map(text, lines))) == ("why", "Hello")


def test_log_probabilities(server: Running, client: ollama.Client) -> None:
    found = client.chat(NAME, ASK, logprobs=True, top_logprobs=2, options={"num_predict": 4})
    wanted = plain_chat(server, logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
    assert [one.token for one in found.logprobs] == [one.token for one in wanted]
    assert [one.logprob for one in found.logprobs] == pytest.approx([one.logprob for one in wanted], abs=1e-4)
    assert [len(one.top_logprobs) for one in found.logprobs] == [2] * 4
    streamed = client.chat(NAME, ASK, logprobs=True, stream=True, options={"num_predict": 4})
    assert sum(len(line.logprobs or ()) for line in streamed) == 4


@pytest.mark.parametrize(("fields", "says"), [
    ({"options": {"mirostat": 2}}, "options.mirostat is not supported"),
    ({"options": {"repeat_penalty": 1.1}}, "options.repeat_penalty: it would look at the last tokens only"),
    ({"options": {"temprature": 1}}, "options.temprature is no field of a request: did you mean temperature"),
    ({"options": {"temperature": 3}}, "options.temperature: Input should be less than or equal to 2"),
    ({"options": {"num_predict": 0}}, "options.num_predict: "), ({"options": [1]}, "options: must be an object"),
    ({"options": {"num_predict": 100000}}, "more are asked for"),
    ({"format": "xml"}, "format: must be"), ({"format": {"type": "colour"}}, "format: "),
    ({"format": SCHEMA, "tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ({"think": "much"}, "think: must be true, false"), ({"template": "x"}, "template is not supported"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images is not supported: this server"),
    ({"messages": [{"role": "bard", "content": "x"}]}, "messages[0].role"), ({"messages": "x"}, "messages: must be"),
    ({"messages": [7]}, "messages[0]"), ({"model": 7}, "model: must be a string"),
    ({"model": "other"}, "does not exist"), ({"stream": "yes"}, "stream: "),
    ({"context": [1]}, "context is not supported"),
    ({"tools": {}}, "tools: must be a list"), ({"top_logprobs": 2}, "top_logprobs goes with logprobs"),
])
def test_what_is_wrong_is_named(server: Running, fields: dict[str, Any], says: str) -> None:
    answer = server.http.post("/api/chat", json={"model": NAME, "messages": ASK, **fields})
    assert answer.status_code in (400, 404)
    assert answer.json().keys() == {"error"}
    assert says in answer.json()["error"]
    assert server.http.post("/api/chat", json={"model": NAME, "messages": ASK, "options": {"num_predict": 1}}
                            ).status_code == 200


def test_what_is_not_served_is_named(server: Running, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="embeddings are not served"):
        client.embed(NAME, "x")
    with pytest.raises(ollama.ResponseError, match="models are not managed over HTTP"):
        client.pull("other")
    with pytest.raises(ollama.ResponseError, match="images is not supported"):
        client.generate(NAME, "x", images=["aGk="])
    with pytest.raises(ollama.ResponseError, match="suffix is not supported"):
        list(client.generate(NAME, "x", suffix="y", stream=True))
    assert server.http.get("/api/nothing").json() == {"error": "GET /api/nothing: not found"}


def test_unknown_names_are_told(server: Running) -> None:
    answer = server.http.post("/api/chat", json={"model": NAME, "messages": ASK, "stream": False, "chat_id": 1,
                                                 "options": {"num_predict": 1, "made_up": 1}})
    assert answer.headers["x-flowspec-ignored"] == "chat_id, options.made_up"


def test_every_field_of_the_client_is_in_the_tables() -> None:
    names = {name for kind in (ollama._types.ChatRequest, ollama._types.GenerateRequest)
             for name in kind.model_fields}
    assert names <= TABLE.fields.keys()
    assert ollama.Options.model_fields.keys() <= OPTIONS.fields.keys()


def test_keys_and_waiting(held: Held, model: Path) -> None:
    with running(served(model), held, api_key="sesame", keep_alive_s=0.05) as server:
        held.forget()
        with (ollama.Client(server.url, trust_env=False) as client,
              pytest.raises(ollama.ResponseError, match="no API key") as caught):
            client.chat(NAME, ASK)
        assert caught.value.status_code == 401
        own = {"Authorization": "Bearer sesame"}
        with ollama.Client(server.url, trust_env=False, headers=own) as client:
            held.may_go.clear()
            lines = iter(client.chat(NAME, [ASK[1]], stream=True, options={"num_predict": 4}))
            first = [next(lines) for _ in range(3)]  # a token may be among them
            assert not any(line.done for line in first)
            held.may_go.set()
            assert [*lines][-1].eval_count == 4

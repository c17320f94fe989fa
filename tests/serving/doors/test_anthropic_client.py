"""Anthropic's own client, unmodified, against its door: texts, events in their order, tools, thinking, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from kits.http_server import NAME, Held, Running, Says, running, served

from flowspec_edge.serving.anthropic.fields import TABLE
from flowspec_edge.serving.anthropic.requests import read_messages
from flowspec_edge.serving.openai.prepare import ServedModel
from flowspec_edge.serving.openai.schemas import ChatBody, body_of

ASK: list[Any] = [{"role": "user", "content": "hello"}]
TURNS: list[Any] = [{"role": "system", "content": "be brief"}, *ASK]
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"], "additionalProperties": False}
TOOL: dict[str, Any] = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.",
                                             "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as it:
        yield it


def ask(client: anthropic.Anthropic, **how: Any) -> Any:
    return client.messages.create(**{"model": NAME, "max_tokens": 12, "messages": ASK, "system": "be brief", **how})


def plain_chat(server: Running, **how: Any) -> Any:
    return server.client.chat.completions.create(**{"model": NAME, "messages": TURNS, "max_tokens": 12, **how})


def test_a_message_is_the_other_doors_chat(server: Running, client: anthropic.Anthropic) -> None:
    wanted = plain_chat(server)
    whole = ask(client)
    assert [block.type for block in whole.content] == ["text"]
    assert whole.content[0].text == wanted.choices[0].message.content
    assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", NAME, "max_tokens")
    used = whole.usage
    assert used.input_tokens + used.cache_read_input_tokens == wanted.usage.prompt_tokens
    assert used.output_tokens == 12
    assert whole._request_id == whole.id
    sampled = ask(client, extra_body={"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 7})
    chat = plain_chat(server, temperature=1, top_p=0.9, seed=7, extra_body={"top_k": 20})
    assert sampled.content[0].text == chat.choices[0].message.content
    blocks = ask(client, system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
                 messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    assert blocks.content[0].text == whole.content[0].text


def test_the_events_of_a_stream(server: Running, client: anthropic.Anthropic) -> None:
    whole = ask(client)
    with client.messages.stream(model=NAME, max_tokens=12, messages=ASK, system="be brief") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    kinds = [event.type for event in ask(client, stream=True)]
    assert [*dict.fromkeys(kinds)] == ["message_start", "content_block_start", "content_block_delta",
                                       "content_block_stop", "message_delta", "message_stop"]
    raw = server.http.post("/v1/messages", json={"model": NAME, "max_tokens": 2, "messages": ASK, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in raw.text.strip().split("\n\n")]
    assert all(f"event: {json.loads(data.removeprefix('data: '))['type']}" == name for name, data in events)


def test_stop_sequences(server: Running, client: anthropic.Anthropic) -> None:
    text = plain_chat(server).choices[0].message.content
    stop = text[4:7]
    found = ask(client, stop_sequences=["never", stop])
    assert found.content[0].text == text[:text.index(stop)]
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    deltas = [event for event in ask(client, stop_sequences=[stop], stream=True) if event.type == "message_delta"]
    assert (deltas[0].delta.stop_reason, deltas[0].delta.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_and_tools(client: anthropic.Anthropic, cluster: Says, stream: bool) -> None:
    calls = "".join(f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
                    for city in ("Rome", "Oslo"))
    cluster.text = f"<think>\nwhy\n</think>\n\nLet me see.\n{calls}"
    how: dict[str, Any] = {"model": NAME, "messages": ASK, "tools": [TOOL], "max_tokens": 400}

    def final(**more: Any) -> Any:
        if not stream:
            return client.messages.create(**how | more)
        with client.messages.stream(**how | more) as coming:
            return coming.get_final_message()

    found = final()
    thought, said, *used = found.content
    assert (thought.type, thought.thinking, said.text) == ("thinking", "why", "Let me see.")
    assert [(one.type, one.name, one.input) for one in used] == [
        ("tool_use", "weather", {"city": "Rome"}), ("tool_use", "weather", {"city": "Oslo"})]
    assert len({one.id for one in used}) == 2
    assert found.stop_reason == "tool_use"
    assert found.usage.output_tokens_details.thinking_tokens > 0
    omitted = final(thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in omitted.content] == ["text", "tool_use", "tool_use"]
    cut = final(max_tokens=cluster.text.index("Rome"))
    assert cut.stop_reason == "max_tokens"
    if not stream:
        assert [block.type for block in cut.content] == ["thinking", "text"]


def test_a_tool_that_must_be_called(client: anthropic.Anthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        found = ask(client, tools=[TOOL], tool_choice=choice, max_tokens=400,
                    extra_body={"temperature": 1.0, "seed": 3})
        assert {block.type for block in found.content} == {"tool_use"}
        assert all(block.input["city"] in ("Rome", "Oslo") for block in found.content)


def test_an_answer_of_a_schema(client: anthropic.Anthropic) -> None:
    found = ask(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=200)
    assert json.loads(found.content[0].text)["city"] in ("Rome", "Oslo")
    assert found.stop_reason == "end_turn"


def test_blocks_become_the_chats(what: ServedModel) -> None:
    used = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}
    turns = [{"role": "user", "content": "Weather"}, {"role": "user", "content": "in Rome?"},
             {"role": "assistant", "content": [
                 {"type": "thinking", "thinking": "why", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
                 {"type": "text", "text": "Wait."}, used]},
             {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]}]
    chat = [{"role": "user", "content": "Weather\n\nin Rome?"},
            {"role": "assistant", "content": "Wait.", "reasoning_content": "why", "tool_calls": [
                {"id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}, {"role": "user", "content": "and now?"}]

    def prompt(**fields: Any) -> list[int]:
        body = read_messages(what, json.dumps({"model": NAME, "max_tokens": 4, **fields}).encode())
        return list(what.chat(body).request.prompt)

    def chats(**fields: Any) -> list[int]:
        return list(what.chat(body_of(ChatBody, {"model": NAME, **fields}, ())).request.prompt)

    assert prompt(messages=turns, tools=[TOOL]) == chats(messages=chat, tools=[FUNCTION])
    begun = [*ASK, {"role": "assistant", "content": "Well, "}]
    assert prompt(messages=begun) == chats(messages=begun, continue_final_message=True)
    off = prompt(messages=ASK, thinking={"type": "disabled"})
    assert off == chats(messages=ASK, reasoning_effort="none")
    on = prompt(messages=ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    assert on == chats(messages=ASK, reasoning_effort="medium") != off


def test_tokens_are_counted(server: Running, client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=NAME, messages=ASK, system="be brief")
    assert counted.input_tokens == plain_chat(server).usage.prompt_tokens
    more = client.messages.count_tokens(model=NAME, messages=ASK, system="be brief", tools=[TOOL])
    assert more.input_tokens > counted.input_tokens
    assert not any(record.path.endswith("count_tokens") for record in server.records.seen)


def test_a_limit_beyond_the_context_is_the_room_in_it(server: Running, client: anthropic.Anthropic) -> None:
    """Anthropic's API needs a limit, and its clients name one of thousands of tokens if their users name none."""
    def prompt(length: int) -> list[Any]:
        return [{"role": "user", "content": "x" * length}]

    (listed,) = client.models.list()
    others = client.messages.count_tokens(model=NAME, messages=prompt(1000), system="be brief").input_tokens - 1000
    full = prompt(listed.max_input_tokens - others - 20)
    wanted = plain_chat(server, messages=[TURNS[0], *full], max_tokens=20).choices[0].message.content
    for limit, reason in ((20, "max_tokens"), (21, "model_context_window_exceeded"),
                          (16_384, "model_context_window_exceeded")):
        found = ask(client, messages=full, max_tokens=limit)
        assert (found.content[0].text, found.usage.output_tokens, found.stop_reason) == (wanted, 20, reason)
    with client.messages.stream(model=NAME, max_tokens=32_000, messages=full, system="be brief") as stream:
        assert "".join(stream.text_stream) == wanted
        assert stream.get_final_message().stop_reason == "model_context_window_exceeded"
    stopped = ask(client, messages=full, max_tokens=16_384, stop_sequences=[wanted[4:7]])
    assert stopped.stop_reason == "stop_sequence"
    with pytest.raises(anthropic.BadRequestError, match="the model's context is 2048 tokens here"):
        ask(client, messages=prompt(listed.max_input_tokens - others), max_tokens=16_384)


def test_the_models(client: anthropic.Anthropic) -> None:
    (listed,) = client.models.list()
    assert (listed.id, listed.type, listed.display_name, listed.max_input_tokens) == (NAME, "model", NAME, 2048)
    assert client.models.retrieve(NAME).created_at == listed.created_at


@pytest.mark.parametrize(("fields", "says"), [
    ({"max_tokens": None}, "max_tokens: is required"), ({"max_tokens": 0}, "max_tokens: "),
    ({"messages": [{"role": "user", "content": "x" * 2048}], "max_tokens": 10**6}, "and 1 more are asked for"),
    ({"messages": []}, "messages: at least one"),
    ({"messages": None}, "messages: at least one"), ({"messages": "x"}, "messages: must be a list"),
    ({"messages": [{"role": "bard", "content": "x"}]}, "messages[0]: must be an object whose role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: must be a string, or a list of blocks"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     "messages[0].content[0]: blocks of the type 'image' are not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [
        {"type": "image"}]}]}]}, "messages[0].content[0].content[0]: must be a text block"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 7}]}]},
     "messages[0].content[0].input: must be an object"),
    ({"system": 7}, "system: must be a list"), ({"system": [{"type": "image"}]}, "system[0]: must be a text block"),
    ({"stop_sequences": [""]}, "stop_sequences: "), ({"temperature": 3}, "temperature: "),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: 'web_search_20250305'"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: must be"),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name: "),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0]: parameters: must be"),
    ({"tools": [7]}, "tools[0]: must be an object"), ({"tools": [TOOL, TOOL]}, "two functions have the same name"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "there is no tool 'g'"),
    ({"tool_choice": {"type": "all"}, "tools": [TOOL]}, "tool_choice.type: must be"),
    ({"tool_choice": "any"}, "tool_choice: must be an object"), ({"thinking": {"type": "much"}}, "thinking.type: "),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format: must be"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "colour"}}}}, "output_config.format: "),
    ({"output_config": {"task_budget": 7}}, "output_config.task_budget is not supported"),
    ({"output_config": {"effort": "utmost"}}, "thinking: "), ({"metadata": {"user_id": 7}}, "metadata.user_id: "),
    ({"container": "a"}, "container is not supported"), ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"stop_sequence": ["a"]}, "did you mean stop_sequences?"), ({"stream": "yes"}, "stream: "),
    ({"model": None}, "model: "), ({"model": "other"}, "does not exist here"),
])
def test_what_is_wrong_is_named(server: Running, fields: dict[str, Any], says: str) -> None:
    answer = server.http.post("/v1/messages", json={"model": NAME, "messages": ASK, "max_tokens": 1, **fields})
    body = answer.json()
    assert (body["type"], body.keys(), body["error"].keys()) == ("error", {"type", "error"}, {"type", "message"})
    wanted = (404, "not_found_error") if fields.get("model") else (400, "invalid_request_error")
    assert (answer.status_code, body["error"]["type"]) == wanted
    assert says in body["error"]["message"]
    assert server.http.post("/v1/messages", json={"model": NAME, "messages": ASK, "max_tokens": 1}
                            ).status_code == 200


def test_the_clients_own_exceptions(server: Running, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        ask(client, model="other")
    with pytest.raises(anthropic.BadRequestError, match="container is not supported"):
        ask(client, extra_body={"container": "a"})
    with pytest.raises(anthropic.NotFoundError, match="batches are not served"):
        client.messages.batches.list()
    assert server.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"


def test_unknown_names_and_what_has_no_effect_are_told(server: Running) -> None:
    answer = server.http.post("/v1/messages", json={
        "model": NAME, "messages": ASK, "max_tokens": 1, "made_up": 1, "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert answer.headers["x-flowspec-ignored"] == "made_up, thinking.budget_tokens"
    assert answer.json()["flowspec"]["ignored"] == ["made_up", "thinking.budget_tokens"]


def test_every_field_of_the_client_is_in_the_table() -> None:
    assert {*MessageCreateParamsBase.__annotations__, "stream"} <= TABLE.fields.keys()


def test_keys_and_the_queue(held: Held, model: Path) -> None:
    with running(served(model), held, api_key="one\nsesame", capacity=0) as server:
        for key in ("none", "sesam"):
            with (anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client,
                  pytest.raises(anthropic.AuthenticationError, match=r"authentication_error.*API key")):
                ask(client)
        for how in ({"api_key": "sesame"}, {"auth_token": "sesame"}):
            with anthropic.Anthropic(base_url=server.url, max_retries=0, **how) as client:
                assert ask(client).usage.output_tokens == 12
                held.may_go.clear()
                stream = ask(client, stream=True)
                try:
                    with pytest.raises(anthropic.RateLimitError, match="the queue is full"):
                        ask(client)
                finally:
                    held.may_go.set()
                assert [event.type for event in stream][-1] == "message_stop"

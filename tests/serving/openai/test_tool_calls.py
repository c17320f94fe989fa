"""Tool calls: found in texts however they are split, and over the endpoint with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest
from kits.http_server import NAME, Running, running, served
from openai.types.responses import Response

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.model.chat import recognise_tool_format
from flowspec_edge.serving.openai.detokenize import CallPiece, ToolCallParser
from flowspec_edge.serving.openai.responses_endpoint import ResponsesBody
from flowspec_edge.serving.openai.schemas import ChatBody, read_body

HERMES = recognise_tool_format("tools <tool_call>")
LLAMA = recognise_tool_format('tools "parameters": dictionary of argument name')
ARGUMENTS = '{"a": "}\\"]{ <tool_call>", "b": [{"c": 1}]}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'


def read(form: Any, text: str, size: int) -> tuple[str, list[tuple[str, str]], int]:
    """Content, and names and arguments, of a text that comes in pieces of ``size``; and how many pieces."""
    parser = ToolCallParser(form)
    found = [piece for at in range(0, len(text), size) for piece in parser.push(text[at:at + size])]
    found += parser.close()
    calls: list[list[str]] = []
    ids = set()
    for piece in found:
        if isinstance(piece, CallPiece):
            if piece.name:
                ids.add(piece.id)
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
    assert len(ids) == len(calls) == parser.calls
    content = "".join(piece for piece in found if isinstance(piece, str))
    return content, [(name, arguments) for name, arguments in calls], len(found)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_found_however_the_text_is_split(size: int) -> None:
    def hermes(text: str) -> Any:
        return read(HERMES, text, size)[:2]

    assert hermes(CALL) == ("", [("f", ARGUMENTS)])
    assert hermes(f"Let me see.\n\n{CALL}\n{CALL}") == ("Let me see.", [("f", ARGUMENTS)] * 2)
    assert hermes("no <tool call> here \n") == ("no <tool call> here \n", [])
    cut = CALL.index(ARGUMENTS) + 11  # by the token limit
    assert hermes(CALL[:cut]) == ("", [("f", ARGUMENTS[:11])])
    assert hermes(CALL[:20]) == ("", [])
    llama = f'{{"name": "f", "parameters": {ARGUMENTS}}}'
    assert read(LLAMA, llama, size)[:2] == ("", [("f", ARGUMENTS)])
    assert read(LLAMA, '{"no": "call"}', size)[:2] == ('{"no": "call"}', [])
    assert read(LLAMA, "It is {sunny}.", size)[:2] == ("It is {sunny}.", [])


def test_arguments_come_as_they_are_written() -> None:
    assert read(HERMES, CALL, 1)[2] == 1 + len(ARGUMENTS)


TEMPLATE = """{% if tools %}{{ tools | tojson }} <tool_call>{"name", "arguments"}</tool_call>
{% endif %}{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\
{% for call in turn.tool_calls or [] %}\
<{{ call.function.name }} {{ call.function.arguments.city }}>{% endfor %}

{% endfor %}assistant: """
WEATHER: dict[str, Any] = {"type": "function", "function": {
    "name": "weather", "description": "Tells the weather.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]},
                                                    "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                   "required": ["city", "days"], "additionalProperties": False}}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
HISTORY: list[Any] = [
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [{
        "id": "call_1", "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


@pytest.fixture(scope="module")
def server(model: Path, processes: ProcessCluster) -> Iterator[Running]:
    pytest.importorskip("llguidance")
    with running(served(model, TEMPLATE), processes) as it:
        yield it


def ask(server: Running, **how: Any) -> Any:
    return server.client.chat.completions.create(**{
        "model": NAME, "messages": HISTORY[:1], "tools": [WEATHER, TIME], "max_tokens": 400, "temperature": 1,
        "seed": 3, "parallel_tool_calls": False, **how})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_with_arguments_of_its_schema(server: Running, choice: Any) -> None:
    whole = ask(server, tool_choice=choice).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("weather", "time") if choice == "required" else "weather"
    if call.function.name == "weather":
        assert arguments["city"] in ("Rome", "Oslo")
        assert 1 <= arguments["days"] <= 9
    parts = [chunk.choices[0] for chunk in ask(server, tool_choice=choice, stream=True)]
    assert parts[-1].finish_reason == "tool_calls"
    deltas = [delta for part in parts for delta in part.delta.tool_calls or []]
    assert (deltas[0].function.name, {delta.index for delta in deltas}) == (call.function.name, {0})
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert not any(part.delta.content for part in parts)


def test_a_call_of_a_response_is_the_chats(server: Running) -> None:
    """As OpenAI's own client reads it, in one piece and as events; and back again as input."""
    flat = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    choice = {"type": "function", "name": "weather"}

    def respond(**how: Any) -> Any:
        return server.client.responses.create(**{
            "model": NAME, "input": HISTORY[0]["content"], "tools": flat, "tool_choice": choice,
            "max_output_tokens": 400, "temperature": 1, "parallel_tool_calls": False,
            "extra_body": {"seed": 3}, **how})

    (wanted,) = ask(server, tool_choice={"type": "function", "function": {"name": "weather"}}
                    ).choices[0].message.tool_calls
    done = respond()
    Response.model_validate(json.loads(done.to_json()), strict=True)
    (call,) = done.output
    assert (call.type, call.status, call.name, call.arguments) == (
        "function_call", "completed", "weather", wanted.function.arguments)
    assert (done.status, done.tool_choice.name, done.tools[0].name) == ("completed", "weather", "weather")

    events = list(respond(stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert [*dict.fromkeys(event.type.removeprefix("response.") for event in events)] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(deltas) == events[-3].arguments == events[-2].item.arguments == call.arguments
    assert events[-1].response.output[0].name == "weather"
    assert [event.sequence_number for event in events] == [*range(len(events))]

    said = respond(tool_choice="auto", max_output_tokens=8)
    assert (said.status, said.output[0].type) == ("incomplete", "message")
    assert said.output_text == ask(server, max_tokens=8).choices[0].message.content
    assert [event.type for event in respond(tool_choice="auto", max_output_tokens=8, stream=True)][-2:] == [
        "response.output_item.done", "response.incomplete"]


def test_calls_and_their_outputs_go_back_as_input(model: Path) -> None:
    what = served(model, TEMPLATE)
    (asked, called, told), [call] = HISTORY, HISTORY[1]["tool_calls"]
    items = [asked, {"type": "function_call", "call_id": call["id"], "id": "fc_1", "status": "completed",
                     **call["function"]},
             {"type": "function_call_output", "call_id": call["id"], "output": told["content"]}]
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]}

    def prompts(messages: list[Any], given: list[Any]) -> list[str]:
        chat = read_body(ChatBody, json.dumps({"model": NAME, "messages": messages}).encode())
        response = read_body(ResponsesBody, json.dumps({"model": NAME, "input": given}).encode())
        return [what.tokenizer.decode(what.chat(body).request.prompt) for body in (chat, response)]

    twice = {**called, "tool_calls": [call] * 2}
    for messages, given in ((HISTORY, items), ([asked, twice, told], [asked, items[1], *items[1:]]),
                            ([asked, {**called, "content": "Wait."}, told], [asked, said, *items[1:]])):
        chat, response = prompts(messages, given)
        assert chat == response


def test_the_template_gets_the_tools_and_the_calls_so_far(model: Path) -> None:
    what = served(model, TEMPLATE)

    def rendered(messages: list[Any], **how: Any) -> str:
        body = read_body(ChatBody, json.dumps({"model": NAME, "messages": messages, **how}).encode())
        return what.tokenizer.decode(what.chat(body).request.prompt)

    told = "user: Weather in Rome?\nassistant: <weather Rome>\ntool: sunny\nassistant: "
    assert rendered(HISTORY) == rendered(HISTORY, tools=[WEATHER], tool_choice="none") == told
    if find_spec("llguidance"):
        head, _, tail = rendered(HISTORY, tools=[WEATHER, TIME]).partition(" <tool_call>")
        assert json.loads(head) == [WEATHER, TIME]
        assert tail.endswith(told)


def test_a_schema_that_cannot_be_kept_is_refused_if_it_is_strict(server: Running) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    with pytest.raises(openai.BadRequestError, match=r"tools: .*uniqueItems") as caught:
        ask(server, tools=[{"type": "function", "function": function}])
    assert caught.value.param == "tools"
    ask(server, tools=[{"type": "function", "function": {**function, "strict": False}}], max_tokens=1)



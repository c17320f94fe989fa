"""OpenAI's Responses API by its own client: the chat's text, typed events in their order, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from kits.http_server import NAME, Held, Running, running, served
from kits.plain_answers import plain_text
from kits.process_clusters import until
from openai.types.responses import Response

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.errors import RequestFailed
from flowspec_edge.model.chat import Message
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.settings import Sampling

TURNS: list[Any] = [{"role": "user", "content": "hello"},
                    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                     "content": [{"type": "output_text", "text": "hi", "annotations": []}]},
                    {"role": "user", "content": [{"type": "input_text", "text": "wh"},
                                                 {"type": "input_text", "text": "y?"}]}]
MESSAGES = [Message("system", "be brief"), Message("user", "hello"), Message("assistant", "hi"),
            Message("user", "why?")]
ORDER = ["response.created", "response.in_progress", "response.output_item.added",
         "response.content_part.added", "response.output_text.delta", "response.output_text.done",
         "response.content_part.done", "response.output_item.done"]


@pytest.fixture(scope="module")
def cluster(processes: ProcessCluster) -> Held:
    return Held(processes)


@pytest.fixture(scope="module")
def server(model: Path, cluster: Held) -> Iterator[Running]:
    """The cluster's only one: a second one would wait for half a minute until this one lets it serve."""
    with running(served(model), cluster, keep_alive_s=0.05) as it:
        yield it


def ask(server: Running, **how: Any) -> Any:
    return server.client.responses.create(**{"model": NAME, "input": "hello", "max_output_tokens": 12, **how})


def test_a_response_is_the_chats_text(server: Running, model: Path) -> None:
    prompt = Tokenizer(OpenModel(model), "vicuna").chat(MESSAGES)
    text = plain_text(model, prompt, 12, Sampling(1.0, top_p=0.9, seed=5))
    done = ask(server, input=TURNS, instructions="be brief", temperature=1, top_p=0.9, store=True,
               metadata={"a": "b"}, extra_body={"seed": 5})
    Response.model_validate(json.loads(done.to_json()), strict=True)
    assert done.output_text == text
    assert (done.object, done.status, done.incomplete_details.reason) == \
           ("response", "incomplete", "max_output_tokens")
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == \
           (len(prompt), 12, len(prompt) + 12)
    assert (done.instructions, done.temperature, done.top_p, done.metadata) == \
           ("be brief", 1, 0.9, {"a": "b"})
    assert done.store is False
    stopped = ask(server, extra_body={"stop": [(whole := ask(server).output_text)[4:6]]})
    assert (stopped.status, stopped.output_text) == ("completed", whole[:whole.index(whole[4:6])])


def test_a_stream_has_openais_events_in_their_order(server: Running) -> None:
    whole = ask(server)
    events = list(ask(server, stream=True))
    kinds = [event.type for event in events]
    assert [*dict.fromkeys(kinds)] == [*ORDER, "response.incomplete"]
    assert kinds.count("response.output_text.delta") == len(kinds) - len(ORDER)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(event.delta for event in events if event.type == ORDER[4]) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text == events[-4].text == events[-3].part.text
    assert last.usage.to_dict(exclude_unset=True)["total_tokens"] == whole.usage.total_tokens
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}
    assert events[0].response.status == "in_progress"
    assert events[0].response.id == last.id
    with server.client.responses.stream(model=NAME, input="hello", max_output_tokens=12) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_the_raw_stream_names_its_events(server: Running) -> None:
    body = {"model": NAME, "input": "hello", "max_output_tokens": 3, "stream": True}
    lines = server.http.post("/v1/responses", json=body).text.split("\n\n")
    assert lines[-1] == ""
    for event in lines[:-1]:
        if event.startswith(":"):  # a sign of life
            continue
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_a_schema_holds(server: Running) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"],
              "additionalProperties": False}
    form = {"type": "json_schema", "name": "colour", "schema": schema, "strict": True}
    done = ask(server, text={"format": form}, max_output_tokens=200)
    assert done.status == "completed"
    assert json.loads(done.output_text)["c"] in ("red", "blue")
    assert done.text.format.to_dict()["schema"] == schema


@pytest.mark.parametrize(("change", "param"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "c"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content"),
    ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "colour"}, "strict": True}}},
     "text.format"),
    ({"extra_body": {"logit_bias": {"97": 1}}}, "logit_bias"),
])
def test_what_cannot_be_done_is_a_bad_request(server: Running, change: dict[str, Any], param: str) -> None:
    if param == "text.format":
        pytest.importorskip("llguidance")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **change)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


def test_an_error_within_the_stream_is_a_failed_response(server: Running, cluster: Held,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RequestFailed("no more")

    cluster.may_go.clear()
    events = ask(server, stream=True, max_output_tokens=1000)
    until(lambda: cluster.pieces > 0)
    monkeypatch.setattr(cluster, "on_piece", fail)
    cluster.may_go.set()
    *_, last = list(events)
    assert last.type == "response.failed"
    assert last.response.error.message
    assert (last.response.status, last.response.output) == ("failed", [])

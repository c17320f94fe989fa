"""Reasoning apart from content: in texts however they are split, and by OpenAI's client."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.http_server import NAME, Running, Says, served
from kits.tiny_model_dir import tiny_model_dir
from openai.types.responses import Response
from transformers import AutoTokenizer

from flowspec_edge.model.chat import ReasoningFormat, recognise_reasoning_format
from flowspec_edge.serving.openai.prepare import ServedModel
from flowspec_edge.serving.openai.reasoning import ReasoningPiece, reasoning_parser
from flowspec_edge.serving.openai.schemas import ChatBody, body_of

THINK = ReasoningFormat("<think>", "</think>")
CHANNELS = ReasoningFormat(channels=True)
ASK: list[Any] = [{"role": "user", "content": "hello"}]
SAID = "<think>\nIt is a <b> tag.\n</think>\n\nHello < you"
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def split(form: ReasoningFormat, text: str, size: int, begun: bool = False, call: str = "") -> tuple[str, str]:
    """Reasoning and content of a text that comes in pieces of ``size``."""
    parser = reasoning_parser(form, begun, call)
    found = [piece for at in range(0, len(text), size) for piece in parser.push(text[at:at + size])]
    found += parser.close()
    assert all(piece if isinstance(piece, str) else piece.text for piece in found)
    return ("".join(piece.text for piece in found if isinstance(piece, ReasoningPiece)),
            "".join(piece for piece in found if isinstance(piece, str)))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "begun", "call", "expected"), [
    (SAID, False, "", ("It is a <b> tag.", "Hello < you")),
    ("why \n</think> Hello", True, "", ("why", "Hello")),
    ("<think>why</think>Hello", True, "", ("why", "Hello")),
    (" no <think>thought</think>", False, "", ("", " no <think>thought</think>")),
    ("<think>\n\n</think>\n\nHello", False, "", ("", "Hello")),
    ("<think>cut off </thi", False, "", ("cut off </thi", "")),
    ("<thi", False, "", ("", "<thi")),
    ("  ", False, "", ("", "  ")),
    (f"<think>why\n{CALL}", False, "<tool_call>", ("why", CALL)),
    (f"<think>why</think>\n{CALL}", False, "<tool_call>", ("why", CALL)),
])
def test_thoughts(size: int, text: str, begun: bool, call: str, expected: tuple[str, str]) -> None:
    assert split(THINK, text, size, begun, call) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "expected"), [
    ("<|channel|>analysis<|message|>why < not<|end|><|start|>assistant<|channel|>final<|message|>Hello",
     ("why < not", "Hello")),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
     "<|start|>assistant<|channel|>commentary<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d"
     "<|return|>", ("a\n\nb", "c\n\nd")),
    ("<|channel|>final <|constrain|>json<|message|>{}", ("", "{}")),
    ("<|channel|>analysis<|message|>cut <|en", ("cut <|en", "")),
    ("<|channel|>anal", ("", "")), ("plain < text", ("", "plain < text")), ("<", ("", "<")),
])
def test_channels(size: int, text: str, expected: tuple[str, str]) -> None:
    assert split(CHANNELS, text, size) == expected


def test_formats_are_recognised_by_the_template() -> None:
    assert recognise_reasoning_format("{{ '<think>' }}") == THINK
    assert recognise_reasoning_format("<|start|>assistant<|channel|>") == CHANNELS
    assert recognise_reasoning_format("[THINK]") == ReasoningFormat("[THINK]", "[/THINK]")
    assert recognise_reasoning_format("{{ messages }}") is None


@pytest.mark.parametrize(("end", "how", "thinks"), [
    ("", {}, False), ("<think>\n", {}, True), ("<think></think>", {}, False),
    ("<think>", {"continue_final_message": True}, True),
    ("<think>", {"response_format": {"type": "json_object"}}, None),
    ("<think>", {"separate_reasoning": False}, None), ("<think>", {"reasoning_format": "none"}, None)])
def test_whether_the_prompt_has_begun_it(model: Path, end: str, how: dict[str, Any], thinks: bool | None) -> None:
    """None: the answer is not split."""
    if "response_format" in how:
        pytest.importorskip("llguidance")
    what = served(model, "{# <think> #}{% for turn in messages %}{{ turn.content }}{% endfor %}"
                         "{% if add_generation_prompt %}" + end + "{% endif %}")
    turns = [*ASK, {"role": "assistant", "content": "<think>well"}] if "continue_final_message" in how else ASK
    prepared = what.chat(body_of(ChatBody, {"model": NAME, "messages": turns, **how}, ()))
    parser = prepared.reasoning_parser()
    assert (None if parser is None else parser.inside) == thinks


def test_a_user_cannot_begin_the_reasoning(what: ServedModel) -> None:
    asked = body_of(ChatBody, {"model": NAME, "messages": [{"role": "user", "content": "<think>"}]}, ())
    assert what.chat(asked).thinks is False


def test_by_openais_client(server: Running, cluster: Says) -> None:
    cluster.text = SAID

    def ask(**how: Any) -> Any:
        return server.client.chat.completions.create(**{"model": NAME, "messages": ASK, "max_tokens": 200, **how})

    whole = ask()
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("It is a <b> tag.", "Hello < you")
    # Up to the token that ends the closing word; the tokens are bytes here.
    assert whole.usage.completion_tokens_details.reasoning_tokens == SAID.index("</think>") + 7 - 6
    chunks = [chunk.choices[0].delta for chunk in ask(stream=True)]
    thought = [getattr(delta, "reasoning_content", None) or "" for delta in chunks]
    said = [delta.content or "" for delta in chunks]
    assert ("".join(thought), "".join(said)) == ("It is a <b> tag.", "Hello < you")
    assert not any(one and other for one, other in zip(thought, said, strict=True))
    for how in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        message = ask(extra_body=how).choices[0].message
        assert (getattr(message, "reasoning_content", None), message.content) == (None, SAID)
    silent = ask(extra_body={"include_reasoning": False}).choices[0].message
    assert (getattr(silent, "reasoning_content", None), silent.content) == (None, "Hello < you")
    cut = ask(max_tokens=12).choices[0]
    assert (cut.finish_reason, cut.message.reasoning_content, cut.message.content) == ("length", "It i", "")


def test_a_response_has_it_as_an_item(server: Running, cluster: Says) -> None:
    cluster.text = SAID

    def ask(**how: Any) -> Any:
        return server.client.responses.create(**{"model": NAME, "input": "hello", "max_output_tokens": 200, **how})

    done = ask()
    Response.model_validate(done.model_dump(), strict=True)
    thought, said = done.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "It is a <b> tag.")
    assert (said.type, done.output_text) == ("message", "Hello < you")
    assert done.usage.output_tokens_details.reasoning_tokens > 0
    kinds = [*dict.fromkeys(event.type.removeprefix("response.") for event in ask(stream=True))]
    assert kinds == ["created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
                     "reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta",
                     "output_text.done", "completed"]
    cluster.text = None
    again = [{"role": "user", "content": "hello"}, thought.model_dump(), said.model_dump(),
             {"role": "user", "content": "why?"}]
    turns = [*ASK, {"role": "assistant", "content": "Hello < you", "reasoning_content": "It is a <b> tag."},
             {"role": "user", "content": "why?"}]
    chat = server.client.chat.completions.create(model=NAME, messages=turns, max_tokens=4)
    assert ask(input=again, max_output_tokens=4).usage.input_tokens == chat.usage.prompt_tokens


def test_a_silent_request_reads_the_same_tokens(what: ServedModel) -> None:
    asked = {"model": NAME, "messages": ASK, "seed": 3}
    usual, silent = (what.chat(body_of(ChatBody, asked | more, ())) for more in ({}, {"include_reasoning": False}))
    assert replace(usual, silent=True) == replace(silent, decode=usual.decode)


def test_channels_of_special_tokens(tmp_path: Path) -> None:
    """Which a decoder leaves out by default: without them the reasoning would run into the content."""
    model = tiny_model_dir(tmp_path / "model", layers=1, hidden=32)
    tokenizer = AutoTokenizer.from_pretrained(model / "target")
    words = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    tokenizer.save_pretrained(model / "target")
    config = model / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": len(tokenizer)}))
    what = served(model, "{% for turn in messages %}<|start|>{{ turn.role }}<|channel|>final<|message|>"
                         "{{ turn.content }}<|end|>{% endfor %}<|start|>assistant")
    prepared = what.chat(body_of(ChatBody, {"model": NAME, "messages": ASK}, ()))
    text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    ids = what.tokenizer.encode(text, special=False)
    assert len(ids) < len(text)  # a word is one token
    detokenizer, parser = prepared.detokenizer(prepared.request), prepared.reasoning_parser()
    assert parser is not None
    found = [piece for token in ids for piece in parser.push(detokenizer.push([token]))]
    assert "".join(piece.text for piece in found if isinstance(piece, ReasoningPiece)) == "why"
    assert "".join(piece for piece in found if isinstance(piece, str)) == "Hello"

"""Grammars of tool calls, by the texts that they accept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kits.tiny_models import tiny_tokenizer
from tokenizers import AddedToken

from flowspec_edge.model.chat import Tool, ToolFormat, recognise_tool_format
from flowspec_edge.model.grammar import GrammarCompiler, json_value

pytest.importorskip("llguidance")

VOCABULARY = 320
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
           "required": ["city"], "additionalProperties": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def tool(name: str, parameters: dict[str, Any]) -> Tool:
    return Tool(name, parameters, False, {"type": "function", "function": {"name": name}})


TOOLS = [tool("weather", WEATHER), tool("time", {"type": "object", "additionalProperties": False})]


def known(template: str) -> ToolFormat:
    found = recognise_tool_format(template)
    assert found
    return found


HERMES = known("{% if tools %}{{ tools }} <tool_call>\n{\"name\"")
LLAMA = known('{{ tools }} {"name": function name, "parameters": dictionary of argument name and its value}')


@pytest.fixture(scope="module", params=["spelled", "one token"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    found = tiny_tokenizer(300)
    if request.param == "one token":
        found.add_tokens([AddedToken(word) for word in ("<tool_call>", "</tool_call>", "<think>")])
    return found


def ends(tokenizer: Any, text: str, form: ToolFormat, required: bool = False, several: bool = True,
         content: str | None = None) -> bool | None:
    """Whether an answer may be ``text``; None: it may begin so, but has to go on."""
    compiler = GrammarCompiler(tokenizer, VOCABULARY)
    grammar = compiler.text(lambda special: form.grammar(TOOLS, special, required, several, content))
    state = compiler.compile(grammar, frozenset({0})).begin()
    path = tokenizer(text, add_special_tokens=False)["input_ids"]
    allowed = state.allowed(path)
    return False if allowed is None else True if allowed[0] & 1 else None


def test_text_may_end_in_calls_which_fit_their_schema(tokenizer: Any) -> None:
    def auto(text: str) -> bool | None:
        return ends(tokenizer, text, HERMES)

    assert all(auto(text) for text in ("", "hello < {", f"I will look.\n{CALL}", f"{CALL}\n{TIME}"))
    assert auto(CALL[:-1] if "<think>" not in tokenizer.get_vocab() else CALL[:-14]) is None
    assert auto(CALL.replace("Rome", "Bonn")) is False
    assert auto(CALL.replace("weather", "time")) is False
    if "<think>" in tokenizer.get_vocab():
        assert auto(f"<think>hm\n{CALL}")


def test_a_required_call_is_the_whole_answer(tokenizer: Any) -> None:
    assert ends(tokenizer, CALL, HERMES, required=True)
    assert ends(tokenizer, f"{CALL}\n{CALL}", HERMES, required=True)
    assert ends(tokenizer, f"{CALL}\n{CALL}", HERMES, required=True, several=False) is False
    assert ends(tokenizer, "", HERMES, required=True) is None
    assert ends(tokenizer, "hello", HERMES, required=True) is False


def test_json_or_a_call(tokenizer: Any) -> None:
    content = json_value({"type": "integer"})
    assert ends(tokenizer, CALL, HERMES, content=content)
    assert ends(tokenizer, "12", HERMES, content=content)
    assert ends(tokenizer, "hello", HERMES, content=content) is False


def test_llamas_call_is_an_object_alone(tokenizer: Any) -> None:
    call = json.dumps({"name": "weather", "parameters": {"city": "Oslo", "days": 3}})
    assert ends(tokenizer, call, LLAMA)
    assert ends(tokenizer, call, LLAMA, required=True)
    assert ends(tokenizer, "It is {sunny}", LLAMA)
    assert ends(tokenizer, "It is sunny", LLAMA, required=True) is False
    assert ends(tokenizer, call.replace("Oslo", "Bonn"), LLAMA) is False


def test_templates_without_tools_have_no_format() -> None:
    assert recognise_tool_format("{{ messages }}") is None
    assert recognise_tool_format("{{ tools }} in a format of its own") is None

"""A client's JSON schema cannot use up the server: every one is compiled in bounded time and memory, or
refused, and so are its masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from schemakit import chain
from tiny import tiny_tokenizer

from flowspec_edge.errors import UsageError
from flowspec_edge.model.grammar import GrammarCompiler

STOPS = frozenset({0})


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tiny_tokenizer(300), 300)
    yield made
    made._processes.close()


@pytest.mark.parametrize("schema", [
    {"type": "integer", "multipleOf": 9999991},  # never ends, and takes 55 MB/s
    chain("", 2577), chain("items", 1025), chain("properties", 879),  # overflow a thread's stack
    {"allOf": [{"properties": {"p": {"type": "string", "pattern": f"x{i}*"}}} for i in range(30)]},
    {"const": "x" * 1_900_000}, {"const": "x" * 60_000}, {"const": list(range(100_000))},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
])
def test_hostile_schemas_are_refused(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as first:
        compiler.json_schema(schema, STOPS)
    with pytest.raises(UsageError) as again:  # from memory
        compiler.json_schema(schema, STOPS)
    assert str(first.value) == str(again.value)


@pytest.mark.parametrize("schema", [
    {"type": "string", "format": "date-time"},
    {"type": "string", "pattern": "^[a-z]{2,40}$", "maxLength": 30},
    {"type": "integer", "multipleOf": 7, "minimum": 0}, chain("items", 60), chain("properties", 60),
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}},
    {"enum": [f"value {i}" for i in range(2000)]}, {"const": "x" * 4000},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
])
def test_others_are_not(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    assert compiler.json_schema(schema, STOPS).begin().allowed(()) is not None


def test_a_long_text_within_a_schema_ends_the_answer(compiler: GrammarCompiler) -> None:
    """It cannot be seen before; every other answer would wait for its masks."""
    schema = {"type": "object", "properties": {"k": {"const": "y" * 60_000}}, "required": ["k"],
              "additionalProperties": False}
    state = compiler.json_schema(schema, STOPS).begin()
    tokenizer = tiny_tokenizer(300)

    def answer() -> None:
        for token in tokenizer('{"k":"' + "y" * 40, add_special_tokens=False)["input_ids"]:
            state.turn()
            state.allowed(())
            state.advance(token)

    with pytest.raises(UsageError):
        answer()


def test_masks_that_take_long_end_the_answer(compiler: GrammarCompiler) -> None:
    state = compiler.json_schema({"type": "object"}, STOPS).begin()

    def turn() -> None:
        for _ in range(1_000_000):
            state.allowed(())

    with pytest.raises(UsageError):
        turn()
    state.turn()
    assert state.allowed(()) is not None

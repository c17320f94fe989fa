"""A client's JSON schema cannot use up the server: every one is compiled in bounded time and memory, or
refused, and so are its masks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from kits.json_schemas import chain
from kits.small_tokenizers import sentencepiece_style, unigram_style
from kits.tiny_models import tiny_tokenizer

from flowspec_edge.errors import UsageError
from flowspec_edge.model import grammar
from flowspec_edge.model.chat import _FORMATS, Tool
from flowspec_edge.model.grammar import GrammarCompiler, GrammarState

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


def byte_level() -> Any:
    """With a word and special tokens that were added, as fine-tunes have them."""
    tokenizer = tiny_tokenizer(300)
    tokenizer.add_tokens(["hello"])
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<s{i}>" for i in range(18)]})
    return tokenizer


VOCABULARIES = pytest.mark.parametrize(("make", "vocabulary"), [
    *((byte_level, size) for size in (319, 318, 301, 300, 290, 320, 400)),  # 319 is the tokenizer's own
    (sentencepiece_style, 310), (sentencepiece_style, 400), (unigram_style, 270), (unigram_style, 300)])
WORD = {"type": "object", "properties": {"a": {"const": "hello in the"}}, "required": ["a"],
        "additionalProperties": False}


def tokens(state: GrammarState, vocabulary: int, path: Sequence[int] = ()) -> list[int]:
    mask = state.allowed(path)
    assert mask is not None
    bits = np.unpackbits(mask, bitorder="little")
    assert not bits[vocabulary:].any()
    return np.flatnonzero(bits[:vocabulary]).tolist()


@VOCABULARIES
def test_the_tokenizer_and_the_vocabulary_may_differ_in_length(make: Callable[[], Any], vocabulary: int
                                                               ) -> None:
    """Whatever the model chooses among its own tokens, the answer is what the schema asks for: also where the
    usual token of a text is not among them."""
    tokenizer = make()
    end = tokenizer.eos_token_id
    grammar = GrammarCompiler(tokenizer, vocabulary).json_schema(WORD, frozenset({end, 5000}))
    for seed in range(3):
        state, answer, rng = grammar.begin(), list[int](), random.Random(seed)
        while not state.complete:
            state.turn()
            answer.append(rng.choice([token for token in tokens(state, vocabulary) if token != end]))
            state.advance(answer[-1])
        assert json.loads(tokenizer.decode(answer)) == {"a": "hello in the"}


@VOCABULARIES
def test_the_choices_are_those_of_the_tokenizer_below_the_vocabulary(make: Callable[[], Any], vocabulary: int
                                                                     ) -> None:
    tokenizer = make()
    whole = max(tokenizer.get_vocab().values()) + 1
    ends = frozenset({tokenizer.eos_token_id})
    kept, full = (GrammarCompiler(tokenizer, size).json_schema({"type": "string"}, ends).begin()
                  for size in (vocabulary, max(vocabulary, whole)))
    for _ in range(2):
        choices = tokens(kept, vocabulary)
        assert choices == [token for token in tokens(full, max(vocabulary, whole)) if token < vocabulary]
        kept.advance(choices[0])
        full.advance(choices[0])


def test_a_special_token_beyond_the_vocabulary_is_spelled() -> None:
    assert GrammarCompiler(byte_level(), 302).special("<s0>") == "<[301]>"
    assert GrammarCompiler(byte_level(), 301).special("<s0>") is None


def test_a_vocabulary_that_cannot_write_the_answer() -> None:
    """97 tokens of ASCII have no é. A draft that runs into that changes nothing until it becomes text."""
    tokenizer = tiny_tokenizer(97)
    compiler = GrammarCompiler(tokenizer, 97)
    with pytest.raises(UsageError, match="no token of the model's vocabulary can write"):
        compiler.compile(compiler.text(lambda _: 'start: "é"'), STOPS)
    state = compiler.compile(compiler.text(lambda _: 'start: "aé" | "bb"'), STOPS).begin()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert tokens(state, 97) == [a, b]
    assert state.allowed([a]) is None
    assert tokens(state, 97, [b]) == [b]
    state.advance(b)
    assert tokens(state, 97) == [b]
    other = compiler.compile(compiler.text(lambda _: 'start: "aé" | "bb"'), STOPS).begin()
    other.allowed([a])
    with pytest.raises(UsageError, match="no token of the model's vocabulary can write"):
        other.advance(a)


def around(part: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"q": part, "n": {"type": "integer"}}, "required": ["n"],
            "additionalProperties": False, **more}


TEXT = {"type": "string"}


@pytest.mark.parametrize(("schema", "at"), [
    *((around({**TEXT, "pattern": pattern}), "properties.q.pattern") for pattern in (
        "^(?=.*a)b", "(?<!a)b", r"\bword\b", r"(a)\1", "(", r"\Aab\Z", 5, None)),
    (around({"type": "any"}), "properties.q.type"), (around({"type": "STRING"}), "properties.q.type"),
    (around({"type": None}), "properties.q.type"), (around({"type": ["string", "any"]}), "properties.q.type"),
    (around({"type": "array", "items": None}), "properties.q.items"),
    (around({"type": "array", "items": {**TEXT, "minLength": "1"}}), "properties.q.items.minLength"),
    (around({"anyOf": [{"type": "null"}, {"type": "dict"}]}), "properties.q.anyOf[1].type"),
    (around({"anyOf": None}), "properties.q.anyOf"), (around({"enum": None}), "properties.q.enum"),
    (around({**TEXT, "maxLength": None}), "properties.q.maxLength"), (around(None), "properties.q"),
    (around({"type": "integer", "minimum": 5, "maximum": 1}, required=["q"]), "properties.q"),
    (around({"$ref": "#/$defs/none"}), "properties.q.$ref"),
    (around({"$ref": "https://a.example/b.json"}), "properties.q.$ref"),
    (around({"$ref": "#/definitions/d"}, definitions={"d": {"type": "float"}}), "definitions.d.type"),
    (around(TEXT, required=None), "required"),
    (around(TEXT, additionalProperties=None), "additionalProperties"),
    ({"type": "object", "properties": None}, "properties"),
    ({"type": "object", "properties": []}, "properties"),
    ({"type": "object", "patternProperties": {"^(?!x)": TEXT}}, "patternProperties.^(?!x)"),
    (around(TEXT, required=["none"]), ""),
])
def test_what_cannot_be_enforced_is_named_or_ignored(compiler: GrammarCompiler, schema: dict[str, Any],
                                                         at: str) -> None:
    with pytest.raises(UsageError) as error:
        compiler.json_schema(schema, STOPS)
    assert str(error.value).startswith(f"schema.{at}: " if at else "schema: ")
    assert "\n" not in str(error.value)
    state = compiler.json_schema(schema, STOPS, strict=False).begin()
    encode = tiny_tokenizer(300)
    if schema.get("required") in (["q"], ["none"]):
        return  # which are still asked for
    assert state.allowed(encode('{"n":1}')["input_ids"]) is not None
    if "n" in (schema.get("properties") or ()):  # the rest is enforced
        assert state.allowed(encode('{"n":"')["input_ids"]) is None


@pytest.mark.parametrize("written", [
    'start: %json {"type": "string", "pattern": "(?=a)", "x-guidance": {"lenient": true}}',
    'start: %json {"type": "any", "x-guidance": {"lenient": true}}',
    'root ::= "%json {\\"x-guidance\\": {\\"lenient\\": true}}" (', 'start: /(/', 'start: "a" other'])
def test_a_grammar_that_a_client_wrote_is_not_relaxed(compiler: GrammarCompiler, written: str) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(UsageError):
            compiler.compile(compiler.written(written), STOPS)


@pytest.mark.parametrize(("written", "text"), [
    ('start: "x ::= y"', "x ::= y"), ('start: rule\nrule: "a" // root ::= "b"', "a"),
    ('root ::= "a: b"', "a: b"), ('# start: "x"\nroot ::= item\n  item ::= "b"', "b"),
    ("root ::= [a-b] | \"start: \"\n", "a")])
def test_the_syntax_of_a_grammar_is_known_by_its_rules(compiler: GrammarCompiler, written: str, text: str
                                                        ) -> None:
    state = compiler.compile(compiler.written(written), STOPS).begin()
    for token in tiny_tokenizer(300)(text, add_special_tokens=False)["input_ids"]:
        state.turn()
        state.advance(token)
    assert state.complete


def test_converted_grammars_are_kept_within_bounds(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    monkeypatch.setattr(grammar, "_MAX_CHECKED_CHARACTERS", 3000)
    for count in range(40):
        text = compiler.written(f'root ::= "{"a" * (100 + count)}"')
        compiler.compile(text, STOPS)
    kept = sum(verdict.characters for verdict in compiler._verdicts.values())
    assert 2000 < kept <= 3000


def test_few_vocabularies_are_kept(compiler: GrammarCompiler) -> None:
    """Each further set of ends, which a client may name, is another one. The grammars that use them go on."""
    first = compiler.json_schema({"const": 1}, frozenset({0, 5}))
    for end in range(20, 40):
        compiler.json_schema({"const": 1}, frozenset({0, end}))
    assert len(compiler._wrapped) <= 8
    assert first.begin().allowed(()) is not None
    assert compiler.json_schema({"const": 1}, frozenset({0, 5})).begin().allowed(()) is not None


def test_a_pattern_that_is_lost_forbids_no_names(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "patternProperties": {"^(?!x)": TEXT}, "additionalProperties": False}
    state = compiler.json_schema(schema, STOPS, strict=False).begin()
    assert state.allowed(tiny_tokenizer(300)('{"a":"b"}')["input_ids"]) is not None


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("schema", [
    {}, {"type": "object"}, {"type": "object", "properties": {}},
    {"$schema": "http://json-schema.org/draft-07/schema#", **around(TEXT)},
    around({**TEXT, "default": None, "examples": [1], "title": "Q", "nullable": True}),
    around({"anyOf": [TEXT, {"type": "null"}], "default": None}), around({"type": ["string", "null"]}),
    around({"enum": ["a", None]}), around({**TEXT, "format": "uri"}), around({**TEXT, "enum": ["a", "b"]}),
    around({"$ref": "#/$defs/D"}, **{
        "$defs": {"D": {"type": "object", "properties": {"d": {"$ref": "#/$defs/D"}}}}}),
    around({"$ref": "#/definitions/d"}, definitions={"d": {"const": 1}}),
    around({"type": "array", "items": {}}),
    around({"type": "object", "additionalProperties": TEXT}), around({"allOf": [{"$ref": "#/$defs/D"}]}, **{
        "$defs": {"D": {"enum": ["x"], "description": "one"}}}),
])
def test_schemas_as_clients_send_them(compiler: GrammarCompiler, schema: dict[str, Any],
                                         strict: bool) -> None:
    """Of pydantic, zod and servers of the Model Context Protocol, in 2020-12 and draft 07."""
    state = compiler.json_schema(schema, STOPS, strict).begin()
    text = '{"n":1}' if "required" in schema else "{}"
    assert state.allowed(tiny_tokenizer(300)(text)["input_ids"]) is not None


def test_one_tool_that_cannot_be_enforced_leaves_the_others_alone(compiler: GrammarCompiler) -> None:
    def grammar(strict: bool) -> GrammarState:
        tools = [Tool("good", around(TEXT), False, {}),
                 Tool("odd", around({**TEXT, "pattern": r"\bx\b"}), strict, {})]
        [form] = [known for known in _FORMATS if not known.open]
        text = compiler.text(lambda special: form.grammar(tools, special, True, True, None))
        return compiler.compile(text, STOPS).begin()

    encode = tiny_tokenizer(300)
    for name in ("good", "odd"):
        call = f'{{"name": "{name}", "parameters": {{"n":'
        assert grammar(False).allowed(encode(f"{call}1}}}}")["input_ids"]) is not None
        assert grammar(False).allowed(encode(f'{call}"')["input_ids"]) is None
    with pytest.raises(UsageError, match=r"^odd: parameters\.properties\.q\.pattern: "):
        grammar(True)

"""Random and hostile JSON schemas, and hostile chat templates."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

_TYPES = ["string", "integer", "number", "boolean", "null", "object", "array"]
_FORMATS = ["date-time", "date", "time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration",
            "none"]
_PATTERNS = ["^[a-z]+$", "a*", "^(ab|cd){1,3}$", r"\d{2,4}-\w+", "^.{0,20}$", "[", "(?=a)b", r"\bx\b", "é+",
             "^$", "(a|b|c)*d", "[^\\x00-\\x1f]*", "x{1000}", "^(?!no)"]
_NUMBERS = [0, 1, -1, 2, 7, 100, 0.5, -3.25, 1e9, 1e-7, 2**31, 2**63, -2**63, 1e300, 97, 10007]
_NAMES = ["a", "b", "name", "é", "", "$ref", "x y", "type", "a\"b"]


def random_schema(rng: random.Random, depth: int = 4) -> Schema:
    """Mostly valid: any keyword with a value of its kind, or now and then of any other."""
    names = [f"d{i}" for i in range(rng.randrange(3))]
    schema = _schema(rng, depth, names)
    if names and isinstance(schema, dict):
        schema["$defs"] = {name: _schema(rng, 2, names) for name in names}
    return schema if isinstance(schema, dict) else {"not": schema}


def _schema(rng: random.Random, depth: int, names: list[str]) -> Any:
    if rng.random() < 0.03:
        return rng.random() < 0.5
    if names and rng.random() < 0.15:
        return {"$ref": f"#/$defs/{rng.choice([*names, 'missing'] if rng.random() < 0.1 else names)}"}
    schema: Schema = {}
    if rng.random() < 0.85:
        schema["type"] = rng.choice(_TYPES) if rng.random() < 0.9 else rng.sample(_TYPES, 2)
    usual = _OF_TYPE.get(str(schema.get("type")), list(_KEYWORDS))
    keywords = list(_KEYWORDS) if rng.random() < 0.1 else usual
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        keyword = rng.choice(keywords)
        if depth > 0 or keyword not in _NESTED:
            schema[keyword] = _KEYWORDS[keyword](rng, depth - 1, names)
        if rng.random() < 0.01:
            schema[keyword] = _value(rng)
    return schema


def _value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(_NAMES): _value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return [None, True, rng.choice(_NUMBERS), rng.randrange(-50, 50), rng.choice(["", "text", "é\n\"", "\\"]),
            "word " * rng.randrange(20)][kind]


def _several(rng: random.Random, depth: int, names: list[str]) -> list[Any]:
    return [_schema(rng, depth, names) for _ in range(rng.randrange(1, 4))]


def _named(rng: random.Random, depth: int, names: list[str]) -> Schema:
    return {rng.choice([*_NAMES, *(f"p{i}" for i in range(30))]): _schema(rng, depth, names)
            for _ in range(rng.randrange(5))}


def _count(rng: random.Random, depth: int, names: list[str]) -> Any:
    return rng.choice((0, 1, 2, 3, 10, 50, 1000, -1, 2.0, 10**6))


def _number(rng: random.Random, depth: int, names: list[str]) -> Any:
    return rng.choice(_NUMBERS)


_KEYWORDS: dict[str, Callable[[random.Random, int, list[str]], Any]] = {
    "properties": _named, "required": lambda rng, *_: rng.sample(_NAMES, rng.randrange(4)),
    "additionalProperties": _schema, "minProperties": _count, "maxProperties": _count,
    "patternProperties": lambda rng, depth, names: {rng.choice(_PATTERNS): _schema(rng, depth, names)},
    "propertyNames": _schema, "dependentRequired": lambda rng, *_: {"a": ["b"]},
    "items": _schema, "prefixItems": _several, "minItems": _count, "maxItems": _count,
    "uniqueItems": lambda rng, *_: rng.random() < 0.5, "contains": _schema,
    "minLength": _count, "maxLength": _count, "pattern": lambda rng, *_: rng.choice(_PATTERNS),
    "format": lambda rng, *_: rng.choice(_FORMATS),
    "minimum": _number, "maximum": _number, "exclusiveMinimum": _number, "exclusiveMaximum": _number,
    "multipleOf": _number, "enum": lambda rng, *_: [_value(rng) for _ in range(rng.randrange(6))],
    "const": lambda rng, *_: _value(rng), "anyOf": _several, "allOf": _several, "oneOf": _several,
    "not": _schema, "if": _schema, "then": _schema, "else": _schema,
    "description": lambda rng, *_: "words " * rng.randrange(9), "default": lambda rng, *_: _value(rng),
}
_NESTED = {"properties", "additionalProperties", "patternProperties", "propertyNames", "items", "prefixItems",
           "contains", "anyOf", "allOf", "oneOf", "not", "if", "then", "else"}
_ANY = ["enum", "const", "anyOf", "allOf", "description"]
_OF_TYPE = {
    "object": ["properties", "properties", "required", "additionalProperties", "minProperties",
               "patternProperties", *_ANY],
    "array": ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", *_ANY],
    "string": ["minLength", "maxLength", "pattern", "format", *_ANY],
    "integer": ["minimum", "maximum", "exclusiveMinimum", "multipleOf", *_ANY],
    "number": ["minimum", "maximum", "exclusiveMaximum", "multipleOf", *_ANY],
}
_PRIMES = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71]


def chain(step: str, links: int) -> Schema:
    """A chain of ``$ref``s, each within ``step``: "", "items" or "properties"."""
    def link(i: int) -> Schema:
        inner = {"$ref": f"#/$defs/d{i + 1}"}
        if step == "items":
            return {"type": "array", "items": inner}
        if step == "properties":
            return {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        return inner

    return {"$ref": "#/$defs/d0", "$defs": {**{f"d{i}": link(i) for i in range(links)},
                                            f"d{links}": {"type": "null"}}}


def nested(keyword: str, depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}} if keyword == "properties" else {
            keyword: schema if keyword in ("items", "not", "additionalProperties") else [schema, schema][:1]}
    return schema


def doubling(keyword: str, depth: int) -> Schema:
    """Twice as much at every level."""
    two = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
           for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**two, f"d{depth}": {"type": "string", "pattern": "a*b"}}}


# What has ended or held up a server, and its relatives: of a size from 1 up.
HOSTILE: dict[str, Callable[[random.Random, int], Schema]] = {
    "multiple": lambda rng, n: {"type": "integer", "multipleOf": rng.choice((9999991, 10**n + 7, 2**31 - n))},
    "multiple of a fraction": lambda rng, n: {"type": "number",
                                              "multipleOf": rng.choice((1e-9, 0.7, 3.7 * n))},
    "primes": lambda rng, n: {"allOf": [{"type": "integer", "multipleOf": p} for p in _PRIMES[:1 + n % 20]]},
    "primes over fractions": lambda rng, n: {"allOf": [{"multipleOf": p / 8} for p in _PRIMES[:1 + n % 12]]},
    "plain chain": lambda rng, n: chain("", 60 * n), "chain of lists": lambda rng, n: chain("items", 30 * n),
    "chain of objects": lambda rng, n: chain("properties", 30 * n),
    "circle": lambda rng, n: {"$ref": "#/$defs/a", "$defs": {"a": {rng.choice(("allOf", "anyOf", "oneOf")): [
        {"$ref": "#/$defs/a"}] * n}}},
    "nested": lambda rng, n: nested(rng.choice(("items", "anyOf", "allOf", "properties", "not",
                                                "additionalProperties")), 10 * n),
    "doubling": lambda rng, n: doubling(rng.choice(("allOf", "anyOf", "prefixItems")), n),
    "patterns": lambda rng, n: {"allOf": [{"properties": {"p": {"type": "string", "pattern": f"x{i}*"}}}
                                          for i in range(n)]},
    "intersection": lambda rng, n: {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i % 26)}.{{{i}}}"}
                                              for i in range(n)]},
    "look back": lambda rng, n: {"type": "string", "pattern": f"^.*a.{{{10 * n}}}$"},
    "alternatives": lambda rng, n: {"type": "string", "pattern": "^(" + "|".join(
        f".*{chr(97 + i % 26)}.{{{i % 40}}}{chr(122 - i % 26)}" for i in range(n)) + ")$"},
    "repetitions": lambda rng, n: {"type": "string", "pattern": "^" + "(" * n + "a" + "{1,50})" * n + "$"},
    "a long repetition": lambda rng, n: {"type": "string", "pattern": f"^(ab){{{3 ** n}}}$"},
    "classes": lambda rng, n: {"type": "string", "pattern": rf"^(\p{{L}}|\w|\S){{{n},{100 * n}}}$"},
    "pattern properties": lambda rng, n: {"type": "object", "patternProperties": {
        f"^{chr(97 + i % 26)}.*{i}$": {"type": "integer"} for i in range(n)}},
    "a long text": lambda rng, n: {"const": "x" * (2000 * n)},
    "a long text within": lambda rng, n: {"type": "object", "properties": {"k": {"const": "y" * (2000 * n)}},
                                          "required": ["k"]},
    "values": lambda rng, n: {"enum": [f"value {rng.random()}" for _ in range(200 * n)]},
    "numbers": lambda rng, n: {"enum": list(range(300 * n))},
    "a list of values": lambda rng, n: {"const": list(range(1000 * n))},
    "properties": lambda rng, n: {"type": "object", "properties": {f"p{i}": {"type": "integer"}
                                                                    for i in range(100 * n)}},
    "required properties": lambda rng, n: {
        "type": "object", "properties": {f"p{i}": {} for i in range(100 * n)},
        "required": [f"p{i}" for i in range(100 * n)]},
    "objects": lambda rng, n: {"anyOf": [{"type": "object", "properties": {"a": {"const": i}},
                                          "required": ["a"]} for i in range(60 * n)]},
    "lengths": lambda rng, n: {"type": "string", "minLength": 10**n, "maxLength": 10**n + n},
    "items": lambda rng, n: {"type": "array", "minItems": 10**n, "items": {"enum": [1, "a"]}},
    "range": lambda rng, n: {"type": "integer", "minimum": -(10**n) + 1, "maximum": 3 * 10**n},
    "range of fractions": lambda rng, n: {"type": "number", "minimum": -(10.0 ** (8 * n % 300)),
                                          "maximum": 1e-300},
    "guidance": lambda rng, n: {"x-guidance": {"whitespace_pattern": f"(a|aa){{1,{10**n}}}"}, "items": {
        "x-guidance": {"whitespace_flexible": False}}, "type": "array"},
    "no schema": lambda rng, n: {"type": ["nonsense"] * n, "items": n, "$ref": "#" + "/a" * n},
    "formats": lambda rng, n: {"allOf": [{"type": "string", "format": rng.choice(_FORMATS)}
                                         for _ in range(n)]},
}


def hostile_schemas(count: int, seed: int = 34) -> Iterator[tuple[str, Schema]]:
    """Every family in turn, with ever larger members."""
    rng = random.Random(seed)
    for i in range(count):
        name = list(HOSTILE)[i % len(HOSTILE)]
        yield name, HOSTILE[name](rng, 1 + i // len(HOSTILE))


_FOR, _END = "{% for i in range(99999) %}{% for j in range(99999) %}", "{% endfor %}{% endfor %}"
TEMPLATES: list[str] = [
    "{{ 1 / 0 }}", "{{ 10.0 ** 1000 }}", "{{ 9 ** 9 ** 9 }}", "{{ 'x' * 10 ** 10 }}",
    "{{ messages * 10 ** 9 }}", _FOR + _END, f"{_FOR}x{_END}", f"{_FOR}{{{{ messages }}}}{_END}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = 2 * ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='x') %}{% for i in range(30) %}{% set ns.s = ns.s * 9 %}{% endfor %}{{ ns.s }}",
    "{{ range(10 ** 9) | list }}", "{{ '%1000000000d' % 1 }}", "{{ '{:>999999999}'.format(1) }}",
    "{{ 'a' | center(10 ** 10) }}", "{{ 'a\nb' | indent(10 ** 9) }}",
    "{{ [1] | batch(10 ** 9, 'x') | list }}", "{{ [1] | slice(10 ** 9) | list }}",
    "{{ messages | tojson(indent=10 ** 9) }}", "{{ lipsum(n=10 ** 7) }}",
    "{{ lipsum(n=1, min=10 ** 8, max=10 ** 8 + 1) }}", "{{ strftime_now('%Y' * 10 ** 7) }}",
    "{{ strftime_now('%1000000000d') }}", "{{ strftime_now(1) }}", "{{ messages.__class__.__mro__ }}",
    "{{ messages[99].content }}", "{{ messages['a'].b.c }}", "{{ nothing.at.all }}", "{{ nothing() }}",
    "{{ ", "{% if %}", "{% include 'other' %}", "{% import 'os' as os %}", "{% extends messages %}",
    "{% break %}", "{{ raise_exception('no\nsuch chat') }}", "{{ raise_exception() }}",
    "{{ raise_exception(messages * 9999) }}", "{{ raise_exception('x' * 10 ** 6) }}", "{{ '\\ud800' }}",
    "{{ '\\x00' }}", "", " ", "{{ none }}", "{{ messages | sort }}", "{{ messages | sum }}",
    "{{ messages | random | nonsense }}", "{{ 'a' is nonsense }}", "{{ int('9' * 10 ** 5) }}",
    "{{ ('9' * 10 ** 4) | int }}", "{{ '1' | int(base=99) }}", "{{ [] | first }}",
    "{{ 'x'.encode('utf-99') }}", "{{ 'a'.join(1) }}", "{{ messages.append(1) }}", "{{ cycler() }}",
    "{{ dict(messages) }}", "{{ 1 << 10 ** 9 }}", "{{ 2 ** 10 ** 7 }}", "{{ [messages] * 3 | tojson }}",
    "{% generation %}{% endgeneration %}", "{% generation %}", "{{ self }}", "{{ self.block() }}",
    "{% block a %}{{ self.a() }}{% endblock %}", "{% call m() %}{% endcall %}", "{% set messages.a = 1 %}",
    "{{ '(' * 2 ** 27 }}", "{{ 'a' | wordwrap(0) }}", "{{ 'a ' * 10 ** 6 | wordwrap(1) }}",
    "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}", "{{ ('a' * 9999).replace('', 'b' * 99999) }}",
    "{{ 'a'.ljust(10 ** 10) }}", "{{ 'a'.zfill(10 ** 10) }}", "{{ 'a\t'.expandtabs(10 ** 10) }}",
    "{{ ('a' * 10 ** 7).split('') }}", "{{ [1] * 10 ** 10 }}", "{{ (1,) * 10 ** 9 }}", "{{ 'a' in 5 }}",
    "{{ messages | map(attribute='a.b.c') | list }}",
    "{{ messages | groupby('role') | map('first') | tojson }}", "{{ messages | xmlattr }}",
    "{{ {'a b': 1} | xmlattr }}", "{{ '<' * 10 ** 6 | urlize }}",
]
_GROWING: list[Callable[[int], str]] = [
    lambda n: "{% if true %}" * n + "{% endif %}" * n,
    lambda n: "{% for a in messages %}" * n + "{% endfor %}" * n,
    lambda n: "{{ " + "(" * n + "1" + ")" * n + " }}", lambda n: "{{ " + "[" * n + "]" * n + " }}",
    lambda n: "{{ " + "not " * n + "1 }}", lambda n: "{{ 1" + " + 1" * n + " }}",
    lambda n: "{{ a" + ".b" * n + " }}", lambda n: "{{ 'a'" + " ~ 'a'" * n + " }}",
    lambda n: "{{ messages" + " | list" * n + " }}",
    lambda n: "{% macro m(d) %}{% if d %}{{ m(d - 1) }}{% endif %}{% endmacro %}{{ m(" + str(n) + ") }}",
    lambda n: "{{ " + "-" * n + "1 }}", lambda n: "{{ 1 " + "if 1 else 1 " * n + "}}",
    lambda n: "{{ 'x' * " + str(10 ** (n % 12)) + " * " + str(n) + " }}",
    lambda n: "{% for i in range(" + str(20 * n) + ") %}{% for j in range(" + str(20 * n) + ") %}"
              "{{ messages }}{% endfor %}{% endfor %}",
]


def hostile_templates(count: int) -> Iterator[str]:
    """Those above, then ever longer ones."""
    yield from TEMPLATES[:count]
    for i in range(count - len(TEMPLATES)):
        yield _GROWING[i % len(_GROWING)](4 * (1 + i // len(_GROWING)) ** 2)

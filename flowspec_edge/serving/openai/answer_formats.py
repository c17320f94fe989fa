"""What an answer must match: the many fields that ask for a grammar, as one rule."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flowspec_edge.model.grammar import json_value, matching, one_of
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.schemas import Body

_ANY_OBJECT = {"type": "object"}
_MAX_CHOICES = 4096


@dataclass(frozen=True)
class AnswerFormat:
    """The format that a client asks for.

    field    who asks for it
    rule     in llguidance's Lark syntax, or a whole grammar
    written  it is a whole grammar, which the client wrote
    """

    field: str
    rule: str
    written: bool = False


def select_answer_format(body: Body) -> AnswerFormat | None:
    """Return the format that an answer must have; None: any text.

    ApiError if several fields ask for a format, or if one is wrong.
    """
    formats = [format for format in (_response_format(body), *_structured(body)) if format is not None]
    for field, value in (("guided_json", body.guided_json), ("json_schema", body.json_schema)):
        if value is not None:
            formats.append(_json(field, value))
    for field, text in (("guided_regex", body.guided_regex), ("regex", body.regex)):
        if text is not None:
            formats.append(_regex(field, text))
    if body.guided_choice is not None:
        formats.append(_choice("guided_choice", body.guided_choice))
    written = {"guided_grammar": body.guided_grammar, "ebnf": body.ebnf,
               "grammar": body.grammar or None}  # llama.cpp's clients send an empty one for none
    for field, text in written.items():
        if text is not None:
            formats.append(_grammar(field, text))
    if len(formats) > 1:
        first, second = formats[0].field, formats[1].field
        raise ApiError(400, f"{second}: {first} says already what the answer must match: leave one out",
                       second)
    return formats[0] if formats else None


def _response_format(body: Body) -> AnswerFormat | None:
    """Read ``response_format``.

    A schema without ``strict`` is enforced as far as it can be, as OpenAI does; where there is no place for
    ``strict``, all of it is enforced.
    """
    response_format = body.answer_format
    if response_format is None or response_format.type == "text":
        return None
    schema = response_format.schema_settings
    if schema.content is None:
        return AnswerFormat(body.format_name, json_value(_ANY_OBJECT))
    strict = bool(schema.strict) if response_format.type == "json_schema" else schema.strict is not False
    return AnswerFormat(body.format_name, json_value(schema.content or _ANY_OBJECT, strict))


def _structured(body: Body) -> list[AnswerFormat]:
    outputs = body.structured_outputs
    if outputs is None:
        return []
    name, formats = "structured_outputs", list[AnswerFormat]()
    if outputs.content is not None:
        formats.append(_json(f"{name}.json", outputs.content))
    if outputs.regex is not None:
        formats.append(_regex(f"{name}.regex", outputs.regex))
    if outputs.choice is not None:
        formats.append(_choice(f"{name}.choice", outputs.choice))
    if outputs.grammar is not None:
        formats.append(_grammar(f"{name}.grammar", outputs.grammar))
    if outputs.json_object:
        formats.append(AnswerFormat(f"{name}.json_object", json_value(_ANY_OBJECT)))
    if not formats:
        raise ApiError(400, f"{name}: give one of json, regex, choice, grammar, json_object", name)
    return formats


def _json(field: str, value: dict[str, Any] | str) -> AnswerFormat:
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{field}: the text is not valid JSON: {error}", field) from error
        if not isinstance(schema, dict):
            raise ApiError(400, f"{field}: must be a JSON schema that is an object", field)
        return AnswerFormat(field, json_value(schema))
    return AnswerFormat(field, json_value(value))


def _regex(field: str, text: str) -> AnswerFormat:
    if not text:
        raise ApiError(400, f"{field}: the regular expression is empty", field)
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ApiError(400, f"{field}: the regular expression ends with a backslash, which must precede a "
                            "character", field)
    return AnswerFormat(field, matching(text))


def _choice(field: str, choices: list[str]) -> AnswerFormat:
    if not choices or not all(choices) or len(choices) > _MAX_CHOICES:
        raise ApiError(400, f"{field}: must be a list of 1 to {_MAX_CHOICES} texts that are not empty", field)
    return AnswerFormat(field, one_of(choices))


def _grammar(field: str, text: str) -> AnswerFormat:
    if not text.strip():
        raise ApiError(400, f"{field}: the grammar is empty", field)
    return AnswerFormat(field, text, written=True)

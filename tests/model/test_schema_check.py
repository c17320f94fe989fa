"""A client's JSON schema cannot use up the server: what takes too long to compile is refused."""

from __future__ import annotations

from typing import Any

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.model import schema_check
from flowspec_edge.model.grammar import json_value

# Without the check this does not end within 100 s.
ENDLESS = {"allOf": [{"properties": {"p": {"type": "string", "pattern": f"x{i}*"}}} for i in range(30)]}


def test_patterns_whose_intersection_takes_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_check, "_COMPILE", schema_check._COMPILE.replace("(3, 3)", "(1, 1)"))
    with pytest.raises(UsageError, match="the schema's patterns are too complex together"):
        json_value(ENDLESS)


@pytest.mark.parametrize("schema", [
    {"type": "string", "format": "date-time"},
    {"type": "string", "pattern": "^[a-z]{2,40}$", "maxLength": 30},
    {"type": "colour", "pattern": "a"},  # the error comes where it is compiled for the tokenizer
])
def test_others_are_not(schema: dict[str, Any]) -> None:
    assert json_value(schema).startswith("%json ")

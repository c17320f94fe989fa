"""``flowspec generate --json-schema``: answers that a schema accepts, the same with every strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.error_lines import error_line

from flowspec_edge.cli.main import main

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]},
                   "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False}


def generate(*arguments: str) -> int:
    return main(["generate", "weather = ", "--clock", "virtual", "--stages", "2", *arguments])


def test_an_answer_obeys_its_schema_with_every_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                        ) -> None:
    file = tmp_path / "weather.json"
    file.write_text(json.dumps(SCHEMA))
    texts = []
    for strategy in ("flowspec_plus", "autoregressive"):
        assert generate("--json-schema", str(file), "--temperature", "1", "--strategy", strategy) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    answer = json.loads(texts[0])
    assert answer.keys() == {"city", "days"}
    assert answer["city"] in ("Rome", "Oslo")
    assert answer["days"] in range(1, 10)


def test_any_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--json-object", "--max-new-tokens", "2") == 0
    assert capsys.readouterr().out.lstrip().startswith("{")


@pytest.mark.parametrize(("schema", "options", "says"), [
    ('{"type": "objekt"}', (), "schema.json: schema.type: Invalid type: objekt\n"),
    ('{"uniqueItems": true}', (), 'schema.json: schema.uniqueItems: Unimplemented keys: ["uniqueItems"]\n'),
    ("[1]", (), "schema.json must hold a JSON object"),
    ("{", (), "schema.json is not valid JSON"),
    ("{}", ("--json-object",), "--json-object and --json-schema exclude each other"),
])
def test_a_schema_that_cannot_be_enforced(tmp_path: Path, schema: str, options: tuple[str, ...], says: str,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text(schema)
    assert says in error_line(capsys, generate("--json-schema", str(file), *options))

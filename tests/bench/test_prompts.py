"""Prompt files: both forms, the demo's own, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.bench.prompts import load_prompts
from flowspec_edge.errors import UsageError
from flowspec_edge.resources import resource_dir


def test_prompt_or_first_turn(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question_id": 81, "category": "writing", "turns": ["one", "two"]}\n\n'
                    '{"prompt": "three\\n"}\n{"prompt": "four"}\n')
    first, second = load_prompts(path, limit=2)
    assert (first.id, first.category, first.text) == ("81", "writing", "one")
    assert (second.id, second.text) == ("3", "three\n")
    assert len(load_prompts(path)) == 3


def test_the_demos_prompts() -> None:
    prompts = load_prompts(resource_dir("models") / "demo" / "prompts.jsonl")
    assert len(prompts) == len({p.text for p in prompts}) == len({p.id for p in prompts}) == 64
    assert len({p.category for p in prompts}) >= 10
    assert all(100 < len(p.text) < 400 for p in prompts)


@pytest.mark.parametrize(("line", "says"), [
    ("{", "p.jsonl:2: not valid JSON"),
    ("[1]", "p.jsonl:2: a JSON object is wanted"),
    ('{"turns": []}', "p.jsonl:2: neither a prompt nor turns"),
    ('{"prompt": 3}', "p.jsonl:2: neither a prompt nor turns"),
    ('{"prompt": ""}', "p.jsonl:2: neither a prompt nor turns"),
])
def test_errors_name_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UsageError, match=says):
        load_prompts(path)
    assert len(load_prompts(path, limit=1)) == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="has no prompts"):
        load_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(UsageError, match="is not UTF-8 text: byte 12"):
        load_prompts(tmp_path / "latin.jsonl")

"""Prompt files: one JSON object a line, with ``prompt`` or ``turns``.

Knows the file format; does not know tokenizers or chat templates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec_edge.errors import UsageError


@dataclass(frozen=True)
class Prompt:
    """One text to continue, and where it came from."""

    id: str
    category: str
    text: str


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of a JSONL file; of several turns, the first.

    Raises :class:`UsageError` that names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and (limit is None or len(prompts) < limit):
            prompts.append(_parse(line, f"{path}:{number}", str(number)))
    if not prompts:
        raise UsageError(f"{path} has no prompts")
    return prompts


def _parse(line: str, where: str, default_id: str) -> Prompt:
    try:
        data: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{where}: a JSON object is wanted")
    text = data.get("prompt")
    turns = data.get("turns")
    if text is None and isinstance(turns, list) and turns:
        text = turns[0]
    if not isinstance(text, str) or not text:
        raise UsageError(f"{where}: neither a prompt nor turns (a text, or a list that starts with one)")
    return Prompt(str(data.get("question_id", default_id)), str(data.get("category", "")), text)

"""Prompt files (JSON lines with ``prompt`` or ``turns``), and tasks: a file, or a category in the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec_edge.errors import UsageError
from flowspec_edge.util.bounded_read import parse_json, read_text

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem",
                      "humanities"})
_SPEC_BENCH = MT_BENCH | {"translation", "summarization", "qa", "math_reasoning", "rag"}


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    text: str


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Return the first ``limit`` prompts (of several turns, the first); UsageError with file and line."""
    prompts: list[Prompt] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip() and (limit is None or len(prompts) < limit):
            prompts.append(_parse(line, f"{path}:{number}", str(number)))
    if not prompts:
        raise UsageError(f"{path} has no prompts")
    return prompts


def _parse(line: str, source: str, default_id: str) -> Prompt:
    data = parse_json(line, source)
    if not isinstance(data, dict):
        raise UsageError(f"{source}: not a JSON object")
    text = data.get("prompt")
    turns = data.get("turns")
    if text is None and isinstance(turns, list) and turns:
        text = turns[0]
    if not isinstance(text, str) or not text:
        raise UsageError(f"{source}: neither a prompt nor turns (a text, or a list that starts with one)")
    return Prompt(str(data.get("question_id", default_id)), str(data.get("category", "")), text)


@dataclass(frozen=True)
class Task:
    name: str
    prompts: tuple[Prompt, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the prompts' texts, in order."""
        texts = json.dumps([prompt.text for prompt in self.prompts])
        return hashlib.sha256(texts.encode()).hexdigest()

    @property
    def digests(self) -> list[str]:
        """The digest of each prompt's text, in order, by which the prompts of two files are paired."""
        return [hashlib.sha256(prompt.text.encode()).hexdigest()[:12] for prompt in self.prompts]


def task_name(path: Path) -> str:
    """Return a file's stem; for a ``question.jsonl`` its directory's name, as in EAGLE's repository."""
    return (path.resolve().parent.name if path.name == "question.jsonl" else path.stem) or path.stem


def load_tasks(paths: Sequence[Path], by_category: bool = False, limit: int | None = None) -> list[Task]:
    """Return the first ``limit`` prompts of each file or category.

    In a file with two or more of Spec-Bench's categories, the eight of MT-bench become one task ``mt_bench``,
    as in Spec-Bench.  UsageError for an unreadable file, two files with one name, and prompts without a
    category.
    """
    if by_category:
        return _by_category(paths, limit)
    tasks: dict[str, Path] = {}
    for path in paths:
        name = task_name(path)
        if name in tasks:
            raise UsageError(f"{tasks[name]} and {path} would both be the task {name!r}; rename one of them")
        tasks[name] = path
    return [Task(name, tuple(load_prompts(path, limit))) for name, path in tasks.items()]


def _by_category(paths: Sequence[Path], limit: int | None) -> list[Task]:
    grouped: dict[str, list[Prompt]] = {}
    for path in paths:
        prompts = load_prompts(path)
        bare = next((prompt for prompt in prompts if not prompt.category), None)
        if bare is not None:
            raise UsageError(f"{path}: prompt {bare.id} has no category; omit --by-category")
        is_spec_bench = len(_SPEC_BENCH & {prompt.category for prompt in prompts}) > 1
        for prompt in prompts:
            merged = is_spec_bench and prompt.category in MT_BENCH
            grouped.setdefault("mt_bench" if merged else prompt.category, []).append(prompt)
    return [Task(name, tuple(prompts[:limit])) for name, prompts in grouped.items()]

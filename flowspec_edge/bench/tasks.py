"""Tasks: prompts that are measured, and reported, together.

Knows how prompt files become tasks: each file is one, or each category in them.  Does not know
what a prompt's text is made into.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec_edge.bench.prompts import Prompt, load_prompts
from flowspec_edge.errors import UsageError

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem",
                      "humanities"})
_SPEC_BENCH = MT_BENCH | {"translation", "summarization", "qa", "math_reasoning", "rag"}


@dataclass(frozen=True)
class Task:
    """Some prompts and what they are called."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the prompts' texts, in order."""
        texts = json.dumps([prompt.text for prompt in self.prompts])
        return hashlib.sha256(texts.encode()).hexdigest()


def task_name(path: Path) -> str:
    """A file's stem; a ``question.jsonl`` is called after its directory, as EAGLE lays them out."""
    return (path.resolve().parent.name if path.name == "question.jsonl" else path.stem) or path.stem


def load_tasks(paths: Sequence[Path], by_category: bool = False, limit: int | None = None) -> list[Task]:
    """A task for each file, or for each category; the first ``limit`` prompts of each.

    A file with two or more of Spec-Bench's categories is read as Spec-Bench reads it: the eight of
    MT-bench are the one task ``mt_bench``.  A single "math" stays what it is.

    Raises :class:`UsageError` for a file that cannot be read, two files of one name, and prompts
    without a category.
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
            raise UsageError(f"{path}: prompt {bare.id} has no category; leave --by-category out")
        is_spec_bench = len(_SPEC_BENCH & {prompt.category for prompt in prompts}) > 1
        for prompt in prompts:
            merged = is_spec_bench and prompt.category in MT_BENCH
            grouped.setdefault("mt_bench" if merged else prompt.category, []).append(prompt)
    return [Task(name, tuple(prompts[:limit])) for name, prompts in grouped.items()]

"""Commands of a Markdown document that a test runs, and their expected output.

A comment above a block of commands says where they run, ``<!-- run on WHERE -->``; a text block after it is
the expected output, in which ``…`` matches anything within a line, and as a line of its own any lines.  A
comment ``<!-- do ACTION -->`` is a manual step.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"
_STEP = re.compile(r"<!-- (?P<kind>run on|do) (?P<what>[^>]+) -->\n"
                   r"(?:```sh\n(?P<script>.*?)```\n(?:\n?```text\n(?P<output>.*?)```\n)?)?", re.DOTALL)
_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Step:
    """Commands, or a manual step (``script`` is "").

    output  expected output; None if the document has none
    span    of the output in the document's text
    """

    what: str
    script: str
    output: str | None
    span: tuple[int, int]


def builder(name: str) -> ModuleType:
    """docs/NAME.py, which no package holds."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps(text: str) -> list[Step]:
    found = []
    for match in _STEP.finditer(text):
        assert bool(match["script"]) == (match["kind"] == "run on"), f"no commands follow {match[0][:60]!r}"
        found.append(Step(match["what"], match["script"] or "", match["output"], match.span("output")))
    return found


def difference(expected: str, printed: str) -> str:
    """The first line of ``expected`` that ``printed`` lacks; "" if they match."""
    lines = expected.splitlines()
    for count in range(1, len(lines) + 1):
        if not re.match(_pattern(lines[:count]), printed):
            return lines[count - 1]
    return "" if re.fullmatch(_pattern(lines), printed) else "the end"


def renewed(text: str, outputs: Sequence[str | None]) -> str:
    """The document with its outputs replaced; ``outputs`` has one for each step."""
    for step, output in reversed([*zip(steps(text), outputs, strict=True)]):
        if step.output is not None and output is not None:
            text = text[:step.span[0]] + output + text[step.span[1]:]
    return text


def masked(printed: str, changes: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]) -> str:
    """``printed`` after (pattern, replacement) substitutions for everything that differs between runs."""
    for pattern, replacement in changes:
        printed = re.sub(pattern, replacement, printed)
    return "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())


def _pattern(lines: Sequence[str]) -> str:
    return "".join(r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
                   for line in lines)


def commands(text: str) -> list[str]:
    """All lines of the document's blocks of commands, without comments; a continued line is one."""
    lines = "".join(_BLOCK.findall(text)).replace("\\\n", "").splitlines()
    bare = (re.sub(r"\s+#\s.*|^#.*", "", line).strip() for line in lines)
    return [line for line in bare if line]

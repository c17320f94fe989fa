"""Renews docs/reference/fields.md from the tables of fields of :mod:`flowspec_edge.serving`.  Of a refused field it has
the name alone: the server's error says what to use instead.

    python docs/build_fields.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from flowspec_edge.serving.anthropic.fields import TABLE as ANTHROPIC
from flowspec_edge.serving.ollama.fields import OPTIONS
from flowspec_edge.serving.ollama.fields import TABLE as OLLAMA
from flowspec_edge.serving.openai.fields import TABLE as OPENAI

DOCUMENT = Path(__file__).parent / "reference" / "fields.md"
_HEAD = """# All fields of requests

Made by `python docs/build_fields.py`. [http.md](http.md#fields) has the rules. "(chat)" means: other endpoints refuse
the field, or take it without effect where the answer is the same. The error of a refused field says what to use
instead.
"""
_SECTIONS = {
    "OpenAI's API": ("With the names of vLLM, SGLang, llama.cpp's server and other servers.", OPENAI),
    "Ollama's API": ("", OLLAMA), "Ollama's `options`": ("", OPTIONS), "Anthropic's API": ("", ANTHROPIC)}


def document() -> str:
    """The whole document."""
    parts = [_HEAD]
    for title, (about, table) in _SECTIONS.items():
        parts += [f"## {title}\n" + (f"{about}\n" if about else ""), "\n".join(names_alone(table.rows()))]
    return "\n".join(parts)


def names_alone(rows: Iterable[str]) -> Iterator[str]:
    """The rows, of refused fields a single one with their names."""
    refused: list[str] | None = None
    for row in rows:
        if refused is None or not row.startswith("- "):
            if refused and not row:
                yield f"{', '.join(sorted(refused))}."
            yield row
            if row.endswith(":"):
                refused = [] if row == "Refused:" else None
        else:
            refused += row[2:].partition(": ")[0].split(", ")


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(DOCUMENT.read_text(encoding="utf-8") != document())
    DOCUMENT.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

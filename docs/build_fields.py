"""Renews docs/reference/fields.md from the tables of fields of :mod:`flowspec_edge.serving`.

Of a refused field it has the name alone: the server's error says what to use instead.  What is said of a field of
OpenAI's is not said again.

    python docs/build_fields.py [--check]
"""

from __future__ import annotations

import re
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
# The names at other endpoints, which errors there say.
_ELSEWHERE = re.compile(
    r"[;,.] (?:the others|chats|completions|responses) (?:take|have)\b(?:[^;.]|\.(?=\w))*", re.IGNORECASE)
Row = tuple[list[str], str]  # names, and what is said of them


def document() -> str:
    """Return the whole document."""
    parts = [_HEAD]
    said: dict[str, str] = {}  # of OpenAI's fields, by name
    for title, (about, table) in _SECTIONS.items():
        parts += [f"## {title}\n" + (f"{about}\n" if about else "")]
        for verdict, rows in lists(table.rows()):
            parts += [f"{verdict}:\n", *shown(verdict, rows, said), ""]
            if verdict == "Implemented" and table is OPENAI:
                said = {name: text for names, text in rows for name in names}
    return "\n".join(parts).rstrip("\n") + "\n"


def lists(lines: Iterable[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the verdicts of a table, each with its rows."""
    found: list[tuple[str, list[Row]]] = []
    for line in lines:
        if line.endswith(":"):
            found.append((line[:-1], []))
        elif line:
            names, _, text = line.removeprefix("- ").partition(": ")
            found[-1][1].append((names.split(", "), _ELSEWHERE.sub("", text)))
    yield from found


def shown(verdict: str, rows: Iterable[Row], said: dict[str, str]) -> Iterator[str]:
    """Yield a verdict's rows; names of which nothing more is to be said share a line."""
    if verdict == "Refused":
        yield f"{', '.join(sorted(name for names, _ in rows for name in names))}."
        return
    alone: dict[str, list[str]] = {}  # by what is said of them together
    for names, text in rows:
        if verdict == "Implemented" and all(plain(said.get(name, "")) == plain(text) for name in names):
            alone.setdefault("as in OpenAI's API", []).extend(names)
        elif text.startswith("goes with "):
            alone.setdefault("of use with a refused field only", []).extend(names)
        else:
            yield f"- {', '.join(names)}: {text}"
    for text, names in alone.items():
        yield f"- {', '.join(names)}: {text}"


def plain(text: str) -> str:
    """``text`` without the endpoints in brackets that it begins with."""
    return re.sub(r"^\([^)]*\) ", "", text)


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(DOCUMENT.read_text(encoding="utf-8") != document())
    DOCUMENT.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Renews the timelines in a Markdown file, so that a document shows what the code does.

    python -m flowspec_edge.bench.document docs/strategies.md

A line ``<!-- timeline NAME [option value …] -->`` stands above each; the block that follows it is
what ``flowspec bench timeline --strategy NAME [--option value …]`` prints.  Knows the marks and
the blocks, not what a timeline is.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_MARK = re.compile(r"<!-- timeline (?P<what>[^>]*?) -->\n(?:```text\n.*?```\n)?", re.DOTALL)

Draw = Callable[[list[str]], str]  # the arguments of ``bench timeline`` -> what it prints


def arguments(what: str) -> list[str]:
    """The words of a mark as arguments of ``flowspec bench timeline``."""
    name, *options = what.split()
    flags = [f"--{word}" if i % 2 == 0 else word for i, word in enumerate(options)]
    return ["--strategy", name, *flags]


def renewed(text: str, draw: Draw) -> str:
    """``text`` with every timeline drawn anew."""

    def block(match: re.Match[str]) -> str:
        what = match["what"]
        return f"<!-- timeline {what} -->\n```text\n{draw(arguments(what)).rstrip()}\n```\n"

    return _MARK.sub(block, text)


def _run(given: list[str]) -> str:
    command = [sys.executable, "-m", "flowspec_edge.cli.main", "bench", "timeline", *given]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Renew the files named on the command line, in place."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(renewed(path.read_text(encoding="utf-8"), _run), encoding="utf-8")


if __name__ == "__main__":
    main()

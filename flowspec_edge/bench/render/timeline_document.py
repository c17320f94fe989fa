"""Updates the timelines in Markdown files from real runs.

    python -m flowspec_edge.bench.render.timeline_document docs/strategies.md

Each line ``<!-- timeline NAME [option value …] -->`` is followed by a block with the output of
``flowspec bench timeline --strategy NAME [--option value …]``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_MARK = re.compile(r"<!-- timeline (?P<what>[^>]*?) -->\n(?:```text\n.*?```\n)?", re.DOTALL)

_RUN_S = 600.0  # a run takes seconds

Draw = Callable[[list[str]], str]  # from the arguments of ``bench timeline`` to its output


def arguments(what: str) -> list[str]:
    """The arguments of ``flowspec bench timeline`` for a mark's words."""
    name, *options = what.split()
    flags = [f"--{word}" if i % 2 == 0 else word for i, word in enumerate(options)]
    return ["--strategy", name, *flags]


def update_timelines(text: str, draw: Draw) -> str:
    def block(match: re.Match[str]) -> str:
        what = match["what"]
        return f"<!-- timeline {what} -->\n```text\n{draw(arguments(what)).rstrip()}\n```\n"

    return _MARK.sub(block, text)


def _run(given: list[str]) -> str:
    command = [sys.executable, "-m", "flowspec_edge.cli.main", "bench", "timeline", *given]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_RUN_S).stdout


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(update_timelines(path.read_text(encoding="utf-8"), _run), encoding="utf-8")


if __name__ == "__main__":
    main()

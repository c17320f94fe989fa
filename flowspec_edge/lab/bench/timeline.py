"""A text timeline of the devices' work: a line a device, a column a fraction of a turn.

    python -m flowspec_edge.lab.bench.timeline docs/explained/method.md

updates the timelines in Markdown files from real runs.  Each line
``<!-- timeline NAME [option value …] -->`` is followed by a block with the output of
``flowspec bench timeline --strategy NAME [--option value …]``.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec_edge.drivers.virtual.clock import Span
from flowspec_edge.errors import UsageError
from flowspec_edge.util.interpreter import module_command

WIDTH = 100  # characters of the longest line
_LABEL = 10
_FINEST = 8  # columns a turn
_COARSEST = 2
_EPSILON = 1e-9


@dataclass(frozen=True)
class Window:
    """The drawn part of a request, in seconds of virtual time.

    ``start`` is ``skipped`` turns of ``slot`` seconds after the first token, ``end`` at most ``turns`` turns
    later.
    """

    start: float
    end: float
    slot: float
    skipped: float

    @property
    def turns(self) -> float:
        return (self.end - self.start) / self.slot


def window(first_token: float, end: float, slot: float, turns: int, skip: int = 0) -> Window:
    """Return a window of ``turns`` turns, or up to the text's ``end``, from ``skip`` turns after the first token."""
    start = first_token + skip * slot
    if start >= end - _EPSILON:
        raise UsageError(f"the text ends {(end - first_token) / slot:.1f} turns after its first token; "
                         f"lower --skip-turns below that, or raise --max-new-tokens")
    return Window(start, min(end, start + turns * slot), slot, skip)


def draw(spans: Sequence[Span], stages: int, view: Window, turns: int) -> str:
    """Axis, a line a device, legend; UsageError if ``turns`` do not fit into a line.

    A block starts with the last digits of its run and continues with ``=``, or with ``x`` if it was
    cancelled.  A column shows the work that takes most of its time; D0's short work always shows.
    """
    fine = min(_FINEST, (WIDTH - _LABEL) // turns)
    if fine < _COARSEST:
        raise UsageError(f"{turns} turns do not fit into a line of {WIDTH} characters; "
                         f"--turns may be at most {(WIDTH - _LABEL) // _COARSEST}")
    step = view.slot / fine
    columns = math.ceil((view.end - view.start) / step - _EPSILON)
    rows = [("D0 draft", [s for s in spans if s.kind == "draft"]),
            ("D0 verify", [s for s in spans if s.kind == "verify"])]
    rows += [(f"V{i}", [s for s in spans if s.device == i and s.kind == "compute"])
             for i in range(1, stages + 1)]
    lines = [f"{'turn':<{_LABEL}}{_axis(columns, fine, view.skipped)}".rstrip()]
    for name, device_spans in rows:
        cells = _cells(device_spans, view.start, step, columns)
        lines.append(f"{name:<{_LABEL}}{_line(cells)}")
    lines.append(f"a column: 1/{fine} turn = {step * 1e3:.3g} ms; 12==: run 12; xx: cancelled; d: drafts; "
                 "v: lm_head, walk; .: idle")
    return "\n".join(lines) + "\n"


def _axis(columns: int, fine: int, first: float) -> str:
    """Turn numbers over the first column of a turn, as many as fit."""
    step = next(n for n in (1, 2, 5, 10, 20, 50) if n * fine > 3)
    marks = [f"{first + turn:g}".ljust(step * fine) if turn % step == 0 else ""
             for turn in range(-(-columns // fine))]
    return "".join(marks)


def _cells(spans: Sequence[Span], start: float, step: float, columns: int) -> list[Span | None]:
    cells: list[Span | None] = []
    for column in range(columns):
        column_start = start + column * step
        shares = [(share, s) for s in spans
                  if (share := min(s.end, column_start + step) - max(s.start, column_start)) > _EPSILON]
        most, busiest = max(shares, key=lambda share: share[0], default=(0.0, None))
        idle = step - sum(share for share, _ in shares)
        shows = busiest is not None and (busiest.device == 0 or idle <= most)
        cells.append(busiest if shows else None)
    return cells


def _line(cells: Sequence[Span | None]) -> str:
    text, at = "", 0
    while at < len(cells):
        span, stop = cells[at], at
        while stop < len(cells) and cells[stop] is span:
            stop += 1
        text += _block(span, stop - at)
        at = stop
    return text


def _block(span: Span | None, width: int) -> str:
    if span is None:
        return "." * width
    if span.device == 0:
        return span.kind[0] * width
    if span.cancelled:
        return str(span.run)[-3:][-(width - 1):].ljust(width, "x") if width > 1 else "x"
    return str(span.run)[-min(3, width):].ljust(width, "=")


# ---- in documents ----------------------------------------------------------------------------------------

_MARK = re.compile(r"<!-- timeline (?P<what>[^>]*?) -->\n(?:```text\n.*?```\n)?", re.DOTALL)

_RUN_S = 600.0  # a run takes seconds

Draw = Callable[[list[str]], str]  # from the arguments of ``bench timeline`` to its output


def arguments(mark: str) -> list[str]:
    """Return the arguments of ``flowspec bench timeline`` for a mark's words."""
    name, *options = mark.split()
    flags = [f"--{option}" if i % 2 == 0 else option for i, option in enumerate(options)]
    return ["--strategy", name, *flags]


def update_timelines(text: str, draw: Draw) -> str:
    def block(match: re.Match[str]) -> str:
        mark = match["what"]
        return f"<!-- timeline {mark} -->\n```text\n{draw(arguments(mark)).rstrip()}\n```\n"

    return _MARK.sub(block, text)


def _run(arguments: list[str]) -> str:
    command = module_command("flowspec_edge", "bench", "timeline", *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_RUN_S).stdout


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(update_timelines(path.read_text(encoding="utf-8"), _run), encoding="utf-8")


if __name__ == "__main__":
    main()

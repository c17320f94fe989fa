"""What a chat writes to the terminal: the answer as it comes, the stages' lines between its lines, tables.

Knows where a line ends.  Does not know where text and figures come from.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flowspec_edge.bench.table import show
from flowspec_edge.runtime.request import Result

_LIVE = "flowspec_edge.runtime.live"


class Screen(logging.Handler):
    """Text goes to stdout, all else to stderr; a stage's line never cuts a line of text in two."""

    def __init__(self) -> None:
        super().__init__()
        self._in_line = False
        self._pending: dict[str, str] = {}  # stage -> its newest line
        self._log = logging.getLogger(_LIVE)
        self._notes = Console(stderr=True, highlight=False)

    def __enter__(self) -> Screen:
        self._log.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.live = False
        self._log.removeHandler(self)

    @property
    def live(self) -> bool:
        """Whether the stages' lines are shown."""
        return self._log.isEnabledFor(logging.INFO)

    @live.setter
    def live(self, on: bool) -> None:
        self._log.setLevel(logging.INFO if on else logging.WARNING)
        self._log.propagate = not on

    def emit(self, record: logging.LogRecord) -> None:
        """A stage tells what it did; shown when the text comes to the end of a line."""
        line = record.getMessage()
        self._pending[line.split(maxsplit=1)[0]] = line
        if not self._in_line:
            self._show_pending()

    def write(self, text: str) -> None:
        """More of the answer."""
        for line in text.splitlines(keepends=True):
            sys.stdout.write(line)
            self._in_line = not line.endswith("\n")
            if not self._in_line:
                sys.stdout.flush()
                self._show_pending()
        sys.stdout.flush()

    def end_line(self) -> None:
        """What comes next begins a line."""
        if self._in_line:
            self.write("\n")
        self._show_pending()

    def working(self, what: str) -> AbstractContextManager[object]:
        """Say what is being done as long as it takes; only where somebody sees it."""
        return self._notes.status(what) if self._notes.is_terminal else nullcontext()

    def note(self, text: str) -> None:
        """Something that is not part of the answer."""
        self.end_line()
        self._notes.print(text, style="dim", markup=False, soft_wrap=True)

    def stats(self, results: Sequence[Result]) -> None:
        """Figures of the last answer and of all, and what each stage did for the last."""
        self.end_line()
        show(self._notes, _answers(results))
        if results and results[-1].stats.stages:
            show(self._notes, _stages(results[-1]))

    def _show_pending(self) -> None:
        for stage in sorted(self._pending):
            self._notes.print(self._pending[stage], style="dim", markup=False, soft_wrap=True)
        self._pending.clear()


def _answers(results: Sequence[Result]) -> Table:
    made = Table(title="answers", title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for column in ("", "tokens", "tokens/s", "ALT", "ALR", "TTFT s", "drafted", "verified", "accepted",
                   "rows reused"):
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    if not results:
        return made
    last = results[-1].stats
    made.add_row("the last", str(len(results[-1].tokens)), f"{last.tokens_per_second:.2f}", f"{last.alt:.2f}",
                 f"{last.alr:.2f}", f"{last.ttft_s:.2f}", str(last.drafted), str(last.verified),
                 str(last.accepted), str(last.reused))
    all_of = [result.stats for result in results]
    decode, turns = sum(s.decode_s for s in all_of), sum(s.turns for s in all_of)
    decoded = sum(max(0, len(result.tokens) - 1) for result in results)
    rounds = sum(s.rounds for s in all_of)
    made.add_row(f"all {len(results)}", str(sum(len(result.tokens) for result in results)),
                 f"{decoded / decode if decode else 0.0:.2f}", f"{decoded / turns if turns else 0.0:.2f}",
                 f"{decoded / rounds if rounds else 0.0:.2f}",
                 f"{sum(s.ttft_s for s in all_of) / len(all_of):.2f}", str(sum(s.drafted for s in all_of)),
                 str(sum(s.verified for s in all_of)), str(sum(s.accepted for s in all_of)),
                 str(sum(s.reused for s in all_of)))
    return made


def _stages(result: Result) -> Table:
    made = Table(title="stages, for the last answer", title_justify="left", box=SIMPLE_HEAD, padding=0,
                 show_edge=False)
    for column in ("", "compute s", "wait s", "rows", "pruned", "MB in", "MB out"):
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    for number, counters in enumerate(result.stats.stages, start=1):
        made.add_row(f"V{number}", f"{counters.get('compute_s', 0.0):.2f}",
                     f"{counters.get('wait_s', 0.0):.2f}", f"{counters.get('rows', 0):.0f}",
                     f"{counters.get('pruned_rows', 0):.0f}", f"{counters.get('bytes_in', 0) / 1e6:.2f}",
                     f"{counters.get('bytes_out', 0) / 1e6:.2f}")
    return made

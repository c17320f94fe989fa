"""The terminal of a chat: the streamed answer, the stages' live lines between its lines, tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.table import Table

from flowspec_edge.d0.request import Result
from flowspec_edge.lab.bench.tables import frame, number, show

_LIVE = "flowspec_edge.d0.counters"


class ChatScreen(logging.Handler):
    """The screen of a chat.

    Text goes to stdout, everything else to stderr; a live line never splits a line of text.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_line = False
        self._pending: dict[str, str] = {}  # stage -> its newest line
        self._log = logging.getLogger(_LIVE)
        self._notes = Console(stderr=True, highlight=False)

    def __enter__(self) -> ChatScreen:
        self._log.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.live = False
        self._log.removeHandler(self)

    @property
    def live(self) -> bool:
        return self._log.isEnabledFor(logging.INFO)

    @live.setter
    def live(self, on: bool) -> None:
        self._log.setLevel(logging.INFO if on else logging.WARNING)
        self._log.propagate = not on

    def emit(self, record: logging.LogRecord) -> None:
        """Show a stage's line, at the latest when the current line of text ends."""
        line = record.getMessage()
        self._pending[line.split(maxsplit=1)[0]] = line
        if not self._in_line:
            self._show_pending()

    def write(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            sys.stdout.write(line)
            self._in_line = not line.endswith("\n")
            if not self._in_line:
                sys.stdout.flush()
                self._show_pending()
        sys.stdout.flush()

    def end_line(self) -> None:
        if self._in_line:
            self.write("\n")
        self._show_pending()

    def working(self, message: str) -> AbstractContextManager[object]:
        """Show a spinner, if stderr is a terminal."""
        return self._notes.status(message) if self._notes.is_terminal else nullcontext()

    def note(self, text: str) -> None:
        self.end_line()
        self._notes.print(text, style="dim", markup=False, soft_wrap=True)

    def stats(self, results: Sequence[Result]) -> None:
        self.end_line()
        show(self._notes, _answers(results))
        if results and results[-1].stats.stages:
            show(self._notes, _stages(results[-1]))

    def _show_pending(self) -> None:
        for stage in sorted(self._pending):
            self._notes.print(self._pending[stage], style="dim", markup=False, soft_wrap=True)
        self._pending.clear()


def _answers(results: Sequence[Result]) -> Table:
    table = frame([""], ["tokens", "tokens/s", "ALT", "ALR", "TTFT s", "drafted", "verified", "accepted",
                         "rows reused"], "answers", wide=True)
    if not results:
        return table
    for name, some in (("the last", results[-1:]), (f"all {len(results)}", results)):
        stats = [result.stats for result in some]
        decoded = sum(max(0, len(result.tokens) - 1) for result in some)
        rates = [decoded / total if decoded and total else None for total in (
            sum(s.decode_s for s in stats), sum(s.turns for s in stats), sum(s.rounds for s in stats))]
        counts = [sum(s.drafted for s in stats), sum(s.verified for s in stats),
                  sum(s.accepted for s in stats), sum(s.reused for s in stats)]
        firsts = [result.stats.ttft_s for result in some if result.tokens]
        rates.append(sum(firsts) / len(firsts) if firsts else None)
        table.add_row(name, str(sum(len(result.tokens) for result in some)),
                      *map(number, rates), *map(str, counts))
    return table


def _stages(result: Result) -> Table:
    table = frame([""], ["compute s", "wait s", "rows", "pruned", "MB in", "MB out"],
                  "stages, for the last answer", wide=True)
    for stage, counters in enumerate(result.stats.stages, start=1):
        table.add_row(f"V{stage}", f"{counters.get('compute_s', 0.0):.2f}",
                      f"{counters.get('wait_s', 0.0):.2f}", f"{counters.get('rows', 0):.0f}",
                      f"{counters.get('pruned_rows', 0):.0f}", f"{counters.get('bytes_in', 0) / 1e6:.2f}",
                      f"{counters.get('bytes_out', 0) / 1e6:.2f}")
    return table

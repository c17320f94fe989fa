"""A rollout as people see it: a line per board while it goes on, and what it came to.

Knows rich.  Does not know what is done, nor in which order (``fleet.rollout``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

import typer

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.rollout_report import Watch

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from flowspec_edge.fleet.deployment import Deployment
    from flowspec_edge.fleet.desired import Step
    from flowspec_edge.fleet.rollout_report import Report


class Screen(Watch):
    """A line for what is done now, and below it one for each board that does something."""

    def __init__(self, progress: Progress) -> None:
        """``progress`` has columns for ``description``, a bar, and the field ``says``."""
        self._progress = progress
        self._phase = progress.add_task("", total=None, says="")
        self._tasks: dict[str, TaskID] = {}
        self._lock = Lock()  # boards tell of themselves from threads of their own

    def phase(self, name: str) -> None:
        """See :class:`Watch`."""
        with self._lock:
            for task in self._tasks.values():
                self._progress.remove_task(task)
            self._tasks = {}
            self._progress.update(self._phase, description=name)

    def step(self, step: Step) -> None:
        """See :class:`Watch`."""
        with self._lock:
            self._progress.update(self._task(step.board), says=step.name)

    def amount(self, what: str, done: int, total: int) -> None:
        """See :class:`Watch`."""
        says = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
        with self._lock:
            self._progress.update(self._task(what), completed=done, total=total, says=says)

    def _task(self, name: str) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(f"  {name}", total=None, says="")
        return self._tasks[name]


@contextmanager
def watching(quiet: bool) -> Iterator[Watch]:
    """A screen on stderr, gone when it is over; nothing with ``quiet``."""
    if quiet:
        yield Watch()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
               TextColumn("{task.fields[says]}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Screen(progress)


def conclude(report: Report, did: str, as_json: bool, dry_run: bool = False) -> None:
    """Print a report; FlowspecError, or with ``as_json`` exit code 1, for what failed.

    ``did``: what the command did, such as "deployed".
    """
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
        if not report.ok:
            raise typer.Exit(1)
        return
    _print_steps(report, dry_run)
    failures = [*report.problems, *(board.error for board in report.boards if board.error)]
    if not failures:
        if not dry_run:
            what = f"{report.changed} changes" if report.changed else "no change"
            print(f"{did} in {report.seconds:.0f} s: {what}"
                  + (f"; release {report.release}" if report.release else ""))
        elif not report.changed:
            print("nothing would change")
        return
    if len(failures) > 1:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        for failure in failures:
            console.print(f"  {failure}", markup=False, soft_wrap=True)
    raise FlowspecError(_summary(report, failures))


def _print_steps(report: Report, dry_run: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for board in report.boards:
        changed = [step.name for step in board.steps if step.changed]
        if not changed:
            says = "no change"
        elif dry_run:
            says = f"{len(changed)} to change: {', '.join(changed)}"
        else:
            says = f"{len(changed)} changed: {', '.join(changed)}"
        console.print(f"{board.board}: {says}", markup=False, soft_wrap=True)


def _summary(report: Report, failures: list[str]) -> str:
    end = report.left or ("what runs on the boards was left alone; the next flowspec deploy up goes on from "
                          "here")
    return f"{failures[0] if len(failures) == 1 else f'{len(failures)} things are in the way'}; {end}"


def show_decision(deployment: Deployment) -> None:
    """Which board does what, on stderr."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    rows = [f"{deployment.draft.name} drafts"]
    rows += [f"{device.name} is V{place}, layers {lo} to {hi - 1}"
             for place, (device, (lo, hi)) in enumerate(deployment.stages, start=1)]
    rows += [f"{device.name} does nothing: {why}" for device, why in deployment.left_out]
    rows += [f"note: {note}" for note in deployment.notes]
    for row in rows:
        console.print(f"  {row}", markup=False, soft_wrap=True)

"""A rollout in the terminal: a progress line per board, then the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NoReturn

import typer

from flowspec_edge.boards.deploy.rollout_log import Watch
from flowspec_edge.cli.common.progress import every, long_waits, plain_lines
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.files import locked

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from flowspec_edge.boards.deploy.actions import Step
    from flowspec_edge.boards.deploy.resolve import Deployment
    from flowspec_edge.boards.deploy.rollout_log import DeployReport


class RolloutProgress(Watch):
    """A line for the phase, and one below it for each active board."""

    def __init__(self, progress: Progress) -> None:
        """Show progress on ``progress``, with columns for ``description``, a bar, and the field ``status``."""
        self._progress = progress
        self._phase = progress.add_task("", total=None, status="")
        self._tasks: dict[str, TaskID] = {}
        self._lock = Lock()  # called from a thread per board

    def phase(self, name: str) -> None:
        with self._lock:
            for task in self._tasks.values():
                self._progress.remove_task(task)
            self._tasks = {}
            self._progress.update(self._phase, description=name)

    def step(self, step: Step) -> None:
        with self._lock:
            self._progress.update(self._task(step.board), status=step.name)

    def amount(self, target: str, done: int, total: int) -> None:
        status = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
        with self._lock:
            self._progress.update(self._task(target), completed=done, total=total, status=status)

    def show_waits(self) -> None:
        """Name the boards that are slow to answer."""
        with self._lock:
            self._progress.update(self._phase, status=long_waits())

    def line(self) -> str:
        """Return the phase, and what each active board does."""
        with self._lock:
            about = [f"{task.description.strip()} {task.fields['status']}" for task in self._progress.tasks]
        return "; ".join(" ".join(text.split()) for text in about if text.strip()) or "working"

    def _task(self, name: str) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(f"  {name}", total=None, status="")
        return self._tasks[name]


@contextmanager
def changing(cluster: Path, name: str, quiet: bool) -> Iterator[Watch]:
    """Watch a rollout as ``watch_rollout``, for a command that changes boards.

    Raise UsageError if another one changes the cluster ``name`` of that file from this machine: the later one would
    end the steps of the earlier, which would then go back to the release before.
    """
    lock = cluster.absolute().parent / ".flowspec" / name / "lock"
    with (locked(lock, f"another flowspec command is changing cluster {name}: wait until it has ended"),
          watch_rollout(quiet) as watch):
        yield watch


@contextmanager
def watch_rollout(quiet: bool) -> Iterator[Watch]:
    """Show progress on stderr, removed at the end; none with ``quiet``."""
    if quiet:
        yield Watch()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
               TextColumn("{task.fields[status]}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        watch = RolloutProgress(progress)
        with every(1.0, watch.show_waits), plain_lines(lambda seconds: f"{watch.line()}, {seconds:.0f} s"):
            yield watch


def print_report(report: DeployReport, verb: str, as_json: bool, dry_run: bool = False) -> None:
    """Print a report; ``verb``: such as "deployed".

    Raise FlowspecError, or with ``as_json`` exit with code 1, for failures.
    """
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
        if not report.ok:
            raise typer.Exit(1)
        return
    from rich.console import Console

    stderr = Console(stderr=True, highlight=False)
    for note in report.notes:
        stderr.print(f"  note: {note}", markup=False, soft_wrap=True)
    for name in report.unreached:
        print(f"{name}: not reached")
    if not report.problems:  # with problems no board has steps
        _print_steps(report, dry_run)
    if report.ok:
        if not dry_run:
            changes = f"{report.changed} changes" if report.changed else "no change"
            print(f"{verb} in {report.seconds:.0f} s: {changes}"
                  + (f"; release {report.release}" if report.release else ""))
        elif not report.changed:
            print("nothing would change")
        return
    untouched = ("no board was touched" if report.problems else
                 "running services were not changed; run flowspec deploy up again to continue")
    raise_failures(report.failures, report.after_failure or untouched)


def raise_failures(failures: Sequence[str], outcome: str = "", count: str = "errors") -> NoReturn:
    """Raise FlowspecError for ``failures``; of several, each has a line on stderr, and the error their number.

    outcome  how that leaves the boards; "" if the failures say it
    count    what they are, in the plural
    """
    from rich.console import Console

    stderr = Console(stderr=True, highlight=False)
    if len(failures) > 1:
        for failure in failures:
            stderr.print(f"  {failure}", markup=False, soft_wrap=True)
    first = failures[0] if len(failures) == 1 else f"{len(failures)} {count}"
    raise FlowspecError(f"{first}; {outcome}" if outcome else first)


def _print_steps(report: DeployReport, dry_run: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for board in report.boards:
        changed = [step.name for step in board.steps if step.changed]
        verb = "to change" if dry_run else "changed"
        unchanged = "failed before any change" if board.error else "no change"
        status = f"{len(changed)} {verb}: {', '.join(changed)}" if changed else unchanged
        console.print(f"{board.board}: {status}", markup=False, soft_wrap=True)


def show_roles(deployment: Deployment) -> None:
    """Print the boards' roles on stderr."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    rows = [f"{deployment.draft.name} drafts"]
    rows += [f"{device.name} is V{stage}, layers {lo} to {hi - 1}"
             for stage, (device, (lo, hi)) in enumerate(deployment.stages, start=1)]
    rows += [f"{device.name} does nothing: {why}" for device, why in deployment.unused_boards]
    rows += [f"note: {note}" for note in deployment.notes]
    for row in rows:
        console.print(f"  {row}", markup=False, soft_wrap=True)

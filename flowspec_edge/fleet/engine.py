"""Bringing boards into a state: the provisioning engine, as the rest of flowspec sees it.

Knows the process that does it and what it tells.  Does not know pyinfra, which that process alone
imports: it wants gevent, which must not meet torch or zmq.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.commands import last_line
from flowspec_edge.fleet.desired import BoardState, Outcome, Phase, Step

_PATIENCE_S = 10  # for the process to end its connections


def run(phase: Phase, boards: Sequence[BoardState], dry_run: bool = False,
        on_step: Callable[[Step], None] = lambda step: None,
        on_error: Callable[[str, str], None] = lambda board, error: None) -> list[Outcome]:
    """Bring ``phase`` about on all ``boards`` at once; what became of each, in their order.

    A board that fails does not hold up the others.  ``dry_run``: nothing is touched, and a step's
    ``changed`` says whether it would be.  ``on_step`` and ``on_error`` (a board's name, its one line)
    are called as things happen.  UsageError without pyinfra; FlowspecError if the process is lost.
    """
    require()
    if not boards:
        return []
    outcomes = {board.name: Outcome(board.name) for board in boards}
    unheard = set(outcomes)
    job = {"phase": phase, "dry_run": dry_run, "boards": [board.as_json() for board in boards]}
    with tempfile.TemporaryFile("w+", errors="replace") as said, subprocess.Popen(
            [sys.executable, "-m", "flowspec_edge.fleet.engine_child"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            _send(child, json.dumps(job))
            for line in child.stdout:
                board, event = _event(line, outcomes)
                if isinstance(event, Step):
                    outcomes[board].steps.append(event)
                    on_step(event)
                else:
                    unheard.discard(board)
                    outcomes[board].error = event
                    if event:
                        on_error(board, event)
        finally:
            _end(child)
        if unheard:
            said.seek(0)
            raise FlowspecError(f"the provisioning process ended before {', '.join(sorted(unheard))} "
                                f"{'was' if len(unheard) == 1 else 'were'} done: "
                                + (last_line(said.read()) or f"exit code {child.returncode}"))
    return list(outcomes.values())


def require() -> None:
    """UsageError without pyinfra."""
    if find_spec("pyinfra") is None:
        raise UsageError("deploying needs pyinfra: pip install 'flowspec-edge[deploy]'")


def _send(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it has ended; what it said comes after
        child.stdin.write(line + "\n")
        child.stdin.flush()


def _event(line: str, outcomes: dict[str, Outcome]) -> tuple[str, Step | str]:
    """A board, and its step or, at its end, its error."""
    try:
        told = json.loads(line)
        board = told["board"]
        if board not in outcomes:
            raise KeyError(board)
        if "error" in told:
            return board, str(told["error"])
        return board, Step(board, str(told["step"]), bool(told["changed"]))
    except (ValueError, KeyError, TypeError) as error:
        raise FlowspecError(f"the provisioning process says what nobody understands: {line.strip()[:120]}"
                            ) from error


def _end(child: subprocess.Popen[str]) -> None:
    """The end of its stdin is the sign to stop; it then ends what it has started."""
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.close()
    try:
        child.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()

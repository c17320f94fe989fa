"""A worker process that is told to end, at every line of its own code and at random moments."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowspec_edge.drivers.stage.process import StopSignals

# Forks workers that send SIGTERM to themselves at the N-th line after the handler is installed, and at every
# line after it.  Prints the N whose exit code is not 0.
AT_LINES = """
import os, signal, sys
from pathlib import Path
from flowspec_edge.drivers.stage import load, process, worker
FILES = {process.__file__, worker.__file__}

def run(first):
    lines = 0
    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            lines += 1
            if lines >= first:
                os.kill(os.getpid(), signal.SIGTERM)
        return trace
    signal.alarm(120)
    sys.settrace(trace)
    code = process.serve(Path(sys.argv[1]))
    sys.settrace(None)
    os.kill(os.getpid(), signal.SIGTERM)
    return code

for first in map(int, sys.argv[2:]):
    pid = os.fork()
    if not pid:
        sys.exit(run(first))
    status = os.waitpid(pid, 0)[1]
    if status:
        print(first, status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [
    [1, 2, 3, 9, 14, 20, 27, 40, 70], pytest.param(range(1, 400), marks=pytest.mark.soak)])
def test_sigterm_at_any_line_is_exit_code_0(config: Path, lines: list[int]) -> None:
    done = subprocess.run([sys.executable, "-c", AT_LINES, str(config), *map(str, lines)],
                          capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_signal_interrupts_no_function_of_a_worker_that_serves() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        signals = StopSignals()
        signals.serving = True
        for number in before:
            signals.arrived = False
            signal.raise_signal(number)
            assert signals.arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

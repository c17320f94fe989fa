"""Ctrl-C at any moment of a command: at most a line, exit code 130."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from kits.network_beds import heed_ctrl_c
from kits.process_clusters import PATIENCE

# The program, which writes a byte to the descriptor in its first argument once it handles signals.
PROGRAM = """
import os, signal, sys
told, set_handler = int(sys.argv.pop(1)), signal.signal
def tell(*arguments):
    before = set_handler(*arguments)
    signal.signal = set_handler
    os.write(told, b"1")
    return before
signal.signal = tell
from flowspec_edge.__main__ import main
sys.exit(main())
"""
COMMANDS = (
    ("generate", "x = ", "--stages", "2", "--clock", "wall"),
    ("models", "shard", "--model", "demo", "--stages", "2", "--out", "OUT"),
    ("generate", "x = ", "--stages", "1", "--strategy", "autoregressive", "--clock", "virtual"),
    ("serve", "--stages", "1", "--port", "0"),
    ("bench", "run", "--strategies", "chunk_pp", "--limit", "1"),
    ("plan", "--model", "demo", "--profile", "orin-nano-8gb"),
    ("strategies",),
)


def check(command: tuple[str, ...], moment: float, out: Path) -> None:
    reader, writer = os.pipe()
    arguments = [str(out) if argument == "OUT" else argument for argument in command]
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(writer), *arguments], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[writer],
                          preexec_fn=heed_ctrl_c) as process:
        try:
            os.close(writer)
            assert os.read(reader, 1) == b"1"
            os.close(reader)
            with suppress(subprocess.TimeoutExpired):
                process.wait(moment)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=2 * PATIENCE)
        finally:
            process.kill()
    assert process.returncode in (130, 0), (moment, err)  # 0: it had ended, or a server that was ready
    assert len([line for line in err.splitlines() if not line.startswith("flowspec: ")]) <= 1, (moment, err)
    assert "Traceback" not in err


@pytest.mark.parametrize("trial", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in (2, 3, 4))])
def test_an_interrupt_at_start_up(trial: int, tmp_path: Path) -> None:
    check(COMMANDS[trial % 2], (0.0, 0.1, 0.4, 1.0, 2.0)[trial], tmp_path / "out")


@pytest.mark.soak
@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_at_any_moment(command: tuple[str, ...], tmp_path: Path) -> None:
    rng = random.Random(" ".join(command))
    for trial in range(40):
        check(command, rng.uniform(0.0, 6.0), tmp_path / str(trial))

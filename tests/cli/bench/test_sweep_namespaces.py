"""``flowspec sweep bandwidth --links namespaces``: real processes over shaped links, against virtual time."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kits import network_beds

from flowspec_edge.cli.main import main

PATIENCE_S = 120.0  # only a failing test waits so long
TRIES = 3
SWEEP = ["sweep", "bandwidth=1000,125", "--strategies", "chunk_pp,flowspec", "--stages", "2", "--limit", "1",
         "--no-published"]


def sweep(out: Path, *more: str) -> dict[tuple[float, str], float]:
    """Value and strategy → tokens/s."""
    assert main([*SWEEP, "--max-new-tokens", "14", "--json", str(out), *more]) == 0
    found = json.loads(out.read_text())
    assert found["complete"]
    return {(point["value"], row["strategy"]): row["tokens_per_second"]
            for point in found["points"] for row in point["rows"]}


@pytest.mark.soak
@network_beds.needs_netns
def test_shaped_links_agree_with_virtual_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 10 %, the links' measured rates too; other work on the machine only makes it slower, so the
    best of a few tries counts."""
    expected = sweep(tmp_path / "virtual.json")
    outside = network_beds.interfaces()
    best: dict[tuple[float, str], float] = {}
    rates: dict[float, float] = {}
    for turn in range(TRIES):
        out = tmp_path / f"real{turn}.json"
        for key, speed in sweep(out, "--links", "namespaces").items():
            best[key] = max(speed, best.get(key, 0.0))
        written = json.loads(out.read_text())
        for point in written["points"]:
            assert len(point["measured_mbps"]) == 3
            rates[point["value"]] = max(min(point["measured_mbps"]), rates.get(point["value"], 0.0))
        if agrees(best, expected) and agrees(rates, {mbps: mbps for mbps in rates}):
            break
    assert best == pytest.approx(expected, rel=0.1)
    assert rates == pytest.approx({mbps: mbps for mbps in (1000, 125)}, rel=0.1)
    assert (written["links"], written["emulated"], written["clock"]) == ("namespaces", True, "wall")
    assert "EMULATED: wall clock, shaped links of this machine" in capsys.readouterr().out
    assert network_beds.made_by(os.getpid()) == set()
    assert network_beds.interfaces() == outside


def agrees(found: dict[object, float], expected: dict[object, float]) -> bool:
    return found == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@network_beds.needs_netns
@pytest.mark.parametrize("number", [
    signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_nothing_is_left_of_an_interrupted_sweep(number: signal.Signals) -> None:
    outside = network_beds.interfaces()
    screen, terminal = pty.openpty()  # a terminal, so that there is a progress bar to wait for
    command = subprocess.Popen(
        [sys.executable, "-m", "flowspec_edge.cli.main", *SWEEP, "--links", "namespaces",
         "--max-new-tokens", "400"],
        stdout=subprocess.DEVNULL, stderr=terminal, start_new_session=True,
        preexec_fn=network_beds.heed_ctrl_c)
    os.close(terminal)
    try:
        shown = b""
        while b"chunk_pp" not in shown:
            shown += os.read(screen, 4096)
        made = network_beds.made_by(command.pid)
        assert len(made) == 4  # D0's, two stages', the switch's
        # As long as they are held, no namespace that another test makes gets the number of one of these.
        pids = [next(iter(network_beds.processes_in(namespace))) for namespace in made]
        held = [os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in pids]
        command.send_signal(number)
        while True:  # the terminal must be read, or the command waits
            try:
                if not os.read(screen, 4096):
                    break
            except OSError:  # what Linux says when no process has the terminal open any more
                break
        assert network_beds.ended(command.pid, PATIENCE_S)
    finally:
        command.kill()
        command.wait()
        os.close(screen)
    # Processes of the sweep may end a moment after the command; one that never does fails here.
    while left := [pid for namespace in made for pid in network_beds.processes_in(namespace)]:
        assert all(network_beds.ended(pid, PATIENCE_S) for pid in left)
    for namespace in held:
        os.close(namespace)
    assert network_beds.interfaces() == outside

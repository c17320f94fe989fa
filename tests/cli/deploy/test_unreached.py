"""Boards that do not answer: named at once, before anything is made here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kits import network_beds

from flowspec_edge.cli.main import main
from flowspec_edge.lab.links.namespaces import NetnsTestbed

pytestmark = network_beds.needs_netns


ADDRESSES = ("10.77.0.77", "10.77.0.78", "no-such-host.invalid")
NOT_REACHED = [f"board-{place}: not reached" for place in range(3)]
UNTOUCHED = "flowspec: error: 3 errors; no board was touched"


@pytest.mark.parametrize(("command", "first", "last"), [
    ("deploy plan", NOT_REACHED, UNTOUCHED), ("deploy up", NOT_REACHED, UNTOUCHED),
    ("deploy rollback", NOT_REACHED, UNTOUCHED), ("deploy down", NOT_REACHED, UNTOUCHED),
    ("deploy stop", [f"board-{place}: not stopped" for place in range(3)], "flowspec: error: 3 errors"),
    ("deploy status", [], "bed is not ready: no answer from board-0, board-1, board-2"),
    ("doctor", ["0 of 3 boards have what flowspec needs; failed: board-0 (not reached), board-1 (not reached), "
                "board-2 (not reached)"], ""),
    ("keys show", [], ""), ("keys rotate", [], UNTOUCHED), ("device profile", [], "")])
def test_every_board_that_is_not_reached_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str,
                                                  first: list[str], last: str) -> None:
    """Once each, with its cause and the next step: two without a route, one whose name is unknown."""
    text = '[cluster]\nname = "bed"\nmodel = "demo"\ninterface = "eth0"\n'
    for place, address in enumerate(ADDRESSES):
        role = "verify" if place else "draft"
        text += f'[[device]]\nname = "board-{place}"\naddress = "{address}"\nrole = "{role}"\n'
    (tmp_path / "cluster.toml").write_text(text)
    with NetnsTestbed(1) as bed, bed.entered(0):
        assert main([*command.split(), "--cluster", str(tmp_path / "cluster.toml")]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[:len(first)] == first
    causes = (out + err).splitlines()
    if command == "doctor":  # in tables, whose cells are folded
        assert [name for line in causes[1:] if re.fullmatch(r"board-\d", name := line.strip())] == [
            f"board-{place}" for place in range(3)]
        assert out.count("→") == 3
        return
    for place, cause in enumerate(("10.77.0.77 does not answer (", "10.77.0.78 does not answer (",
                                   "the name no-such-host.invalid is unknown here")):
        (line,) = (line for line in causes if cause in line)
        assert re.match(rf"\W*board-{place}: (is not measured: )?ssh: {re.escape(cause)}", line)
        assert line.count(ADDRESSES[place]) <= 2  # ssh names it, too
        assert line.endswith("the address in the cluster file" if place < 2 else "are not for boards")
    assert last in causes or not last
    # No shards, no wheels.
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("cluster.toml", "lock")]

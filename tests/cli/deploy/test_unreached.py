"""Boards that do not answer: named at once, before anything is made here."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits import network_beds

from flowspec_edge.cli.main import main
from flowspec_edge.lab.links.namespaces import NetnsTestbed

pytestmark = network_beds.needs_netns


def test_a_plan_says_which_boards_were_not_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                   ) -> None:
    text = '[cluster]\nname = "bed"\nmodel = "demo"\ninterface = "eth0"\n'
    for place, role in enumerate(("draft", "verify")):
        text += (f'[[device]]\nname = "board-{place}"\naddress = "10.77.0.{77 + place}"\nrole = "{role}"\n')
    (tmp_path / "cluster.toml").write_text(text)
    with NetnsTestbed(1) as bed, bed.entered(0):
        assert main(["deploy", "plan", "--cluster", str(tmp_path / "cluster.toml")]) == 1
    out, err = capsys.readouterr()
    assert out == "board-0: not reached\nboard-1: not reached\n"
    for place in (0, 1):
        assert f"board-{place}: ssh: 10.77.0.{77 + place} does not answer" in err
    assert "flowspec: error: 2 errors; no board was touched" in err
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]  # no shards, no wheels

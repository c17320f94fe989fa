"""The check-up of boards over a real ssh: one as it should be, and others that are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sshkit

from flowspec_edge.cli.main import main
from flowspec_edge.fleet.checkup_fleet import check_link, check_skew
from flowspec_edge.fleet.linktest import LinkMeasure
from flowspec_edge.fleet.remote import LinkRate


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshkit.Boards]:
    with sshkit.boards(2, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(boards.outside):
        yield boards


@sshkit.needs_boards
def test_boards_and_their_links(boards: sshkit.Boards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                ) -> None:
    """board-1 has no flowspec, board-2 refuses the key: each says so, and nothing is lost of the others."""
    text = boards.file.read_text()
    first, second, third = text.split("[[device]]")[1:]
    file = tmp_path / "cluster.toml"
    file.write_text("[[device]]".join([
        text.split("[[device]]")[0], first, second + 'python = "/usr/bin/false"\n',
        third.replace(f"{boards.directory}/user", f"{boards.directory}/stranger")]))
    assert main(["doctor", "--cluster", str(file), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    found = {board["name"]: {finding["check"]: finding for finding in board["findings"]}
             for board in document["boards"]}
    whole = found["board-0"]
    assert whole.keys() >= {"clock", "flowspec", "board", "memory", "torch", "product", "4 bits",
                            "encryption"}
    assert whole["clock"]["state"] == whole["product"]["state"] == whole["flowspec"]["state"] == "ok"
    assert whole["link to board-1"]["state"] == "failed"  # there is nobody to measure with
    assert {name: finding["state"] for name, finding in found["board-1"].items()} == {
        "clock": "ok", "flowspec": "failed"}
    assert "install this release there" in found["board-1"]["flowspec"]["advice"]
    assert list(found["board-2"]) == ["reached"]
    assert "Permission denied" in found["board-2"]["reached"]["found"]


def test_an_unknown_name_is_one_boards_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[cluster]\nname = "x"\n' + "".join(
        f'[[device]]\nname = "{name}"\naddress = "{name}.invalid"\nrole = "{role}"\n'
        for name, role in (("a", "draft"), ("b", "verify"))))
    assert main(["doctor", "--cluster", str(file)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "the address a.invalid is unknown here" in out
    assert "the address b.invalid is unknown here" in out


@pytest.mark.parametrize(("offset", "uncertain", "state"), [
    (0.2, 0.1, "ok"), (-1.5, 0.6, "ok"), (1.7, 0.6, "warning"), (-3600.0, 2.0, "warning")])
def test_clocks(offset: float, uncertain: float, state: str) -> None:
    assert check_skew(offset, uncertain).state == state


def test_links() -> None:
    assert check_link(LinkRate("a", "b", LinkMeasure(0.3, 941.0))).found == "941 Mbps, 0.30 ms"
    assert check_link(LinkRate("a", "b", LinkMeasure(0.3, 94.0))).state == "warning"
    assert check_link(LinkRate("a", "b", None, "b: no route")).state == "failed"

"""The doctor on boards over a real ssh: one as it should be, and others that are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kits import ssh_boards

from flowspec_edge.boards.links.between import LinkRate
from flowspec_edge.boards.links.linktest import LinkMeasure
from flowspec_edge.boards.probe.checks import judge
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.boards.probe.service_rules import ReleaseOnBoard
from flowspec_edge.cli.main import main


@pytest.mark.slow
@ssh_boards.needs_boards
def test_boards_and_their_links(boards: ssh_boards.Boards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                ) -> None:
    """board-1 has something else than flowspec, board-2 refuses the key: each says so, and nothing is lost of
    the others."""
    boards.disconnect()
    text = boards.file.read_text()
    first, second, third = text.split("[[device]]")[1:]
    file = tmp_path / "cluster.toml"
    file.write_text("[[device]]".join([
        text.split("[[device]]")[0], first, second + 'python = "/usr/bin/false"\n',
        third.replace(f"{boards.directory}/user", f"{boards.directory}/stranger")]))
    found = checked(file, capsys)
    whole = found["board-0"]
    assert whole.keys() >= {"clock", "flowspec", "board", "memory", "torch", "product", "4 bits",
                            "encryption", "network"}
    assert whole["clock"]["state"] == whole["product"]["state"] == whole["flowspec"]["state"] == "ok"
    assert whole["link to board-1"]["state"] == "ok"  # it needs no flowspec
    assert "link to board-2" not in found["board-1"]
    assert found["board-1"]["flowspec"]["state"] == "failed"
    assert "install this release there" in found["board-1"]["flowspec"]["advice"]
    assert " cores" in found["board-1"]["board"]["found"]  # asked another way
    assert list(found["board-2"]) == ["reached"]
    assert "Permission denied" in found["board-2"]["reached"]["found"]


@pytest.fixture
def bare(boards: ssh_boards.Boards, tmp_path: Path) -> Path:
    """A cluster file of the boards before the first `deploy up`."""
    file = tmp_path / "bare.toml"
    name = boards.bed.interface(0)
    file.write_text(boards.file.read_text().replace(
        f'python = "{sys.executable}"\n', f'board_python = "/usr/bin/python3"\ninterface = "{name}"\n'))
    return file


@ssh_boards.needs_boards
def test_before_the_first_up(boards: ssh_boards.Boards, bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The link of board-1 is slow, as the kernel sees to; the address of board-2 is leased."""
    slow, leased = boards.bed.interface(1), boards.bed.interface(2)
    boards.tc(1, *f"qdisc add dev {slow} root tbf rate 50mbit burst 64kb latency 50ms".split())
    lease = ["ip", "addr", "change", f"{boards.bed.address(2)}/24", "dev", leased, "valid_lft", "3600",
             "preferred_lft", "3600"]
    subprocess.run(boards.bed.command(2, lease), check=True)
    try:
        found = checked(bare, capsys)
    finally:
        boards.tc(1, "qdisc", "del", "dev", slow, "root")
    for board in found.values():
        assert (board["flowspec"]["state"], board["flowspec"]["found"]) == (
            "ok", "not installed yet; flowspec deploy up installs it")
        failed = {name for name, finding in board.items() if finding["state"] == "failed"}
        assert failed == {"torch", "systemd"}
        assert "No module named" in board["torch"]["found"]
        assert board["link shaping"]["state"] == board["python"]["state"] == board["sudo"]["state"] == "ok"
    links = [found["board-0"]["link to board-1"], found["board-1"]["link to board-2"],
             found["board-2"]["link to board-0"]]
    assert [link["state"] for link in links] == ["ok", "warning", "ok"]
    assert 10 < float(links[1]["found"].split()[0]) < 100  # 100 and more would be no warning
    assert "is leased (DHCP)" in found["board-2"]["network"]["found"]
    assert boards.bed.address(0) in found["board-0"]["network"]["found"]
    assert "leased" not in found["board-0"]["network"]["found"]


@ssh_boards.needs_boards
def test_a_jetson_before_the_first_up_is_put_right(boards: ssh_boards.Boards, bare: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """board-0 has L4T's files, packages that apt may replace, and a user without the GPU's groups."""
    boards.inside(0, "sh", "-ec", """
mkdir /run/upper /run/work /var/lib/dpkg
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work /etc
echo '# R36 (release), REVISION: 4.3, GCID: 1' > /etc/nv_tegra_release
groupadd --force video; useradd --no-create-home flowspec
printf 'Package: nvidia-l4t-core\\nStatus: install ok installed\\nVersion: 1\\nArchitecture: all\\n' \
    > /var/lib/dpkg/status
""")
    found = checked(bare, capsys, "--fix")["board-0"]
    assert "L4T 36.4.3" in found["board"]["found"]
    assert found["apt hold"]["found"].startswith("an apt upgrade would replace 1 of 1 packages")
    assert (found["apt hold"]["state"], found["apt hold"]["fixed"]) == ("warning", False)
    assert found["desktop"]["state"] == "ok"
    assert (found["groups"]["state"], found["groups"]["fixed"]) == ("ok", True)
    members = (boards.root(0) / "etc/group").read_text()
    assert any(line.startswith("video:") and "flowspec" in line for line in members.splitlines())


@ssh_boards.needs_boards
def test_an_address_that_every_jetson_has(boards: ssh_boards.Boards, bare: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    bare.write_text(bare.read_text().replace(boards.bed.address(2), "192.168.55.1"))
    found = checked(bare, capsys)
    assert list(found["board-2"]) == ["reached", "network"]
    assert "192.168.55.1 is in the network of the USB device port" in found["board-2"]["network"]["found"]
    assert found["board-0"]["link to board-1"]["state"] == "ok"


def checked(file: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    """What the doctor finds, by board and check; something fails on these boards."""
    assert main(["doctor", "--cluster", str(file), "--json", *options]) == 1
    document = json.loads(capsys.readouterr().out)
    return {board["name"]: {finding["check"]: finding for finding in board["findings"]}
            for board in document["boards"]}


def test_links() -> None:
    def judged(measure: LinkMeasure | None, error: str = "") -> Finding:
        [found] = judge("bare", LinkRate("a", "b", measure, error))
        return found

    assert judged(LinkMeasure(0.3, 941.0)) == Finding("link to b", "ok", "941 Mbps, 0.30 ms")
    assert judged(LinkMeasure(0.3, 94.0)).state == "warning"
    assert judged(None, "b: no route").state == "failed"


@pytest.mark.parametrize(("there", "error", "state", "found"), [
    ("", "", "ok", "not installed yet; flowspec deploy up installs it"), ("1.2", "", "ok", "1.2"),
    ("1.1", "", "failed", "1.1, here 1.2"), ("", "x is not there", "failed", "x is not there")])
def test_releases(there: str, error: str, state: str, found: str) -> None:
    [finding] = judge("installed", ReleaseOnBoard("/usr/bin/python3", there, "1.2", error))
    assert (finding.check, finding.state, finding.found) == ("flowspec", state, found)
    assert bool(finding.advice) == (state == "failed")

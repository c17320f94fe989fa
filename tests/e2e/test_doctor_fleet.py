"""`flowspec doctor --cluster` before the first `deploy up`, and what it advises carried out on a board."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kits import container_boards
from kits.deployments import Cluster

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

# What makes a Jetson of a board here: its release, a package of L4T, and a desktop's display manager.
_JETSON = """
echo '# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic' > /etc/nv_tegra_release
mkdir -p /srv/l4t/DEBIAN
printf 'Package: nvidia-l4t-core\\nVersion: 36.4.3\\nArchitecture: all\\nMaintainer: x <x@example.org>\\n' \
    > /srv/l4t/DEBIAN/control
printf 'Description: none\\n' >> /srv/l4t/DEBIAN/control
dpkg-deb --build /srv/l4t /srv/l4t.deb && dpkg --install /srv/l4t.deb
printf '[Service]\\nExecStart=/bin/true\\n' > /etc/systemd/system/display-manager.service
systemctl set-default graphical.target && systemctl daemon-reload
"""
_AS_BEFORE = """
apt-mark unhold nvidia-l4t-core; dpkg --purge nvidia-l4t-core
rm -rf /srv/l4t* /etc/nv_tegra_release /etc/systemd/system/display-manager.service
systemctl set-default graphical.target; systemctl daemon-reload
"""


@pytest.fixture
def jetson(cluster: Cluster) -> Iterator[int]:
    """A board that says that it is one; nothing is deployed on any."""
    if cluster.deploy("status")["release"]:
        assert cluster.deploy("down", "--purge")["ok"]
    cluster.fleet.shell(1, _JETSON)
    yield 1
    cluster.fleet.shell(1, _AS_BEFORE)


@pytest.mark.core
def test_bare_boards_and_one_that_is_put_right(cluster: Cluster, jetson: int) -> None:
    found = checked(cluster)
    names = [cluster.fleet.name(board) for board in range(cluster.fleet.boards)]
    assert list(found) == names
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        board = found[name]
        assert [check for check, finding in board.items() if finding["state"] == "failed"] == []
        assert board["flowspec"]["found"] == "not installed yet; flowspec deploy up installs it"
        assert {board[check]["state"] for check in ("python", "sudo", "systemd", "network", "link shaping",
                                                    f"link to {following}")} == {"ok"}
    torch = cluster.fleet.shell(0, "python3 -c 'import torch; print(torch.__version__)'").strip()
    assert found[names[0]]["torch"]["found"].startswith(f"{torch}, which sees no GPU, /usr/")
    before = found[names[jetson]]
    assert "L4T 36.4.3" in before["board"]["found"]
    assert {before[check]["state"] for check in ("apt hold", "desktop")} == {"warning"}
    for check in ("apt hold", "desktop"):
        command = before[check]["advice"].partition(";")[0].partition(", then")[0]
        cluster.fleet.ssh(jetson, command)
    after = checked(cluster)[names[jetson]]
    assert {after[check]["state"] for check in ("apt hold", "desktop")} == {"ok"}


def checked(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What the doctor finds, by board and check, if nothing fails."""
    done = cluster.flowspec("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return {board["name"]: {finding["check"]: finding for finding in board["findings"]}
            for board in json.loads(done.stdout)["boards"]}

"""Whatever may be wrong with an Orin out of the box, one at a time: one line says what, where and what to do.

The boards pass for Jetsons (kits.jetson_boards): orin-0 drafts, orin-1 has the misfortune, orin-4 is too old.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kits import container_boards
from kits.deployments import Cluster
from kits.jetson_boards import Orins

from flowspec_edge.boards import paths
from flowspec_edge.util.resources import resource_dir

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

UNLUCKY, OLD = 1, 4
TORCH = "/usr/lib/jetson/torch"
UNITS = sorted((resource_dir("deploy") / "units").glob("*.service"))
RELEASE = "/etc/nv_tegra_release"
# Three years behind: the board's Python and its `date` say so, and no NTP is there.
BEHIND = """echo -94608000 > /etc/lies/clock; echo no > /etc/lies/ntp
echo "import time; time.time = lambda real=time.time: real() + float(open('/etc/lies/clock').read())" \
    > /usr/lib/python3/dist-packages/clock.pth"""
RIGHT = "rm -f /usr/lib/python3/dist-packages/clock.pth /etc/lies/clock; echo yes > /etc/lies/ntp"


@dataclass(frozen=True)
class Misfortune:
    """What is wrong with a board: how it comes about and goes (scripts for root); and what tells of it.

    check  what the line is about
    says   patterns that are in it: what was found, and what to do
    """

    name: str
    breaks: str
    mends: str
    check: str
    says: tuple[str, ...]
    torch_device: str = "cpu"


MISFORTUNES = (
    Misfortune("sudo asks for a password", "mv /etc/sudoers.d/flowspec /srv",
               "mv /srv/flowspec /etc/sudoers.d", "sudo", ("a password is required", "NOPASSWD")),
    Misfortune("no torch", f"{TORCH} absent", f"{TORCH} back", "torch",
               ("No module named 'torch'", "install|pip3", "all users|sudo")),
    Misfortune("torch of one user alone", f"{TORCH} local", f"{TORCH} back", "torch",
               (r"only in /home/jetson/\.local/", "all users|sudo")),
    Misfortune("torch without the GPU", "true", "true", "torch",
               ("sees no (CUDA )?GPU", "torch_device", "install|pip3"), torch_device="cuda"),
    Misfortune("torch for another numpy", f"{TORCH} numpy1", f"{TORCH} back", "torch|numpy",
               ("[Nn]umpy is not available", r"1\.26|numpy")),
    # transformers leaves it alone: by the rules of versions it is older than 2.6.0.
    Misfortune("a pre-release of torch 2.6", f"{TORCH} version 2.6.0a0+ecf3bae40a.nv25.01", f"{TORCH} back",
               "torch", (r"2\.6\.0a0\+ecf3bae40a\.nv25\.01", "install|pip3")),
    Misfortune("a library of torch's is missing", f"{TORCH} library", f"{TORCH} back", "torch",
               (r"libcusparseLt\.so\.0", "install|pip3")),
    Misfortune("JetPack 5",
               f"cp {RELEASE} /srv; sed -i 's/R36 (.*: 4.3/R35 (release), REVISION: 4.1/' {RELEASE}",
               f"mv /srv/nv_tegra_release {RELEASE}", "board", (r"L4T 35\.4\.1", "JetPack 6")),
    Misfortune("JetPack 6.0", f"cp {RELEASE} /srv; sed -i 's/REVISION: 4.3/REVISION: 3.0/' {RELEASE}",
               f"mv /srv/nv_tegra_release {RELEASE}", "board", (r"L4T 36\.3\.0", r"JetPack 6\.[12]")),
    Misfortune("a desktop's memory",
               "sed 's/^MemAvailable:.*/MemAvailable: 99999 kB/' /proc/meminfo > /run/less; "
               "mount --bind /run/less /proc/meminfo", "umount /proc/meminfo", "memory",
               ("are needed", "multi-user.target")),
    Misfortune("a full card", "mkdir /opt/flowspec; mount -t tmpfs -o size=50m tmpfs /opt/flowspec",
               "umount /opt/flowspec; rmdir /opt/flowspec", "disk", ("are free", "room")),
    Misfortune("a read-only file system", "mkdir /opt/flowspec; mount -t tmpfs -o ro tmpfs /opt/flowspec",
               "umount /opt/flowspec; rmdir /opt/flowspec", "disk", ("read-only", "remount")),
    Misfortune("a clock that NTP keeps and is wrong", BEHIND + "; echo yes > /etc/lies/ntp", RIGHT, "clock",
               ("-9460", "NTP|timedatectl")),
)


@pytest.fixture(scope="module")
def prepared(orins: Orins) -> Orins:
    """The boards as docs/guides/boards.md has a user prepare them, if no test has done it yet."""
    for board in range(OLD + 1):
        orins.shell(board, f"""
hostnamectl set-hostname {orins.name(board)}
echo '{container_boards.USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/flowspec
[ ! -e /etc/systemd/system/nvzramconfig.service ] || systemctl disable --quiet nvzramconfig
systemctl set-default --quiet multi-user.target
apt-mark hold 'nvidia-l4t-*' || true""")
        orins.reboot(board)
    return orins


@pytest.fixture(scope="module")
def cluster(prepared: Orins, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """orin-0 and orin-1; bare at the end."""
    found = Cluster(prepared, tmp_path_factory.mktemp("cluster"), [0, UNLUCKY])
    yield found
    found.write()
    found.deploy("down", "--purge")


def problems(cluster: Cluster) -> list[str]:
    """What `deploy plan` says is in the way."""
    found: list[str] = cluster.deploy("plan")["problems"]
    return found


@pytest.mark.parametrize("misfortune", MISFORTUNES, ids=lambda misfortune: misfortune.name)
def test_one_line_says_what_and_where_and_what_to_do(cluster: Cluster, misfortune: Misfortune) -> None:
    cluster.write()
    if misfortune.torch_device != "cpu":
        text = cluster.file.read_text()
        cluster.file.write_text(f'{text}torch_device = "{misfortune.torch_device}"\n')  # orin-1's, the last
    with cluster.fleet.changed(UNLUCKY, misfortune.breaks, misfortune.mends):
        found = problems(cluster)
    print(*found, sep="\n")
    assert len(found) == 1, found
    assert re.match(f"orin-1: ({misfortune.check}): ", found[0])
    assert [says for says in misfortune.says if not re.search(says, found[0])] == []


def test_a_system_that_is_too_old_is_named(prepared: Orins, tmp_path: Path) -> None:
    """Debian 11 as it comes: Python 3.9, systemd 247, no torch."""
    found = problems(Cluster(prepared, tmp_path, [0, OLD]))
    print(*found, sep="\n")
    assert all(line.startswith("orin-4: ") for line in found)
    [line] = [line for line in found if ": python: " in line]
    assert "3.9" in line
    assert "3.10" in line


@pytest.mark.parametrize("board", [UNLUCKY, OLD], ids=["systemd 249", "systemd 247"])
def test_older_systemds_understand_the_units(prepared: Orins, board: int) -> None:
    program = paths.PYTHON.replace("python", "flowspec")
    made = [f"printf %s {shlex.quote(unit.read_text())} > {paths.UNITS}/{unit.name}" for unit in UNITS]
    made += [f"mkdir -p {program.rpartition('/')[0]}", f"ln -s /bin/true {program}"]
    gone = f"rm -rf {paths.HOME} {paths.UNITS}/flowspec-*"
    said = prepared.shell(board, "\n".join(made) + f"""
for unit in {paths.DRAFT_UNIT} {paths.verify_unit(1)} {paths.POWER_UNIT}; do
    systemd-analyze verify $unit > /run/said 2>&1
    grep flowspec- /run/said || true  # systemd 249 also finds fault with Ubuntu's own units
done
sed -i 's/WatchdogSec/WatchdogSecs/' {paths.UNITS}/{paths.DRAFT_UNIT}
systemd-analyze verify {paths.DRAFT_UNIT} 2>&1 | grep flowspec-
rm /run/said
{gone}""")
    [fault] = said.splitlines()  # the one that was made
    assert "WatchdogSecs" in fault

"""Boards that pass for Jetsons: Ubuntu 22.04 with Python 3.10, systemd 249, torch 2.8.0 as JetPack 6.2 has
them, and the files, tools and troubles of a Jetson (``tests/kits/jetson``, copied onto each board's disk).

What they compute they compute on their CPU: torch is a CUDA build that finds no GPU (``kits.cuda_stubs``).
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flowspec_edge.boards.commands import search_path
from kits import board_images, container_boards

PASSWORD = "jetson"  # of container_boards.USER, who may use sudo with it
FILES = Path(__file__).parent / "jetson"
_TOOLS = (("gcc", "gcc"), ("readelf", "binutils"), ("nm", "binutils"), ("dpkg-deb", "dpkg"))
_BASE = ("systemd", "systemd-sysv", "dbus", "openssh-server", "python3", "sudo", "iproute2", "rsync", "kmod",
         "procps", "ca-certificates")
JAMMY = board_images.Release(
    "jammy", "3.10", "http://archive.ubuntu.com/ubuntu", "main,universe",
    ("pool/main/u/ubuntu-keyring/ubuntu-keyring_2021.03.26_all.deb",
     "0d0e7ed6b112f5d03eabf3c7eb01ebdacf9c57714b279e90495cfc58c8c4520f"))
_ACCOUNT = f"""
groupadd --force --system render
useradd --create-home --shell /bin/bash --groups sudo,video,render {container_boards.USER}
echo '{container_boards.USER}:{PASSWORD}' | chpasswd
rm /etc/ssh/ssh_host_*
printf 'PasswordAuthentication no\\nUseDNS no\\n' > /etc/ssh/sshd_config.d/board.conf
systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer motd-news.timer
systemctl mask e2scrub_all.timer fstrim.timer
: > /etc/machine-id
"""
ORIN = board_images.Recipe(
    name="orin", machine=platform.machine(), release=JAMMY, cuda=False,
    packages=(*_BASE, "systemd-timesyncd"),
    wheels=("torch==2.8.0", "numpy==1.26.4",
            *board_images.pinned("3.10", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec",
                             "filelock", "typing-extensions", "setuptools")),
    script=_ACCOUNT + """
cd /tmp
for name in nvidia-l4t-core nvidia-l4t-cuda nvidia-l4t-kernel; do
    mkdir -p $name/DEBIAN
    printf 'Package: %s\\nVersion: 36.4.3-20250107174145\\nArchitecture: all\\n' $name > $name/DEBIAN/control
    printf 'Maintainer: NVIDIA Corporation\\nDescription: an empty package\\n' >> $name/DEBIAN/control
    dpkg-deb --build $name
    dpkg --install $name.deb
    rm -r $name $name.deb
done
# As on the boards, where its version has no +cu128.
sed -i "s/+cu128//" /usr/local/lib/python3.10/dist-packages/torch/version.py
python3 -m compileall -q -j 2 /usr/local/lib/python3.10/dist-packages || true
""")
# Debian 11: systemd 247, Python 3.9; no torch, for no torch of today is for it.
OLD = board_images.Recipe(
    name="bullseye", machine=platform.machine(), release=board_images.Release("bullseye", "3.9"),
    packages=_BASE, wheels=(), script=_ACCOUNT)


# Links in /etc/systemd/system: a desktop is the default, and what L4T enables.
UNITS = {"default.target": "/lib/systemd/system/graphical.target",
         "display-manager.service": "/etc/systemd/system/gdm.service",
         "graphical.target.wants/gdm.service": "/etc/systemd/system/gdm.service",
         "multi-user.target.wants/nvzramconfig.service": "/etc/systemd/system/nvzramconfig.service",
         "sysinit.target.wants/kernel-files.service": "/etc/systemd/system/kernel-files.service"}


@dataclass(frozen=True)
class Model:
    """A board's model as its device tree has it, and its memory as the kernel sees it, KiB."""

    name: str
    memory_kb: int


ORIN_NX = Model("NVIDIA Jetson Orin NX Engineering Reference Developer Kit Super", 15656 * 1024)
ORIN_NANO = Model("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", 7620 * 1024)


class Orins(container_boards.Fleet):
    """An Orin NX, orin-0, and three Orin Nanos as they are after flashing; with ``old``, orin-4: a Debian 11.

    Their host names are still "ubuntu", a desktop runs, zram is on, and sudo asks for a password.
    """

    def __init__(self, directory: Path, old: bool = False) -> None:
        self._models = [ORIN_NX, ORIN_NANO, ORIN_NANO, ORIN_NANO]
        super().__init__(directory, len(self._models) + old, [ORIN] * len(self._models) + [OLD] * old)

    def name(self, board: int) -> str:
        return f"orin-{board}"

    def start(self, board: int, wait: bool = True) -> None:
        self._cable(board, "up")
        super().start(board, wait)

    def cut_off(self, board: int) -> None:
        """Take a board's power away, so that its address does not answer: its network stays else."""
        super().cut_off(board)
        self._cable(board, "down")

    def _cable(self, board: int, state: str) -> None:
        link = ["ip", "link", "set", self._bed.interface(board), state]
        subprocess.run(self._bed.command(board, link), check=True, env={"PATH": search_path()})

    def _prepare(self, board: int) -> None:
        super()._prepare(board)
        disk = self.directory / self.name(board) / "disk"
        (disk / "etc/hostname").write_text("ubuntu\n")
        (disk / "etc/hosts").write_text("127.0.0.1\tlocalhost\n127.0.1.1\tubuntu\n")
        if board < len(self._models):
            model = self._models[board]
            shutil.copytree(FILES, disk, symlinks=True, dirs_exist_ok=True)
            for link, target in UNITS.items():
                path = disk / "etc/systemd/system" / link
                path.parent.mkdir(exist_ok=True)
                path.symlink_to(target)
            (disk / "etc/lies").mkdir()
            (disk / "etc/lies/model").write_text(model.name)
            (disk / "etc/lies/ntp").write_text("yes\n")
            (disk / "etc/lies/memory_kb").write_text(str(model.memory_kb))


@cache
def why_no_orins() -> str:
    """Why there can be no such boards; empty if there can.

    The distributions' servers count, unlike for ``network_beds.needs``: where they cannot be reached, CI goes on.
    """
    if lacking := board_images.lacking(_TOOLS) or container_boards.why_no_fleet():
        return lacking
    for recipe in (ORIN, OLD):
        release = f"{recipe.release.mirror}/dists/{recipe.release.codename}/Release"
        if not recipe.place.is_dir():
            try:
                urllib.request.urlopen(release, timeout=30).close()
            except OSError as error:
                return f"{release} cannot be had: {error}"
    return ""

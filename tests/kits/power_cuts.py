"""Boards that lose what was not synced when their power is cut.

The writable disk of each is an ext4 file system in an image file, mounted so that the kernel commits its
journal when a program asks for it, and else after ten minutes.  A power cut copies the image while it is
still mounted: the copy has what reached the block device, and no more.  The board boots from the copy.

ext4 allocates blocks when it writes data back.  So a journal commit, which the fsync of any file brings
about, makes the names of all files durable, and leaves those without synced data empty: ``names`` cuts the
power right after such a commit, which is the worst moment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kits.container_boards import Fleet

_SIZE = "4G"  # of an image, which is sparse
# Boards share this machine's cores: torch's threads would wait for one another actively.
_ONE_THREAD = "[Manager]\nDefaultEnvironment=OMP_NUM_THREADS=1\n"
_MOUNT = 'mount -o loop,commit=600 "{image}" "{store}"'
# Before the board's own programs in root's and in ssh's PATH; each becomes its own name's.
_HOLDABLE = ("mv", "sha256sum", "sudo", "systemctl", "systemd-run")
_HOLD = "/run/hold"  # WHEN NAME PATTERN; gone when the board is off, or the command may go on
_HELD = "/run/held"  # is not empty when it does: the number of its process
_RECORD = "/run/record"  # a line for each of those commands, while the file is there
_WRAPPER = f"""#!/bin/sh
name="${{0##*/}}"
[ ! -e {_RECORD} ] || printf '%s ' "$name" "$@" | tr '\\n' ' ' | sed 's/$/\\n/' >> {_RECORD}
status=none
if read -r when held pattern 2>/dev/null < {_HOLD} && [ "$held" = "$name" ]; then
    case "$*" in $pattern)
        [ $when = before ] || {{ /usr/bin/$name "$@"; status=$?; }}
        echo $$ > {_HELD}
        while [ -e {_HOLD} ]; do sleep 0.1; done
    esac
fi
[ $status = none ] || exit $status
exec /usr/bin/$name "$@"
"""


class PowerFleet(Fleet):
    """A fleet whose boards' power can be cut at a moment that a test chooses.

    ``snapshot``: the directory of another one whose boards were switched off.  These begin with the disks of
    those, over which they have their own.
    """

    def __init__(self, directory: Path, boards: int = 5, snapshot: Path | None = None) -> None:
        self._snapshot = snapshot
        if snapshot:
            for name in ("key", "key.pub", "known_hosts"):
                shutil.copy(snapshot / name, directory / name)
        super().__init__(directory, boards)

    def hold(self, board: int, when: str, command: str, pattern: str) -> None:
        """Have the next command on the board whose arguments match a shell pattern not return until
        ``let_go``.

        when     "before": it does not do anything either; "after": it has done its work
        command  one of ``mv``, ``sha256sum``, ``sudo``, ``systemctl``, ``systemd-run``
        """
        assert command in _HOLDABLE
        self.shell(board, f"echo '{when} {command} {pattern}' > {_HOLD}; > {_HELD}; chmod 666 {_HELD}")

    def let_go(self, board: int) -> None:
        """The held command goes on, whether its connection is still there or not."""
        self.shell(board, f"rm -f {_HOLD}")

    def record(self, board: int) -> None:
        """Note each of the holdable commands from now on."""
        self.shell(board, f"> {_RECORD}; chmod 666 {_RECORD}")

    def recorded(self, board: int) -> list[str]:
        """Those commands, each a line, and no more from now on."""
        return self.shell(board, f"cat {_RECORD}; rm {_RECORD}").splitlines()

    def held(self, board: int, deploy: subprocess.Popen[str]) -> None:
        """Wait until that command holds; ``deploy`` must not end before."""
        while not self.shell(board, f"timeout 1 sh -c 'until [ -s {_HELD} ]; do sleep 0.1; done' && echo held"
                                    " || true"):
            assert deploy.poll() is None, deploy.communicate()

    def kill_held(self, board: int) -> None:
        """The held command is killed, and what it began goes on alone."""
        self.shell(board, f"kill -KILL $(cat {_HELD}); rm -f {_HOLD}")

    def cut_power(self, board: int, names: bool = True) -> None:
        """The board is off, and only what reached its disk is there when it is started.

        names  whether the file system's journal was committed right before
        """
        if names:
            self.shell(board, "echo > /var/tmp/synced; sync /var/tmp/synced")
        image, copy = self._image_file(board), self._image_file(board).with_suffix(".copy")
        # Holds the mount: an end of the last process would unmount the disk, and so write everything.
        mounts = os.open(f"/proc/{self.leader(board)}/ns/mnt", os.O_RDONLY)
        try:
            self.cut_off(board)
            subprocess.run(["cp", "--sparse=always", str(image), str(copy)], check=True)
        finally:
            os.close(mounts)
        copy.replace(image)  # the kernel still writes to the file that had this name

    def switch_off(self, board: int) -> None:
        super().switch_off(board)
        # The last process' end unmounts the disk, which takes a moment.
        deadline = time.monotonic() + 60
        while subprocess.run(["losetup", "-j", str(self._image_file(board))], check=True, capture_output=True
                             ).stdout:
            assert time.monotonic() < deadline, f"the disk of board {board} stays mounted"
            time.sleep(0.1)  # polled: losetup does not tell when a mount lets go

    def _disk(self, board: int) -> tuple[Path, str, list[Path]]:
        place = self.directory / self.name(board)
        store, below = place / "store", place / "below"
        mount = _MOUNT.format(image=self._image_file(board), store=store)
        if self._snapshot is None:
            return store, mount, []
        kept = self._snapshot / self.name(board) / "image"
        return store, f'{mount}; mount -o loop,ro,noload "{kept}" "{below}"', [below / "disk"]

    def _prepare(self, board: int) -> None:
        place = self.directory / self.name(board)
        if self._snapshot:
            for name in ("disk", "work", "root", "below"):
                (place / name).mkdir(parents=True, mode=0o755)
        else:
            super()._prepare(board)
        seed = place / "seed"
        seed.mkdir()
        (place / "store").mkdir()
        for name in ("disk", "work"):
            (place / name).rename(seed / name)
        settings = seed / "disk/etc/systemd/system.conf.d"
        settings.mkdir(parents=True)
        (settings / "threads.conf").write_text(_ONE_THREAD)
        if not self._snapshot:
            _add_wrappers(seed / "disk")
        subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(seed), str(self._image_file(board)), _SIZE],
                       check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(seed)

    def _image_file(self, board: int) -> Path:
        return self.directory / self.name(board) / "image"


def _add_wrappers(disk: Path) -> None:
    for directory in ("usr", "usr/local", "usr/local/bin", "usr/local/sbin"):
        (disk / directory).mkdir()
    for command in _HOLDABLE:
        for directory in ("bin", "sbin"):
            wrapper = disk / "usr/local" / directory / command
            wrapper.write_text(_WRAPPER)
            wrapper.chmod(0o755)


@contextmanager
def power_fleet(directory: Path, boards: int, snapshot: Path | None = None) -> Iterator[PowerFleet]:
    """Boards that run while the block does; ``directory`` is empty, and their disks are in it."""
    running = PowerFleet(directory, boards, snapshot)
    try:
        yield running
    finally:
        running.close()

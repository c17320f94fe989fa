"""The boards' instruction set on this machine: an arm64 Debian with PyTorch, its programs emulated.

The kernel is told of the emulator inside a user namespace of its own, where that is forgotten when
the last process in it ends (Linux 6.7): nothing of the machine changes.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import imagekit

from flowspec_edge.fleet.commands import search_path

REQUIREMENTS = imagekit.REPOSITORY / "tests" / "aarch64.txt"
_NATIVE = platform.machine() == "aarch64"
_EMULATOR = "qemu-aarch64-static"
_TOOLS = (("debootstrap", "debootstrap"), ("dpkg-deb", "dpkg"), ("unshare", "util-linux"),
          ("setpriv", "util-linux"), *([] if _NATIVE else [(_EMULATOR, "qemu-user-static")]))
# An ELF file's first bytes: 64 bits, little-endian, executable or shared, for that machine.
_MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"

BOARD = imagekit.Recipe(
    name="aarch64", machine="aarch64", packages=("python3",), configured=False,
    wheels=[line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")])

# $1: what binfmt_misc is to know, or nothing; $2: a script that goes on.
_TELL = r"""
if [ -n "$1" ]; then
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    printf '%s' "$1" > /proc/sys/fs/binfmt_misc/register
fi
shift
exec "$@"
"""
_ENTER = r"""
root=$1; repository=$2; shift 2
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$repository" "$root/srv"
mount -o remount,bind,ro "$root/srv"
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 HOME=/tmp OMP_NUM_THREADS=1 \
    PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis \
    chroot "$root" sh -c 'cd /srv && exec "$@"' sh "$@"
"""


@cache
def why_no_aarch64() -> str:
    """Why this machine cannot run the boards' programs; empty if it can."""
    if lacking := imagekit.lacking(_TOOLS):
        return lacking
    done = _emulating(["true"], 60)
    return f"the kernel cannot be told of an emulator: {done.stdout.strip()}" if done.returncode else ""


def run(argv: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run ``argv`` in the root, from this repository, which it cannot write to; stdout has stderr, too."""
    root = imagekit.image(BOARD)
    return _emulating(["sh", "-ec", _ENTER, "sh", str(root), str(imagekit.REPOSITORY), *argv], timeout)


def _emulating(argv: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run ``argv`` where programs for aarch64 run, in mounts and processes of its own."""
    emulator = imagekit.which(_EMULATOR)
    rule = "" if _NATIVE else f":qemu-aarch64:M::{_MAGIC}:{_MASK}:{emulator}:OCF"
    command = ["unshare", "--user", "--", "sh", "-c", 'echo; read go; exec "$@"', "sh",
               "setpriv", "--pdeathsig", "KILL", "--",
               "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--",
               "sh", "-ec", _TELL, "sh", rule, *argv]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, env={**os.environ, "PATH": search_path()}) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it is in its user namespace, and waits for users
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text("0 0 65536\n")
        try:
            said, _ = process.communicate("\n", timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(argv, process.returncode, said)

"""On the boards' instruction set, with JetPack 6's PyTorch and the oldest of everything else: an arm64 Debian
whose programs are emulated.

The kernel is told of the emulator inside a user namespace of its own, where that is forgotten when
the last process in it ends (Linux 6.7): nothing of the machine changes.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from kits import board_images, network_beds
from packaging.requirements import Requirement
from packaging.version import Version

from flowspec_edge.boards.commands import search_path

REQUIREMENTS = board_images.REPOSITORY / "tests" / "aarch64.txt"
_NATIVE = platform.machine() == "aarch64"
_EMULATOR = "qemu-aarch64-static"
_TOOLS = (("debootstrap", "debootstrap"), ("dpkg-deb", "dpkg"), ("unshare", "util-linux"),
          ("setpriv", "util-linux"), *([] if _NATIVE else [(_EMULATOR, "qemu-user-static")]))
# An ELF file's first bytes: 64 bits, little-endian, executable or shared, for that machine.
_MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"

BOARD = board_images.Recipe(
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
    if lacking := board_images.lacking(_TOOLS):
        return lacking
    done = _emulating(["true"], 60)
    return f"the kernel cannot be told of an emulator: {done.stdout.strip()}" if done.returncode else ""


def run(argv: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run ``argv`` in the root, from this repository, which it cannot write to; stdout has stderr, too."""
    root = board_images.image(BOARD)
    return _emulating(["sh", "-ec", _ENTER, "sh", str(root), str(board_images.REPOSITORY), *argv], timeout)


def _emulating(argv: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run ``argv`` where programs for aarch64 run, in mounts and processes of its own."""
    emulator = board_images.which(_EMULATOR)
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


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Every program is emulated, and importing torch alone takes half a minute: a few of each kind.
SMOKE = ("tests/tree", "tests/transport/test_codec.py",
         "tests/stage/quant/test_quant.py::test_a_linear_multiplies_by_what_is_stored",
         "tests/drivers/processes/test_process_cluster.py::test_greedy_text_is_that_of_transformers[flowspec]")
PATIENCE = 3000.0  # seconds


@pytest.mark.aarch64
@network_beds.needs("aarch64 programs", why_no_aarch64())
def test_the_smoke_of_the_tests() -> None:
    machine = run(["python3", "-c", "import platform; print(platform.machine())"], PATIENCE)
    assert machine.stdout.strip() == "aarch64"
    # Examples may take as long as they like; there is neither a GPU nor bitsandbytes.
    done = run(["python3", "-m", "pytest", "-p", "no:cacheprovider", "--hypothesis-profile=ci",
                           "--durations=10", "-k", "not cuda and not nf4 and not fp4", *SMOKE], PATIENCE)
    print(done.stdout)
    assert done.returncode == 0
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_what_it_installs_is_the_oldest_that_is_allowed() -> None:
    """uv writes the list with the lowest versions: where pyproject.toml changes, it is made anew."""
    project = tomllib.loads((board_images.REPOSITORY / "pyproject.toml").read_text())["project"]
    listed = dict(line.split("==") for line in BOARD.wheels)
    floors = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    del floors["torch"]  # what JetPack 6 has, not the oldest
    del floors["tomli"]  # for Python 3.10 alone
    oldest = {name: next(clause.version for clause in floor if clause.operator == ">=")
              for name, floor in floors.items()}
    assert {name: Version(listed[name]) for name in oldest} == {
        name: Version(version) for name, version in oldest.items()}

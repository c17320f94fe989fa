"""Root filesystems for the tests of whole boards: made once with debootstrap, then kept.

They lie under FLOWSPEC_CACHE (~/.cache/flowspec-tests), by a digest of what goes into them.  `rm -rf`
there is always safe while no test runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from flowspec_edge.fleet.commands import search_path

REPOSITORY = Path(__file__).resolve().parent.parent
_MIRROR = "http://deb.debian.org/debian"
_SUITE = "bookworm"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # asked where pip's own places have no CPU build


@dataclass(frozen=True)
class Recipe:
    """What a root filesystem is made of: all of it, for its digest names the result."""

    name: str
    arch: str  # as Debian calls it
    packages: Sequence[str]
    wheels: Sequence[str]  # requirements, for the root's own Python
    platform: str  # the wheels' platform tag
    constraints: str  # the text of a constraints file for them
    site: str  # the directory that they go to
    script: str  # run in the root at the end

    @property
    def place(self) -> Path:
        """Where the finished root is, or will be."""
        digest = hashlib.sha256(repr((_SUITE, astuple(self))).encode()).hexdigest()[:16]
        return cache() / f"{self.name}-{digest}"


def cache() -> Path:
    """The directory of all of them."""
    return Path(os.environ.get("FLOWSPEC_CACHE") or Path.home() / ".cache" / "flowspec-tests")


def pins(*names: str) -> str:
    """The lines of deploy/constraints.txt for those packages."""
    lines = (REPOSITORY / "deploy" / "constraints.txt").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0] in names)


def lacking(tools: Sequence[tuple[str, str]]) -> str:
    """Why roots cannot be made or used here, by (tool, Debian package); empty if they can."""
    if os.geteuid() != 0:
        return "only root may make a root filesystem and boot it"
    for tool, package in tools:
        if shutil.which(tool, path=search_path()) is None:
            return f"{tool} is missing (Debian package {package})"
    return ""


def image(recipe: Recipe) -> Path:
    """The root filesystem of ``recipe``, made now if it is not there.  Nobody writes into it.

    What the making said is in a .log beside it.  RuntimeError with the end of that if it fails.
    """
    place = recipe.place
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.parent / f"{recipe.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs do not make the same one at once
        if place.is_dir():
            return place
        building = place.with_suffix(".building")
        remove(building)  # half made by a run that was ended
        log = place.with_suffix(".log")
        with log.open("w") as out:
            try:
                _make(recipe, building, out.fileno())
            except subprocess.CalledProcessError as error:
                end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise RuntimeError(f"no {recipe.name} image: {error}\n{end}") from error
        building.rename(place)
    return place


def remove(path: Path) -> None:
    """Remove a file or a whole root."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def inside(root: Path, command: Sequence[str]) -> list[str]:
    """What to run for ``command`` to run in ``root``, with /proc and /dev, in mounts of its own."""
    return ["unshare", "--mount", "--", "sh", "-ec",
            'root=$1; shift; mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; '
            'exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 chroot "$root" "$@"',
            "sh", str(root), *command]


def _make(recipe: Recipe, root: Path, out: int) -> None:
    def run(command: Sequence[str]) -> None:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=True,
                       env={**os.environ, "PATH": search_path()})

    # In mounts of its own: where it is killed, nothing stays mounted.
    run(["unshare", "--mount", "--", "debootstrap", f"--arch={recipe.arch}", "--variant=minbase",
         f"--include={','.join(recipe.packages)}", _SUITE, str(root), _MIRROR])
    constraints = root.parent / f"{recipe.name}.constraints"
    constraints.write_text(recipe.constraints)
    version = next((root / "usr/bin").glob("python3.*[0-9]")).name.removeprefix("python")
    install = [sys.executable, "-m", "pip", "install", "--target", f"{root}{recipe.site}", "--no-compile",
               "--python-version", version, "--platform", recipe.platform, "--only-binary=:all:",
               "--constraint", str(constraints), *recipe.wheels]
    try:
        run(install)
    except subprocess.CalledProcessError:
        run([*install, "--upgrade", "--extra-index-url", _TORCH_INDEX])
    constraints.unlink()
    run(inside(root, ["sh", "-exc", recipe.script]))
    for archive in (root / "var/cache/apt/archives").glob("*.deb"):
        archive.unlink()

"""Root filesystems for the tests of whole boards: made once with debootstrap, then kept.

They lie under FLOWSPEC_CACHE (~/.cache/flowspec-tests), by a digest of what goes into them.  `rm -rf`
there is always safe while no test runs.
"""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from packaging.requirements import Requirement

from flowspec_edge.boards.commands import search_path
from kits import cuda_stubs

DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
REPOSITORY = Path(__file__).resolve().parent.parent.parent
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # asked where pip's own places have no CPU build


@dataclass(frozen=True)
class Release:
    """A distribution's release, and where debootstrap finds it."""

    codename: str
    python: str  # its own, "3.11"
    mirror: str = "http://deb.debian.org/debian"
    components: str = "main"
    # The package with the keys that sign it, below the mirror, and that package's sha256; empty where the
    # keys are this machine's own.
    keys: tuple[str, str] = ("", "")


BOOKWORM = Release("bookworm", "3.11")


@dataclass(frozen=True)
class Recipe:
    """What a root filesystem is made of: all of it, for its digest names the result."""

    name: str
    machine: str  # as the kernel calls it: a key of DEBIAN
    packages: Sequence[str]
    wheels: Sequence[str]  # requirements, for the root's own Python
    constraints: str = ""  # for them: the text of a constraints file; empty: they are all there is
    script: str = ""  # run in the root at the end
    configured: bool = True  # by the packages' own scripts, for which this machine must run its programs
    release: Release = BOOKWORM
    cuda: bool = True  # False: the wheels' torch is linked to CUDA, which the root gets as stubs (cuda_stubs)

    @property
    def place(self) -> Path:
        """Where the finished root is, or will be."""
        digest = hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:16]
        return cache() / f"{self.name}-{digest}"


def cache() -> Path:
    """The directory of all of them."""
    return Path(os.environ.get("FLOWSPEC_CACHE") or Path.home() / ".cache" / "flowspec-tests")


def pins(*names: str) -> str:
    """The lines of deploy/constraints.txt for those packages."""
    lines = (REPOSITORY / "deploy" / "constraints.txt").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0] in names)


def pinned(python: str, *names: str) -> list[str]:
    """What deploy/constraints.txt has for those packages and that Python: numpy==1.26.4."""
    found = [Requirement(line) for line in pins(*names).splitlines()]
    return [f"{need.name}{need.specifier}" for need in found
            if need.marker is None or need.marker.evaluate({"python_version": python})]


def which(tool: str) -> str:
    """The path of a tool; empty where it is missing."""
    return shutil.which(tool, path=search_path()) or ""


def lacking(tools: Sequence[tuple[str, str]]) -> str:
    """Why roots cannot be made or used here, by (tool, Debian package); empty if they can."""
    if os.geteuid() != 0:
        return "only root may make a root filesystem and boot it"
    for tool, package in tools:
        if not which(tool):
            return f"{tool} is missing (Debian package {package})"
    return ""


def image(recipe: Recipe) -> Path:
    """The root filesystem of ``recipe``, made now if it is not there.  It is never written to.

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
    release = recipe.release
    with tempfile.TemporaryDirectory() as keys:
        run(["unshare", "--mount", "--", "debootstrap", f"--arch={DEBIAN[recipe.machine]}",
             "--variant=minbase", f"--components={release.components}",
             *([] if recipe.configured else ["--foreign"]), *_keyring(release, Path(keys), run),
             f"--include={','.join(recipe.packages)}", release.codename, str(root), release.mirror])
    archives = sorted((root / "var/cache/apt/archives").glob("*.deb"))
    if not recipe.configured:
        for archive in archives:
            run(["sh", "-ec", 'dpkg-deb --fsys-tarfile "$0" | tar -x --keep-directory-symlink -C "$1"',
                 str(archive), str(root)])
        for name in ("passwd", "group"):
            shutil.copy(root / f"usr/share/base-passwd/{name}.master", root / "etc" / name)
        (root / "srv").mkdir(exist_ok=True)
    for archive in archives:
        archive.unlink()
    _install(recipe, root, run)
    if recipe.script:
        run(inside(root, ["sh", "-exc", recipe.script]))


def _keyring(release: Release, place: Path, run: Callable[[Sequence[str]], None]) -> list[str]:
    """debootstrap's option for keys that this machine does not have: by way of a digest that we do."""
    package, digest = release.keys
    if not package:
        return []
    with urllib.request.urlopen(f"{release.mirror}/{package}", timeout=60) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != digest:
        raise RuntimeError(f"{release.mirror}/{package} is not the package that it was")
    (place / "keys.deb").write_bytes(data)
    run(["dpkg-deb", "--extract", str(place / "keys.deb"), str(place)])
    (keyring,) = place.glob("usr/share/keyrings/*-archive-keyring.gpg")
    return [f"--keyring={keyring}"]


def _install(recipe: Recipe, root: Path, run: Callable[[Sequence[str]], None]) -> None:
    """Put the wheels where the root's Python finds them: this machine's pip does it."""
    if not recipe.wheels:
        return
    python = recipe.release.python
    site = root / f"usr/local/lib/python{python}/dist-packages"
    install = [sys.executable, "-m", "pip", "install", "--target", str(site), "--no-compile",
               "--python-version", python, "--only-binary=:all:"]
    for tag in ("_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014"):
        install += ["--platform", f"manylinux{tag}_{recipe.machine}"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(recipe.constraints)
        constraints.flush()
        install += ["--constraint", constraints.name] if recipe.constraints else ["--no-deps"]
        try:
            run([*install, *recipe.wheels])
        except subprocess.CalledProcessError:
            run([*install, "--upgrade", "--extra-index-url", _TORCH_INDEX, *recipe.wheels])
    if not recipe.cuda:
        cuda_stubs.stub(site / "torch" / "lib")
        remove(site / "torch" / "include")
    if ".".join(map(str, sys.version_info[:2])) == python:  # else each start of it compiles what it imports
        # Some files are for newer Pythons: those fail, and are never imported.
        compileall.compile_dir(site, quiet=2, stripdir=str(root))

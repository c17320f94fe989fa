"""The wheels that boards get: which they are, and that they are here.

Knows what this package needs on a board beside torch, in the versions of ``deploy/constraints.txt``, and
how pip gets it where it is missing.  Does not know how wheels reach a board.  A board's torch is the
one that was made for it: neither it nor what only it needs is ever among them.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.commands import last_line
from flowspec_edge.fleet.desired import Environment
from flowspec_edge.resources import resource_dir

_OWN = "flowspec-edge"
_TORCH = "torch"  # the board's own
_GLIBC = 35  # 2.35: Ubuntu 22.04, JetPack 6


@dataclass(frozen=True, order=True)
class Target:
    """A kind of board: python "3.10", machine "aarch64" or "x86_64", its torch's version."""

    python: str
    machine: str
    torch: str

    def __str__(self) -> str:
        return f"Python {self.python} on {self.machine}"

    def marks(self) -> dict[str, str]:
        """The environment that requirements' markers are judged by."""
        return {"python_version": self.python, "python_full_version": f"{self.python}.0",
                "implementation_name": "cpython", "implementation_version": f"{self.python}.0",
                "platform_python_implementation": "CPython", "os_name": "posix", "sys_platform": "linux",
                "platform_system": "Linux", "platform_machine": self.machine, "platform_release": "",
                "platform_version": "", "extra": ""}

    def platforms(self) -> list[str]:
        """The platform tags that run there, the best first."""
        names = [*(f"manylinux_2_{minor}" for minor in range(_GLIBC, 4, -1)),
                 "manylinux2014", "manylinux2010", "manylinux1", "linux"]
        return [f"{name}_{self.machine}" for name in names]

    def tags(self) -> dict[Tag, int]:
        """The wheels' tags that run there; the lower the number, the better."""
        version = tuple(int(part) for part in self.python.split("."))
        found = [*cpython_tags(version, platforms=self.platforms()),
                 *compatible_tags(version, f"cp{self.python.replace('.', '')}", self.platforms())]
        return {tag: number for number, tag in reversed([*enumerate(found)])}


def fill(wheelhouse: Path, targets: Iterable[Target],
         on_progress: Callable[[str], None] = lambda text: None) -> None:
    """Get what boards of such kinds need and ``wheelhouse`` lacks, by pip.

    This package's own wheel must be there (``build_wheel``).  Where nothing is missing, the network is
    not touched.  FlowspecError in pip's words if something cannot be had.
    """
    for target in sorted(set(targets)):
        _check_torch(wheelhouse, target)
        missing = [*_walk(wheelhouse, target)[1]]
        while missing:
            on_progress(f"{target}: getting {len(missing)} packages")
            _download(wheelhouse, target, missing)
            still = _walk(wheelhouse, target)[1]
            if {str(need) for need in still} & {str(need) for need in missing}:
                raise FlowspecError(f"pip has put no wheel of {still[0]} for {target} into {wheelhouse}")
            missing = still


def environment(wheelhouse: Path, target: Target, python: str = "python3") -> Environment:
    """What a board of that kind gets; ``python``: its own interpreter.

    UsageError, which says how to go on, if a wheel is missing.
    """
    _check_torch(wheelhouse, target)
    wheels, missing = _walk(wheelhouse, target)
    if missing:
        names = ", ".join(str(need) for need in missing[:3]) + (", …" if len(missing) > 3 else "")
        raise UsageError(f"the wheelhouse {wheelhouse} lacks, for {target}: {names}; run it with a network, "
                         "or copy the wheels there")
    digest = hashlib.sha256(f"{target}\ntorch {target.torch}\n".encode())
    for wheel in sorted(wheels):
        digest.update(f"{wheel.name} {_sha256(wheel)}\n".encode())
    return Environment(digest=digest.hexdigest()[:16], wheelhouse=str(wheelhouse),
                       wheels=tuple(sorted(wheel.name for wheel in wheels)), python=python)


def _walk(wheelhouse: Path, target: Target) -> tuple[list[Path], list[Requirement]]:
    """The wheels that are there, beginning with this package's, and what could not be followed."""
    house = _House(wheelhouse, target)
    pins = {need.name: need for need in _constraints(target)}
    wheels: dict[str, Path] = {}
    missing: dict[str, Requirement] = {}
    open_needs = [Requirement(_OWN), Requirement("pip")]
    while open_needs:
        need = open_needs.pop()
        name = canonicalize_name(need.name)
        if name == _TORCH or name in wheels or name in missing:
            continue
        exact = pins.get(name, need)
        if (wheel := house.best(exact)) is None:
            missing[name] = exact
            continue
        wheels[name] = wheel
        open_needs += _needs(wheel, target, need.extras)
    if _OWN in missing:
        raise UsageError(f"the wheelhouse {wheelhouse} has no wheel of {_OWN}")
    return [*wheels.values()], [*missing.values()]


class _House:
    """The wheels of a directory that run on one kind of board."""

    def __init__(self, wheelhouse: Path, target: Target) -> None:
        self._found: dict[str, list[tuple[Version, int, Path]]] = {}
        order = target.tags()
        for path in wheelhouse.glob("*.whl"):
            try:
                name, version, _, tags = parse_wheel_filename(path.name)
            except InvalidWheelFilename as error:
                raise UsageError(f"{path} is not named as a wheel is: remove it") from error
            if runs := [order[tag] for tag in tags if tag in order]:
                self._found.setdefault(name, []).append((version, -min(runs), path))

    def best(self, need: Requirement) -> Path | None:
        """The newest wheel that ``need`` allows, and of those the one best made for the board."""
        fit = [entry for entry in self._found.get(canonicalize_name(need.name), ())
               if need.specifier.contains(entry[0], prereleases=True)]
        return max(fit)[2] if fit else None


def _needs(wheel: Path, target: Target, extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """What a wheel says that it needs on such a board."""
    for line in _metadata(wheel).get_all("Requires-Dist", ()):
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({**target.marks(), "extra": extra})
                                      for extra in ("", *extras)):
            yield need


def _metadata(wheel: Path) -> Message:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
            return message_from_bytes(archive.read(next(names)))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise FlowspecError(f"{wheel} is no whole wheel: remove it, and it is got again") from error


def _check_torch(wheelhouse: Path, target: Target) -> None:
    own = _House(wheelhouse, target).best(Requirement(_OWN))
    for need in _needs(own, target) if own else ():
        if need.name == _TORCH and not need.specifier.contains(target.torch, prereleases=True):
            raise UsageError(f"a board with torch {target.torch}: this flowspec needs torch{need.specifier}")


def _constraints(target: Target) -> Iterator[Requirement]:
    text = (resource_dir("deploy") / "constraints.txt").read_text()
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate(target.marks()):
                need.marker = None  # it has been judged, and by the board
                yield need


def _download(wheelhouse: Path, target: Target, needs: Iterable[Requirement]) -> None:
    wheelhouse.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--implementation", "cp", "--python-version", target.python,
               *(part for tag in target.platforms() for part in ("--platform", tag)),
               "--dest", str(wheelhouse), *(str(need) for need in needs)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        said = (lines[-1] if lines else last_line(done.stderr)).removeprefix("ERROR: ")
        raise FlowspecError(f"pip cannot get the wheels for {target}: "
                            + (said or f"exit code {done.returncode}"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

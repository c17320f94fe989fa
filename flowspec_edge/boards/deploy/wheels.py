"""The boards' wheels: this package and its dependencies, except torch.

``deploy/boards.txt`` locks the packages and their versions; pip downloads missing wheels.  A board keeps its own
torch, so neither torch nor a package that only torch requires is among the wheels.  This package's wheel is built,
reproducibly, from the source tree or the installed files.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

import flowspec_edge
from flowspec_edge.boards.commands import last_line
from flowspec_edge.boards.deploy.actions import Environment
from flowspec_edge.boards.probe.board import l4t_of
from flowspec_edge.boards.probe.facts import SystemFacts
from flowspec_edge.errors import FlowspecError, UsageError, ended
from flowspec_edge.util.interpreter import module_command
from flowspec_edge.util.resources import resource_dir

_PACKAGE = "flowspec-edge"
_WHEN = (2020, 2, 2, 0, 0, 0)  # file date in rebuilt wheels, for reproducibility
# Files that an installer adds, besides .pyc files and scripts.
_INSTALLER_FILES = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json")
_GLIBC = 35  # 2.35: Ubuntu 22.04, JetPack 6
_BITSANDBYTES = "bitsandbytes"
_NO_BITSANDBYTES = (
    "weights in nf4 or fp4 need bitsandbytes, whose wheel on the package index is not built for a Jetson's "
    "GPU: build it with the stage kernels of Dockerfile.jetson and put its wheel, "
    'bitsandbytes-{version}-…-linux_{machine}.whl, into {house}, or use dtype = "int4", which needs none')


@dataclass(frozen=True, order=True)
class WheelTarget:
    """A kind of board, as far as its wheels depend on it."""

    python: str  # "3.10"
    machine: str  # "aarch64" or "x86_64"
    torch: str  # version of the board's torch
    build: str = ""  # a digest that distinguishes builds of torch's version
    l4t: bool = False
    four_bit: bool = False  # nf4 or fp4 weights, which need bitsandbytes

    @classmethod
    def from_facts(cls, facts: SystemFacts, dtype: str) -> WheelTarget:
        """Return the target of a board with these facts; ``dtype``: of the board's weights."""
        return cls(".".join(map(str, facts.python[:2])), facts.machine, facts.torch.version,
                   facts.torch.build, l4t=bool(l4t_of(facts)),
                   four_bit=dtype in ("nf4", "fp4"))

    def __str__(self) -> str:
        return f"Python {self.python} on {self.machine}"

    def marks(self) -> dict[str, str]:
        """Return the environment for requirement markers (PEP 508)."""
        return {"python_version": self.python, "python_full_version": f"{self.python}.0",
                "implementation_name": "cpython", "implementation_version": f"{self.python}.0",
                "platform_python_implementation": "CPython", "os_name": "posix", "sys_platform": "linux",
                "platform_system": "Linux", "platform_machine": self.machine, "platform_release": "",
                "platform_version": "", "extra": ""}

    def platforms(self) -> list[str]:
        """Return the compatible platform tags, the best first."""
        names = [*(f"manylinux_2_{minor}" for minor in range(_GLIBC, 4, -1)),
                 "manylinux2014", "manylinux2010", "manylinux1", "linux"]
        return [f"{name}_{self.machine}" for name in names]

    def tags(self) -> dict[Tag, int]:
        """Return the compatible wheel tags with their rank; lower is better."""
        version = tuple(int(part) for part in self.python.split("."))
        best_first = [*cpython_tags(version, platforms=self.platforms()),
                      *compatible_tags(version, f"cp{self.python.replace('.', '')}", self.platforms())]
        return {tag: number for number, tag in reversed([*enumerate(best_first)])}


def fill(wheelhouse: Path, targets: Iterable[WheelTarget],
         on_progress: Callable[[str], None] = lambda text: None) -> None:
    """Have pip download the wheels that the boards need and ``wheelhouse`` lacks.

    If none is missing, no network is used.  This package's own wheel must be in the wheelhouse (``build_wheel``).

    Raise FlowspecError with pip's message if pip fails.  Raise UsageError if a Jetson needs bitsandbytes, because its
    wheel must be built for a Jetson.
    """
    for target in sorted(set(targets)):
        if missing := _walk(wheelhouse, target)[1]:
            on_progress(f"{target}: getting {len(missing)} packages")
            _download(wheelhouse, target, missing)
            if still := _walk(wheelhouse, target)[1]:
                raise FlowspecError(f"pip reported no error, but {wheelhouse} still has no wheel of {still[0]} for "
                                    f"{target}: copy one there")


def environment(wheelhouse: Path, target: WheelTarget, python: str = "python3") -> Environment:
    """Return the environment of the wheels that a board needs.

    python  the board's system interpreter

    Raise UsageError if a wheel is missing.
    """
    wheels, missing = _walk(wheelhouse, target)
    if missing:
        names = ", ".join(str(need) for need in missing[:3]) + (", …" if len(missing) > 3 else "")
        raise UsageError(f"the wheelhouse {wheelhouse} lacks, for {target}: {names}; run it with a network, "
                         "or copy the wheels there")
    digest = hashlib.sha256(f"{target}\ntorch {target.torch} {target.build}\n".encode())
    sums = {wheel.name: _sha256(wheel) for wheel in sorted(wheels)}
    for name, sha256 in sums.items():
        digest.update(f"{name} {sha256}\n".encode())
    return Environment(digest.hexdigest()[:16], str(wheelhouse), sums, python)


def _walk(wheelhouse: Path, target: WheelTarget) -> tuple[list[Path], list[Requirement]]:
    """Return the needed wheels that the wheelhouse has, and the requirements that it cannot meet.

    This package's wheel is the first.  Raise UsageError without it.
    """
    house = _House(wheelhouse, target)
    if (package_wheel := house.best(Requirement(_PACKAGE))) is None:
        raise UsageError(f"the wheelhouse {wheelhouse} has no wheel of {_PACKAGE}")
    wheels, missing = [package_wheel], []
    for need in _locked(target):
        wheel = house.best(need)
        if wheel is not None:
            if not zipfile.is_zipfile(wheel):
                raise FlowspecError(f"{wheel} is damaged: remove it, and it is downloaded again")
            wheels.append(wheel)
        elif need.name == _BITSANDBYTES and target.l4t:
            raise UsageError(_NO_BITSANDBYTES.format(
                house=wheelhouse, machine=target.machine, version=str(need.specifier).strip("=")))
        else:
            missing.append(need)
    return wheels, missing


def _locked(target: WheelTarget) -> Iterator[Requirement]:
    """Yield what the lock has for a board, and pip, of any version."""
    for line in (resource_dir("deploy") / "boards.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            need = Requirement(line)
            applies = need.marker is None or need.marker.evaluate(target.marks())
            need.marker = None  # pip would evaluate it for this machine
            if applies and (target.four_bit or need.name != _BITSANDBYTES):
                yield need
    yield Requirement("pip")


class _House:
    def __init__(self, wheelhouse: Path, target: WheelTarget) -> None:
        self._wheels: dict[str, list[tuple[Version, int, Path]]] = {}
        order = target.tags()
        # Package indexes accept only manylinux wheels; so a plain linux wheel was built for such a board.
        local_tags = {tag for tag in order if tag.platform == f"linux_{target.machine}"}
        for path in wheelhouse.glob("*.whl"):
            try:
                name, version, _, tags = parse_wheel_filename(path.name)
            except InvalidWheelFilename as error:
                raise UsageError(f"{path}: this is no wheel's name: remove it") from error
            if target.l4t and name == _BITSANDBYTES:
                tags &= local_tags
            if runs := [order[tag] for tag in tags if tag in order]:
                self._wheels.setdefault(name, []).append((version, -min(runs), path))

    def best(self, need: Requirement) -> Path | None:
        """Return the newest wheel that ``need`` allows, and of those the best for the board."""
        fit = [entry for entry in self._wheels.get(canonicalize_name(need.name), ())
               if need.specifier.contains(entry[0], prereleases=True)]
        return max(fit)[2] if fit else None


def _download(wheelhouse: Path, target: WheelTarget, needs: Iterable[Requirement]) -> None:
    wheelhouse.mkdir(parents=True, exist_ok=True)
    command = module_command(
        "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--implementation", "cp", "--python-version", target.python,
        *(part for tag in target.platforms() for part in ("--platform", tag)),
        "--dest", str(wheelhouse), *(str(need) for need in needs))
    # No deadline: a slow connection may need any time, and pip itself gives up on a silent one.
    completed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if completed.returncode:
        lines = [line for line in completed.stderr.splitlines() if line.startswith("ERROR: ")]
        message = (lines[-1] if lines else last_line(completed.stderr)).removeprefix("ERROR: ")
        raise FlowspecError(f"pip cannot download the wheels for {target}: "
                            + (message or ended(completed.returncode)))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build_wheel(out: Path) -> Path:
    """Write this package's wheel into ``out`` in place of any other version, and return its path.

    Raise FlowspecError, with the builder's message, if the build fails or ``out`` cannot be written.  Raise UsageError
    without a source tree or an installation.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _build(out)
    except OSError as error:
        raise FlowspecError(f"cannot write this flowspec's wheel into {out}: {error.strerror}") from error


def _build(out: Path) -> Path:
    tree = Path(flowspec_edge.__file__).resolve().parent.parent
    # The wheel is built in another directory and renamed, so that the wheelhouse never has half a wheel.
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=out) as directory:
        built_wheel = _from_tree(tree, Path(directory)) if (tree / "pyproject.toml").is_file() else \
            _from_installed(Path(directory))
        wheel = built_wheel.replace(out / built_wheel.name)
    for other in out.glob(f"{_PACKAGE.replace('-', '_')}-*.whl"):
        if other != wheel:
            other.unlink()
    return wheel


def _from_tree(tree: Path, out: Path) -> Path:
    # With the build tools that are installed here, pip needs no network.
    offline = ["--no-build-isolation"] if find_spec("hatchling") else []
    # No deadline: pip gives up on a silent connection, and it builds this package alone.
    command = module_command("pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
                                  *offline, "--wheel-dir", str(out), str(tree))
    completed = subprocess.run(command, env={**os.environ, "SOURCE_DATE_EPOCH": "1580601600"},
                               stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise FlowspecError(f"the wheel of {tree} cannot be built: "
                            + (last_line(completed.stderr) or ended(completed.returncode)))
    return next(out.glob("*.whl"))


def _from_installed(out: Path) -> Path:
    try:
        installed = distribution(_PACKAGE)
    except PackageNotFoundError:
        raise UsageError(f"{_PACKAGE} is neither installed nor in a source tree here: "
                         f"put its wheel into the wheelhouse") from None
    return rebuild(installed, out)


def rebuild(installed: Distribution, out: Path) -> Path:
    """Rebuild the wheel of an installed pure Python distribution from its files."""
    files: dict[str, bytes] = {}
    for entry in installed.files or ():
        path = PurePosixPath(entry)
        if ".." in path.parts or path.suffix == ".pyc" or path.is_absolute():
            continue  # a .pyc file, or a script, which entry_points.txt implies
        if path.parent.name.endswith(".dist-info") and path.name in _INSTALLER_FILES:
            continue
        files[str(path)] = Path(str(entry.locate())).read_bytes()
    info = next((path.partition("/")[0] for path in files if path.endswith(".dist-info/WHEEL")), "")
    if not info:
        raise UsageError(f"the installed {_PACKAGE} does not say what files it has: "
                         "put its wheel into the wheelhouse")
    lines = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    wheel = out / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        # RECORD last, as the wheel specification recommends.
        for name in sorted(files, key=lambda name: (name.endswith("/RECORD"), name)):
            member = zipfile.ZipInfo(name, _WHEN)
            member.external_attr = 0o100644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, files[name])
    return wheel


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()

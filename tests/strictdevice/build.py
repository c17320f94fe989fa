"""Builds the strict device's extension with g++ (about half a minute), and keeps it below ``build/``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

_SOURCES = Path(__file__).resolve().parent / "extension"
_KEPT = Path(__file__).resolve().parents[2] / "build" / "strictdevice"
_NAME = "strict_cuda"


def why_not() -> str:
    """Return why the extension cannot be built here; empty if it can, or has been."""
    return "" if _built().exists() or shutil.which("g++") else "the strict device needs g++ to be built"


def extension() -> ModuleType:
    """Return the extension, built unless it has been: for this PyTorch, and from these sources."""
    built = _built()
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        made = built.with_suffix(f".{os.getpid()}")  # several processes may build at once
        subprocess.run(_command(made), check=True)
        made.replace(built)
    spec = importlib.util.spec_from_file_location(_NAME, built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built() -> Path:
    digest = hashlib.sha256(sysconfig.get_python_version().encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return _KEPT / f"{torch.__version__}-{digest.hexdigest()[:16]}" / f"{_NAME}.so"


def _command(target: Path) -> list[str]:
    includes = [*cpp_extension.include_paths("cpu"), sysconfig.get_path("include")]
    return ["g++", "-std=c++20", "-O1", "-g0", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={_NAME}",
            *(f"-isystem{path}" for path in includes), str(_SOURCES / "device.cpp"),
            f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python",
            "-o", str(target)]

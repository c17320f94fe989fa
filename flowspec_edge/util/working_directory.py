"""Finds the module of a strategy that the user names in the current directory, as pytest and uvicorn do.

The directory may be a downloaded model's, so its files must not take the place of other modules. They are
found after everything that is installed, and only for the name that the user gave and for imports in modules
that were found so: an import in this package or in a library never finds them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_MACHINERY = ("importlib", "_frozen_importlib", "_frozen_importlib_external")


class _WorkingDirectory:
    """The last finder of ``sys.meta_path``.

    In ``directory`` it looks for ``top``, the package or module that the user named, and for what modules from
    there import.
    """

    def __init__(self, directory: Path, top: str) -> None:
        self._directory, self._modules = directory, {top}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        if path is not None or not (name in self._modules or _importer() in self._modules):
            return None
        spec = PathFinder.find_spec(name, [str(self._directory)])
        if spec is not None:
            self._modules.add(name)
        return spec


def _importer() -> str:
    """Return the top package of the module whose import statement asks this finder."""
    frame = sys._getframe(2)
    while frame.f_back and _top(frame.f_globals) in _MACHINERY:
        frame = frame.f_back
    return _top(frame.f_globals)


def _top(names: dict[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]


def hidden_file(module: str) -> Path | None:
    """Return what has the name of ``module`` in the current directory, if another one was imported."""
    top, directory = module.partition(".")[0], Path.cwd()
    imported = getattr(sys.modules.get(top), "__file__", None)
    spec = PathFinder.find_spec(top, [str(directory)])
    if spec is None or spec.origin is None or imported is None or Path(imported) == Path(spec.origin):
        return None
    return Path(spec.origin)


def look_in_working_directory(module: str) -> None:
    """Let ``module``, "package.module", be imported from the current directory if it is not installed."""
    top, directory = module.partition(".")[0], Path.cwd()
    if not top.isidentifier() or top in sys.modules or importlib.util.find_spec(top) is not None:
        return
    if PathFinder.find_spec(top, [str(directory)]) is not None:
        sys.meta_path.append(_WorkingDirectory(directory, top))

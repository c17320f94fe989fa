"""The files of a training's text, which are looked for before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowspec_edge.errors import UsageError

_SUFFIXES = (".txt", ".py", ".md", ".jsonl")  # files read from a directory


def data_files(paths: Sequence[Path]) -> list[Path]:
    """List the files of ``paths``, and of a directory those below it that are not hidden.

    UsageError for a path without usable files.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"no training text at {path}: give files or directories that are there")
        if path.is_dir():
            matches = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file()
                             and not any(part.startswith(".") for part in file.relative_to(path).parts))
            if not matches:
                raise UsageError(f"{path} has no {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]} file in it; "
                                 "give another directory")
            files += matches
        else:
            files.append(path)
    return files

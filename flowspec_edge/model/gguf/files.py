"""Which GGUF files a path means: a file, the parts of a split one, or the one model in a directory."""

from __future__ import annotations

import re
from pathlib import Path

from flowspec_edge.errors import FlowspecError, UsageError

SUFFIX = ".gguf"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that a user's ``path`` means: itself, or the one model in a directory without a checkpoint.

    UsageError if the directory has several.
    """
    if path.is_file() and path.suffix == SUFFIX:
        return path
    if not path.is_dir() or (path / "config.json").is_file() or (path / "target").is_dir():
        return None
    candidates = {_first(file) for file in path.glob(f"*{SUFFIX}")}
    if len(candidates) > 1:
        raise UsageError(f"{path} has several GGUF files: give one of them: "
                         f"{', '.join(sorted(file.name for file in candidates)[:3])}")
    return candidates.pop() if candidates else None


def parts_of(file: Path) -> list[Path]:
    """Return all files of a model of which ``file`` is one, the first one, which has the metadata, first.

    FlowspecError that names a missing one.
    """
    split = _SPLIT.fullmatch(file.name)
    if split is None:
        return [file]
    count = int(split[3])
    parts = [file.with_name(f"{split[1]}-{number + 1:05d}-of-{count:05d}.gguf") for number in range(count)]
    for part in parts:
        if not part.is_file():
            raise FlowspecError(f"{part} is missing: the model is split into {count} files, which must be together")
    return parts


def model_name(file: Path) -> str:
    """Return the file's name without its suffix and the number of its part."""
    return _SPLIT.sub(r"\1.gguf", file.name).removesuffix(SUFFIX)


def _first(file: Path) -> Path:
    """Return the first part of a split file, which has the metadata."""
    split = _SPLIT.fullmatch(file.name)
    return file.with_name(f"{split[1]}-00001-of-{split[3]}.gguf") if split else file

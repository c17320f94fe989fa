from __future__ import annotations

import os
from pathlib import Path

from flowspec_edge.errors import UsageError


def check_writable(path: Path) -> None:
    """UsageError if :func:`write` would fail; does not change ``path``."""
    target = path.resolve()
    if target.is_dir() or (target.exists() and not target.is_file()):
        raise UsageError(f"cannot write {path}: it is not an ordinary file")
    if not target.parent.is_dir():
        raise UsageError(f"cannot write {path}: no directory {path.parent}; make it first")
    try:
        partial = _partial(target)
        partial.open("wb").close()
        partial.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def write(path: Path, data: str | bytes) -> None:
    """Replace ``path`` by ``data`` (text as UTF-8); readers see either the old file or the new one."""
    target = path.resolve()
    partial = _partial(target)
    try:
        partial.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
        os.replace(partial, target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.partial")

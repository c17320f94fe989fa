"""Files that other programs wrote, read with a limit on size and on the depth of their data.

Every reader of JSON, TOML or a text uses these functions: a file without end (/dev/zero) or with 100,000
brackets is one line of error.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flowspec_edge.errors import UsageError

MAX_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 64  # of lists and objects in one another; a config.json has five


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """UsageError for a file that cannot be read or has more than ``most`` bytes."""
    try:
        with path.open("rb") as file:
            too_long = os.fstat(file.fileno()).st_size > most  # before gigabytes are read
            data = b"" if too_long else file.read(most + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"cannot read {path}: {error}") from error
    if too_long:
        raise _too_large(str(path), most)
    return bounded(data, str(path), most)


def bounded(data: bytes, where: str, most: int = MAX_BYTES) -> bytes:
    if len(data) > most:
        raise _too_large(where, most)
    return data


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    return as_text(read_bytes(path, most), str(path))


def as_text(data: bytes, where: str) -> str:
    """UsageError unless ``data`` is UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text: byte {error.start}") from error


def read_json(path: Path) -> Any:
    return parse_json(read_bytes(path), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a JSON object")
    return data


def parse_json(data: bytes | str, where: str) -> Any:
    """UsageError unless ``data`` is JSON of at most ``MAX_DEPTH`` levels."""
    text = as_text(data, where) if isinstance(data, bytes) else data
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise _too_deep(where) from error
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from error
    check_depth(found, where)
    return found


def check_depth(data: Any, where: str) -> None:
    level, depth = [data], 0
    while level:
        level = [inner for value in level if isinstance(value, (dict, list))
                 for inner in (value.values() if isinstance(value, dict) else value)]
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep(where)


def _too_large(where: str, most: int) -> UsageError:
    return UsageError(f"{where} has more than {most >> 10} KiB, the most that is read: is it the right file?")


def _too_deep(where: str) -> UsageError:
    return UsageError(f"{where} nests lists or objects more than {MAX_DEPTH} deep: is it the right file?")

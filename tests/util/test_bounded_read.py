"""Files without end, of the wrong kind, and nested too deep."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.util.bounded_read import (
    MAX_DEPTH,
    parse_json,
    read_bytes,
    read_json,
    read_json_object,
    read_text,
)


def test_a_file_without_end_and_one_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="/dev/zero has more than 64 KiB"):
        read_bytes(Path("/dev/zero"), 64 * 1024)
    for path, says in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file"),
                       (Path("a\0b"), "null byte")):
        with pytest.raises(UsageError, match=says):
            read_bytes(path)


def test_a_fifo_is_read_to_its_end(tmp_path: Path) -> None:
    """As of a shell's <(command)."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"text",))
    writer.start()
    assert read_text(path) == "text"
    writer.join()


def test_the_limit_itself_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1234")
    assert read_bytes(tmp_path / "f", 4) == b"1234"
    with pytest.raises(UsageError, match="is it the right file"):
        read_bytes(tmp_path / "f", 3)
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "f")
    with pytest.raises(UsageError, match="deep"):
        parse_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "f")


@pytest.mark.parametrize(("data", "says"), [
    (b"[" * 100_000, "nests lists or objects more than 64 deep"), (b"{", "is not valid JSON"),
    (b"\xff", "is not UTF-8 text: byte 0"), (b"1" * 5000, "is not valid JSON"),
    (b"[]", "must hold a JSON object"),
])
def test_what_is_no_json_object(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "f.json").write_bytes(data)
    with pytest.raises(UsageError, match=says) as caught:
        read_json_object(tmp_path / "f.json")
    assert "f.json" in str(caught.value)


def test_json(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"a": [1, "ü"]}', encoding="utf-8")
    assert read_json(tmp_path / "f.json") == read_json_object(tmp_path / "f.json") == {"a": [1, "ü"]}

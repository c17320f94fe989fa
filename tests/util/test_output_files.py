"""Files are written completely or not at all; unwritable paths are found before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.util.files import check_writable, write_output


def test_writing_replaces_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    check_writable(path)
    assert not path.exists()
    write_output(path, "old and much longer")
    before = path.open(encoding="utf-8")  # a reader keeps the file it opened
    check_writable(path)
    write_output(path, "é")
    with before:
        assert before.read() == "old and much longer"
    assert path.read_bytes() == "é".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("real.json")
    write_output(link, b"1")
    assert link.is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["", "absent/out.json", "fifo"])
def test_unwritable_paths_are_a_usage_error(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="cannot write"):
        check_writable(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo"]

"""Files are written completely or not at all; unwritable paths are found before the work."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.util import files


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o440])
def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path, mode: int) -> None:
    previous = os.umask(0o027)
    try:
        files.write_atomically(tmp_path / "exact", "x", mode=mode)
        files.write_atomically(tmp_path / "default", "x")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "exact").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "default").stat().st_mode) == 0o640


def test_an_existing_file_is_kept_where_it_must_not_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "key"
    files.write_atomically(path, "first", replace=False)
    with pytest.raises(FileExistsError):
        files.write_atomically(path, "second", replace=False)
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["key"]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """On a real limit: the kernel refuses bytes beyond RLIMIT_FSIZE with EFBIG."""
    path = tmp_path / "state"
    path.write_text("old")
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from flowspec_edge.util.files import write_atomically\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    write_atomically(Path(sys.argv[1]), b'x' * 5000)\n"
        "except OSError as error:\n"
        "    print(error.errno)\n")
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True,
                          check=True)
    assert int(done.stdout) == 27  # EFBIG
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state"]


def test_what_is_written_is_synced_before_it_has_its_name(tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "state", []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def record(*args: object, name: str = name, real: object = real) -> object:
            directory = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)  # type: ignore[arg-type]
            calls.append(name + " directory" * directory)
            return real(*args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, record)
    files.write_atomically(path, "x")
    assert calls == ["fsync", "replace", "fsync directory"]


def test_writing_replaces_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    files.check_writable(path)
    assert not path.exists()
    files.write_output(path, "old and much longer")
    before = path.open(encoding="utf-8")  # a reader keeps the file it opened
    files.check_writable(path)
    files.write_output(path, "é")
    with before:
        assert before.read() == "old and much longer"
    assert path.read_bytes() == "é".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("real.json")
    files.write_output(link, b"1")
    assert link.is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["", "absent/out.json", "fifo"])
def test_unwritable_paths_are_a_usage_error(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="cannot write"):
        files.check_writable(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo"]

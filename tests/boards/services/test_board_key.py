"""A board's own key pairs: as a program, run as on a board, and killed at each of its steps."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec_edge.boards.probe.onboard.deployment import publics
from flowspec_edge.boards.services.keys import KeyAction, key_command
from flowspec_edge.messages import Shutdown
from flowspec_edge.transport import keys
from flowspec_edge.transport.zmq_links import Tuning, ZmqTransport

MODULE = "flowspec_edge.boards.services.board_key"
# Runs the program, and kills it when it is about to change a file for the n-th time.
KILLED = f"""
import os, runpy, signal, sys
left = int(sys.argv.pop(1))

def count(event, arguments):
    global left
    changes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR) and "pycache" not in str(arguments[0])
    if changes or event in ("os.rename", "os.link", "os.remove", "os.mkdir", "os.truncate"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

import {MODULE}
sys.addaudithook(count)
runpy.run_module(sys.modules.pop("{MODULE}").__name__, run_name="__main__", alter_sys=True)
"""


def run(action: KeyAction, path: Path, *public: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(key_command(sys.executable, action, str(path), *public),
                          capture_output=True, text=True, check=False)


def done(action: KeyAction, path: Path, *public: str) -> list[str]:
    """The public keys that it prints."""
    ran = run(action, path, *public)
    assert ran.returncode == 0, ran.stderr
    found: list[str] = json.loads(ran.stdout)["publics"]
    return found


def killed_at_each_step(action: KeyAction, path: Path, *public: str) -> Iterator[None]:
    """Run the program on the files as they are now, and kill it at its first step, at its second, …; yields
    after each, and last after the run that was not killed."""
    before = {file: (file.read_bytes(), file.stat().st_mode) for file in path.parent.iterdir()}
    step = 0
    while True:
        ran = subprocess.run([sys.executable, "-c", KILLED, str(step), action, str(path),
                              *(f"--public={key}" for key in public)],
                             capture_output=True, text=True, check=False)
        yield
        if ran.returncode != -signal.SIGKILL:
            assert ran.returncode == 0, ran.stderr
            return
        for file in path.parent.iterdir():
            file.unlink()
        for file, (data, mode) in before.items():
            file.write_bytes(data)
            file.chmod(mode)
        step += 1


def test_the_program_tells_the_public_halves_alone(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "board.key"
    lost = run("show", path)
    assert (lost.returncode, lost.stdout) == (2, "")
    assert lost.stderr == f"cannot read the key file {path}: No such file or directory\n"
    assert run("add", path).stderr == lost.stderr
    made = run("make", path)
    pair = keys.load(path)
    assert json.loads(made.stdout) == {"publics": [pair.public.decode()]}
    assert pair.secret.decode() not in made.stdout + made.stderr
    assert path.stat().st_mode & 0o777 == 0o400
    assert done("make", path) == [pair.public.decode()]
    assert [file.name for file in path.parent.iterdir()] == ["board.key"]


def test_a_pair_is_added_and_the_others_removed(tmp_path: Path) -> None:
    path = tmp_path / "board.key"
    [first] = done("make", path)
    two = done("add", path)
    assert len(two) == 2
    assert two[0] == first
    assert done("add", path) == done("make", path) == done("show", path) == publics(str(path)) == two
    assert path.stat().st_mode & 0o777 == 0o400
    refused = run("keep", path, keys.generate().public.decode())
    assert refused.returncode == 1
    assert "lacks the key pair of this release" in refused.stderr
    assert done("show", path) == two
    pair = keys.load(path, two[1])
    (tmp_path / "board.key.old").write_text("of an interrupted rotation of an earlier flowspec")
    assert done("keep", path, two[1]) == done("keep", path, two[1]) == [two[1]]
    assert keys.load_all(path) == [pair]
    assert path.stat().st_mode & 0o777 == 0o400
    assert [file.name for file in tmp_path.iterdir()] == ["board.key"]


def test_a_key_that_begins_with_a_hyphen_is_kept(tmp_path: Path) -> None:
    path, pair = tmp_path / "board.key", keys.generate()
    while not pair.public.startswith(b"-"):
        pair = keys.generate()
    keys.save(keys.generate(), path, newer=[pair])
    assert done("keep", path, pair.public.decode()) == [pair.public.decode()]


@pytest.mark.slow
def test_links_answer_wherever_a_rotation_is_killed(tmp_path: Path) -> None:
    """With the pair of the running release, and with the new one once another board may know it."""
    path, peer = tmp_path / "board.key", keys.generate()

    def answers(public: str) -> None:
        """A service that starts now is admitted by a peer that knows its key."""
        own = ZmqTransport(keys.load(path, public), Tuning(linger_ms=0))
        other = ZmqTransport(peer, Tuning(linger_ms=0))
        try:
            bound = other.pull("tcp://127.0.0.1:*", "in", [public.encode()])
            link = own.push(bound.endpoint, "out", [peer.public])
            assert link.send(Shutdown("hello"), 20.0)
            assert bound.receive(20.0) == Shutdown("hello")
        finally:
            own.close()
            other.close()

    [old] = done("make", path)
    runs = 0
    for _ in killed_at_each_step("add", path):
        answers(old)
        runs += 1
    assert runs >= 3  # killed before the file was written, before it was renamed, and not at all
    two = done("add", path)
    assert two[0] == old
    new = two[1]
    (tmp_path / "board.key.old").write_text("")
    runs = 0
    for _ in killed_at_each_step("keep", path, new):
        answers(new)
        runs += 1
        if len(done("show", path)) == 2:
            answers(old)
    assert runs >= 4
    assert done("keep", path, new) == [new]
    assert [file.name for file in tmp_path.iterdir()] == ["board.key"]


def test_what_is_no_key_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "board.key"
    path.write_text("mine")
    path.chmod(0o400)
    for action in ("make", "add"):
        ran = run(action, path)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert ran.stderr == f"{path} is not a key file; make a new one\n"
    assert path.read_text() == "mine"
    assert publics(str(path)) == publics(str(tmp_path / "none")) == []

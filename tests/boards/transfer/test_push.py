"""Parts of a model to boards over a real ssh: whole or not at all, and never a byte twice."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kits import network_beds, ssh_boards

from flowspec_edge.boards import commands
from flowspec_edge.boards.commands import SshRunner, as_root
from flowspec_edge.boards.deploy.actions import BoardState, RequiredPart, ask_boards
from flowspec_edge.boards.images.archive import FILE, Image
from flowspec_edge.boards.paths import MODELS
from flowspec_edge.boards.probe.facts import BoardFacts
from flowspec_edge.boards.transfer.push import TransferResult, push, send_image
from flowspec_edge.errors import UsageError
from flowspec_edge.model.manifest import Manifest
from flowspec_edge.util.bounded_read import sha256_of
from flowspec_edge.util.interpreter import module_command

pytestmark = ssh_boards.needs_boards
RECEIVE = module_command("flowspec_edge.boards.transfer.receive", python=sys.executable)
BOARD = " ".join(RECEIVE)
HOME = f"{MODELS}/{'a' * 16}"
PARTS = ["draft", "stage-1", "stage-2"]


def noise(directory: Path, stages: int = 2, size: int = 3_000_000, request: str = "a" * 64,
          seed: int = 0) -> Manifest:
    """A sharded model without a tensor in it: parts of a large and a small file each, of bytes that
    follow from ``seed`` and the path."""
    parts = {}
    for part in [*(f"stage-{i + 1}" for i in range(stages)), "draft"]:
        files = []
        for name, count in (("config.json", 700), ("target/model.safetensors", size + len(part))):
            path = directory / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(random.Random(f"{seed} {part}/{name}").randbytes(count))
            files.append({"path": f"{part}/{name}", "size": count,
                          "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
        parts[part] = {"files": files, "parameters": 0, "weight_bytes": 0, "row_bytes": 0}
    (directory / "manifest.json").write_text(json.dumps({
        "format": 1, "source": {"name": "noise", "config_sha256": "0" * 64, "revision": None},
        "model_type": "llama", "layers": stages, "hidden_width": 8, "vocabulary": 8,
        "ranges": [[i, i + 1] for i in range(stages)], "dtype": "fp16", "compute_dtype": "fp16",
        "quantisation": None, "request": request, "parts": parts}))
    return Manifest.read(directory)


@pytest.fixture
def boards(boards: ssh_boards.Boards) -> ssh_boards.Boards:
    """With nothing of ours on them."""
    for place in range(3):
        boards.inside(place, "rm", "-rf", "/var/lib/flowspec")
    return boards


@pytest.fixture
def model(tmp_path: Path) -> Manifest:
    return noise(tmp_path / "model")


def send(boards: ssh_boards.Boards, model: Manifest, **options: Any) -> list[TransferResult]:
    """Each board its part."""
    wanted = [(device, part, sys.executable)
              for device, part in zip(boards.inventory.device, PARTS, strict=True)]
    return push(model.directory, wanted, boards.inventory, **options)


def send_one(boards: ssh_boards.Boards, model: Manifest, part: str = "stage-1", **options: Any) -> TransferResult:
    """board-1 a part."""
    (result,) = push(model.directory, [(boards.inventory.device[1], part, sys.executable)], boards.inventory,
                     **options)
    return result


def would_send(boards: ssh_boards.Boards, model: Manifest) -> list[tuple[int, bool]]:
    """How many bytes the facts say that each board lacks of its part, and whether a transfer changes
    anything: asked by a Python without flowspec."""
    bare = boards.with_cluster(board_python="/usr/bin/python3")
    asked = ask_boards(bare, [(device, BoardState(device.name), RequiredPart(
        Path(HOME).name, tuple((file.path, file.size, file.sha256) for file in model.part(part).files),
        sha256_of(model.directory / "manifest.json")))
        for device, part in zip(bare.device, PARTS, strict=True)])
    return [(facts.missing_bytes, facts.part_changes) for facts in asked if isinstance(facts, BoardFacts)]


def home(boards: ssh_boards.Boards, place: int) -> Path:
    """A board's directory of the model."""
    return boards.root(place) / HOME.lstrip("/")


def check(boards: ssh_boards.Boards, model: Manifest, place: int) -> None:
    """A board has its part, whole, and nothing else; the service's user can read it."""
    there = Manifest.read(home(boards, place))
    assert there.request == model.request
    there.check(PARTS[place])
    assert {path.name for path in there.directory.iterdir() if not path.name.startswith(".")} == {
        "manifest.json", PARTS[place]}
    for path in there.directory.rglob("*"):
        assert path.stat().st_uid == 0
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def sizes(model: Manifest) -> list[int]:
    return [model.part(part).size for part in PARTS]


def test_each_board_gets_its_own_part_once(boards: ssh_boards.Boards, model: Manifest) -> None:
    assert would_send(boards, model) == [(size, True) for size in sizes(model)]
    assert not any(home(boards, place).exists() for place in range(3))
    seen: dict[str, tuple[int, int]] = {}
    first = send(boards, model, progress=lambda board, done, total: seen.update({board: (done, total)}))
    assert first == [TransferResult(f"board-{place}", size) for place, size in enumerate(sizes(model))]
    assert seen == {f"board-{place}": (size, size) for place, size in enumerate(sizes(model))}
    for place in range(3):
        check(boards, model, place)
        assert boards.left(place, BOARD) == 0
    assert would_send(boards, model) == [(0, False)] * 3
    assert send(boards, model) == [TransferResult(f"board-{place}") for place in range(3)]


def test_what_is_new_is_known_before(boards: ssh_boards.Boards, model: Manifest) -> None:
    """A file that is no part of the model, another manifest, a file that was altered."""
    send(boards, model)
    stage = home(boards, 1)
    (stage / "stage-1/notes.txt").write_text("not of the model")
    (stage / ".manifest.json.0a.partial").write_text("{")  # of an interrupted write
    (home(boards, 0) / "manifest.json").write_text("{}")
    (home(boards, 2) / "stage-2/config.json").write_bytes(bytes(700))
    assert would_send(boards, model) == [(0, True), (0, True), (700, True)]
    assert [result.bytes_sent for result in send(boards, model)] == [0, 0, 700]
    assert would_send(boards, model) == [(0, False)] * 3
    for place in range(3):
        check(boards, model, place)
    assert not [*stage.glob(".*.partial")]


_CONTROLLER = """
import sys
from pathlib import Path
from flowspec_edge.boards.inventory import load_inventory
from flowspec_edge.boards.transfer.push import push
inventory = load_inventory(Path(sys.argv[2]))
def progress(board, done, total):
    if done > total / 2:
        print(done, flush=True)
        sys.stdin.read()
push(Path(sys.argv[1]), [(inventory.device[1], "stage-1", sys.executable)], inventory, progress=progress)
"""


def test_it_goes_on_where_a_killed_controller_stopped(boards: ssh_boards.Boards, model: Manifest) -> None:
    with subprocess.Popen([sys.executable, "-c", _CONTROLLER, str(model.directory), str(boards.file)],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        left = int(controller.stdout.readline())
        controller.send_signal(signal.SIGKILL)
    assert boards.left(1, BOARD) == 0
    assert not (home(boards, 1) / "manifest.json").exists()
    (partial,) = (home(boards, 1) / ".partial").iterdir()
    there = partial.stat().st_size + 700  # config.json is whole
    assert model.part("stage-1").size / 4 < there <= left
    shipped = send_one(boards, model)
    assert shipped.error == ""
    assert shipped.bytes_sent == model.part("stage-1").size - there
    check(boards, model, 1)


def test_it_goes_on_where_a_killed_board_stopped(boards: ssh_boards.Boards, model: Manifest) -> None:
    def kill(board: str, done: int, total: int) -> None:
        if board == "board-1" and done > total / 2:
            for pid in boards.running(1, BOARD):
                with suppress(ProcessLookupError):  # the piece before has killed it
                    os.kill(pid, signal.SIGKILL)

    draft, first, second = send(boards, model, progress=kill)
    assert (draft.error, second.error) == ("", "")
    assert first.error == "board-1 (10.77.0.2): the transfer was cut off; the next run resumes it"
    assert not (home(boards, 1) / "manifest.json").exists()
    again = send_one(boards, model)
    assert again.error == ""
    assert 0 < again.bytes_sent < model.part("stage-1").size
    check(boards, model, 1)


@pytest.mark.slow
def test_a_board_that_hangs_is_named_and_the_next_run_completes(boards: ssh_boards.Boards, model: Manifest
                                                                ) -> None:
    """ssh's connection lives on; the program at its end is stopped."""
    def stop(board: str, done: int, total: int) -> None:
        for pid in boards.running(1, BOARD):
            os.kill(pid, signal.SIGSTOP)

    hung = send_one(boards, model, progress=stop, silence_s=1.0)
    assert re.fullmatch(r"board-1 \(10.77.0.2\): the transfer has stood still for \d+ s: see whether the "
                        r"board hangs \(uptime, dmesg\); the next run resumes it", hung.error)
    again = send_one(boards, model)
    assert again.error == ""
    check(boards, model, 1)
    assert boards.left(1, BOARD) == 0


def test_a_beginning_that_is_not_right_is_sent_again(boards: ssh_boards.Boards, model: Manifest) -> None:
    file = model.part("stage-1").files[1]
    partial = home(boards, 1) / ".partial" / file.sha256
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(1000))
    stale = partial.with_name("f" * 64)
    stale.write_bytes(b"of no use")
    shipped = send_one(boards, model)
    assert shipped.error == ""
    assert shipped.bytes_sent == 700 + file.size - 1000 + file.size
    check(boards, model, 1)


def test_what_was_there_under_another_name_is_not_sent(boards: ssh_boards.Boards, model: Manifest,
                                                       tmp_path: Path) -> None:
    send_one(boards, model)
    other = noise(tmp_path / "other", request="b" * 64)
    assert send_one(boards, other) == TransferResult("board-1")
    boards.inside(1, "rm", "-rf", HOME)
    Manifest.read(home(boards, 1).with_name("b" * 16)).check("stage-1")


def test_a_board_keeps_the_part_that_it_has(boards: ssh_boards.Boards, model: Manifest) -> None:
    send_one(boards, model)
    assert send_one(boards, model, "draft") == TransferResult("board-1", sizes(model)[0])
    there = Manifest.read(home(boards, 1))
    there.check("stage-1")
    there.check("draft")


def test_a_full_disk_is_found_before(boards: ssh_boards.Boards, model: Manifest) -> None:
    boards.inside(1, "mkdir", "/var/lib/flowspec")
    boards.inside(1, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/var/lib/flowspec")
    try:
        draft, first, second = send(boards, model)
        assert (draft.error, second.error) == ("", "")
        assert first == TransferResult("board-1", error=first.error)
        for part in ("board-1 (10.77.0.2): ", f"no room in {MODELS}: ", "3.00 MB", "1.04 MB are free"):
            assert part in first.error
        assert not home(boards, 1).exists()
    finally:
        boards.inside(1, "umount", "/var/lib/flowspec")
    assert send_one(boards, model).error == ""
    check(boards, model, 1)


def test_a_disk_that_fills_up_meanwhile(boards: ssh_boards.Boards, model: Manifest) -> None:
    boards.inside(1, "mkdir", "/var/lib/flowspec")
    boards.inside(1, "mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", "/var/lib/flowspec")
    try:
        def fill(board: str, done: int, total: int) -> None:
            log = boards.root(1) / "var/lib/flowspec/log"
            if board == "board-1" and done > 700 and not log.exists():
                log.write_bytes(bytes(3_000_000))

        first = send_one(boards, model, progress=fill)
        assert first.error == (f"board-1 (10.77.0.2): cannot write {HOME}/stage-1/target/model.safetensors: "
                               "No space left on device")
        (boards.root(1) / "var/lib/flowspec/log").unlink()
        assert send_one(boards, model).error == ""
        check(boards, model, 1)
    finally:
        boards.inside(1, "umount", "/var/lib/flowspec")


def test_others_go_on_when_one_board_cannot(boards: ssh_boards.Boards, model: Manifest) -> None:
    draft, first, second = boards.inventory.device
    wanted = [(draft.model_copy(update={"ssh_port": 23}), "draft", sys.executable),
              (first, "stage-1", sys.executable), (second, "stage-2", sys.executable)]
    shipped = push(model.directory, wanted, boards.inventory)
    assert [result.error == "" for result in shipped] == [False, True, True]
    assert shipped[0].error.startswith("board-0 (10.77.0.1): ssh: connect to host")
    (no_python,) = push(model.directory, [(first, "stage-1", "/nowhere/python")], boards.inventory)
    assert no_python.error.startswith("board-1 (10.77.0.2): ")
    assert "/nowhere/python" in no_python.error


def test_what_is_wrong_here_is_said(boards: ssh_boards.Boards, model: Manifest, tmp_path: Path) -> None:
    device = boards.inventory.device[1]
    with pytest.raises(UsageError, match="has no part 'stage-7'"):
        push(model.directory, [(device, "stage-7", sys.executable)], boards.inventory)
    with pytest.raises(UsageError, match="not a sharded model"):
        push(tmp_path, [(device, "stage-1", sys.executable)], boards.inventory)
    path = model.directory / "stage-1/target/model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(b"x" + whole[1:])
    assert send_one(boards, model).error.startswith(f"{path} has been altered: ")
    path.write_bytes(whole[1:])
    assert "bytes, and its manifest says" in send_one(boards, model).error
    path.unlink()
    assert send_one(boards, model).error == f"cannot read {path}: No such file or directory"
    path.write_bytes(whole)
    assert send_one(boards, model).error == ""
    check(boards, model, 1)


def test_the_newest_transfer_takes_over(boards: ssh_boards.Boards, model: Manifest) -> None:
    """The control host of an older one may have gone without a word."""
    runner = SshRunner(boards.inventory, boards.inventory.device[1], own_connection=True)
    with subprocess.Popen(runner.command(as_root(RECEIVE)), stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as older:
        assert older.stdin is not None
        assert older.stdout is not None
        older.stdin.write(json.dumps({"do": "open", "root": MODELS, "name": "a" * 16, "files": []}) + "\n")
        older.stdin.flush()
        assert "free" in older.stdout.readline()
        assert send_one(boards, model).error == ""
        assert "another transfer to this board has begun" in older.communicate(timeout=60)[1]
        assert older.returncode == 1
    check(boards, model, 1)


def test_ctrl_c_ends_it(boards: ssh_boards.Boards, model: Manifest) -> None:
    program = "from kits import network_beds; network_beds.heed_ctrl_c()" + _CONTROLLER
    with subprocess.Popen([sys.executable, "-c", program,
                           str(model.directory), str(boards.file)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as controller:
        assert controller.stdout is not None
        assert controller.stdin is not None
        controller.stdout.readline()
        controller.send_signal(signal.SIGINT)
        controller.stdin.close()  # the thread that reports progress may go on
        assert network_beds.ended(controller.pid, 60)
    assert boards.left(1, BOARD) == 0


def test_a_board_that_hangs_at_login_is_named_and_the_others_get_their_parts(
        boards: ssh_boards.Boards, model: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_LOGIN_S", 0.0)
    with boards.shell(1, "exec sleep 1000"):
        first, hangs, last = send(boards, model)
    assert (first.error, last.error) == ("", "")
    assert hangs.error.startswith("board-1 (10.77.0.2): ssh reaches it, and no command began within 10 s: ")


def test_an_image_s_archive_is_received_by_a_python_without_flowspec(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    """Whole, once, and again from where it broke off."""
    archive = tmp_path / "any name.tar"
    archive.write_bytes(random.Random(7).randbytes(3_000_000))
    image = Image(str(archive), 3_000_000, "c" * 64, (), (), "aarch64", "1")
    bare = boards.with_cluster(board_python="/usr/bin/python3")
    images = "/var/lib/flowspec/images"  # which each has of its own
    place, sha256 = f"{images}/{image.tag}", sha256_of(archive)
    (tmp_path / "part").write_bytes(archive.read_bytes()[:1_000_000])
    boards.inside(2, "sh", "-c", f"mkdir -p {place}/.partial && cp {tmp_path}/part {place}/.partial/{sha256}")
    for expected in ([3_000_000, 2_000_000], [0, 0]):
        sent = send_image([(device, image) for device in bare.device[1:]], bare, images=images)
        assert [(one.bytes_sent, one.error) for one in sent] == [(count, "") for count in expected]
    for board in (1, 2):
        boards.inside(board, "sh", "-c", f"echo '{sha256}  {place}/{FILE}' | sha256sum --check --status")

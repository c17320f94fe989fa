"""Parts of a model to boards over a real ssh: whole or not at all, and never a byte twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fleetkit
import pytest
import shipkit
import sshkit

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.inventory import DeviceEntry
from flowspec_edge.fleet.places import MODELS
from flowspec_edge.fleet.shipping import Pruned, Shipped, prune, ship
from flowspec_edge.fleet.shipping_link import ShippingLink
from flowspec_edge.manifest import Manifest

pytestmark = sshkit.needs_boards
BOARD = f"{sys.executable} -m flowspec_edge.fleet.shipping_board"
HOME = f"{MODELS}/{'a' * 16}"
PARTS = ["draft", "stage-1", "stage-2"]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshkit.Boards]:
    with sshkit.boards(2, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(boards.outside):
        yield boards


@pytest.fixture
def boards(started: sshkit.Boards) -> sshkit.Boards:
    """With nothing of ours on them."""
    for place in range(3):
        started.inside(place, "rm", "-rf", "/var/lib/flowspec")
    return started


@pytest.fixture
def model(tmp_path: Path) -> Manifest:
    return shipkit.model(tmp_path / "model")


def send(boards: sshkit.Boards, model: Manifest, **options: object) -> list[Shipped]:
    """Each board its part."""
    wanted = list(zip(boards.inventory.device, PARTS, strict=True))
    return ship(model.directory, wanted, boards.inventory, sys.executable,
                **options)  # type: ignore[arg-type]


def home(boards: sshkit.Boards, place: int) -> Path:
    """A board's directory of the model."""
    return boards.root(place) / HOME.lstrip("/")


def check(boards: sshkit.Boards, model: Manifest, place: int) -> None:
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


def test_each_board_gets_its_own_part_once(boards: sshkit.Boards, model: Manifest) -> None:
    seen: dict[str, tuple[int, int]] = {}
    first = send(boards, model, progress=lambda board, done, total: seen.update({board: (done, total)}))
    assert first == [Shipped(f"board-{place}", (PARTS[place],), size, True, "")
                     for place, size in enumerate(sizes(model))]
    assert seen == {f"board-{place}": (size, size) for place, size in enumerate(sizes(model))}
    for place in range(3):
        check(boards, model, place)
        assert boards.left(place, BOARD) == 0
    again = send(boards, model)
    assert again == [Shipped(f"board-{place}", (PARTS[place],), 0, False, "") for place in range(3)]


_CONTROLLER = """
import sys
from pathlib import Path
from flowspec_edge.fleet.inventory import load_inventory
from flowspec_edge.fleet.shipping import ship
inventory = load_inventory(Path(sys.argv[2]))
def progress(board, done, total):
    if done > total / 2:
        print(done, flush=True)
        sys.stdin.read()
ship(Path(sys.argv[1]), [(inventory.device[1], "stage-1")], inventory, sys.executable, progress=progress)
"""


def test_it_goes_on_where_a_killed_controller_stopped(boards: sshkit.Boards, model: Manifest) -> None:
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
    shipped = send(boards, model)
    assert [result.error for result in shipped] == ["", "", ""]
    assert shipped[1].bytes_sent == model.part("stage-1").size - there
    check(boards, model, 1)


def test_it_goes_on_where_a_killed_board_stopped(boards: sshkit.Boards, model: Manifest) -> None:
    def kill(board: str, done: int, total: int) -> None:
        if board == "board-1" and done > total / 2:
            for pid in boards.running(1, BOARD):
                os.kill(pid, signal.SIGKILL)

    draft, first, second = send(boards, model, progress=kill)
    assert (draft.error, second.error) == ("", "")
    assert first.error == "board-1 (10.77.0.2): the transfer was cut off; it goes on with the next one"
    assert not (home(boards, 1) / "manifest.json").exists()
    again = send(boards, model)
    assert [result.changed for result in again] == [False, True, False]
    assert again[1].error == ""
    assert 0 < again[1].bytes_sent < model.part("stage-1").size
    check(boards, model, 1)


def test_damage_is_found_and_mended(boards: sshkit.Boards, model: Manifest) -> None:
    send(boards, model)
    for place, keep_time in ((1, False), (2, True)):
        path = home(boards, place) / PARTS[place] / "target/model.safetensors"
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(b"other")
        if keep_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = send(boards, model)
    assert [result.bytes_sent for result in changed] == [0, sizes(model)[1] - 700, 0]
    check(boards, model, 1)
    verified = send(boards, model, verify=True)
    assert [result.bytes_sent for result in verified] == [0, 0, sizes(model)[2] - 700]
    check(boards, model, 2)
    assert not any(result.changed for result in send(boards, model, verify=True))


def test_a_beginning_that_is_not_right_is_sent_again(boards: sshkit.Boards, model: Manifest) -> None:
    file = model.part("stage-1").files[1]
    partial = home(boards, 1) / ".partial" / file.sha256
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(1000))
    stale = partial.with_name("f" * 64)
    stale.write_bytes(b"of no use")
    shipped = send(boards, model)[1]
    assert shipped.error == ""
    assert shipped.bytes_sent == 700 + file.size - 1000 + file.size
    check(boards, model, 1)


def test_what_was_there_under_another_name_is_not_sent(boards: sshkit.Boards, model: Manifest,
                                                       tmp_path: Path) -> None:
    send(boards, model)
    other = shipkit.model(tmp_path / "other", request="b" * 64)
    shipped = send(boards, other)
    assert [(result.bytes_sent, result.changed, result.error) for result in shipped] == [(0, True, "")] * 3
    keep = [(device, [("b" * 64, part)])
            for device, part in zip(boards.inventory.device, PARTS, strict=True)]
    pruned = prune(keep, boards.inventory, sys.executable)
    assert pruned == [Pruned(f"board-{place}", (f"{'a' * 16}/{PARTS[place]}",), "") for place in range(3)]
    assert prune(keep, boards.inventory, sys.executable)[1] == Pruned("board-1", (), "")
    for place in range(3):
        assert not home(boards, place).exists()
        Manifest.read(home(boards, place).with_name("b" * 16)).check(PARTS[place])


def test_a_part_more_and_a_part_less(boards: sshkit.Boards, model: Manifest) -> None:
    device = boards.inventory.device[1]
    both = ship(model.directory, [(device, "stage-1"), (device, "draft")], boards.inventory, sys.executable)
    assert both == [Shipped("board-1", ("stage-1", "draft"), sizes(model)[1] + sizes(model)[0], True, "")]
    (home(boards, 1) / "stage-1/notes.txt").write_text("not of the model")
    (one,) = ship(model.directory, [(device, "stage-1")], boards.inventory, sys.executable)
    assert (one.bytes_sent, one.changed) == (0, True)
    there = Manifest.read(home(boards, 1))
    there.check("stage-1")
    there.check("draft")
    assert prune([(device, [("a" * 64, "stage-1")])], boards.inventory, sys.executable)[0].removed == (
        f"{'a' * 16}/draft",)
    check(boards, model, 1)


def test_a_full_disk_is_found_before(boards: sshkit.Boards, model: Manifest) -> None:
    boards.inside(1, "mkdir", "/var/lib/flowspec")
    boards.inside(1, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/var/lib/flowspec")
    try:
        draft, first, second = send(boards, model)
        assert (draft.error, second.error) == ("", "")
        assert first == Shipped("board-1", ("stage-1",), 0, False,
                                f"board-1 (10.77.0.2): no room in {MODELS}: 3.00 MB are to be written and "
                                "1.04 MB are free: make room there, and run this again")
        assert not home(boards, 1).exists()
    finally:
        boards.inside(1, "umount", "/var/lib/flowspec")
    assert send(boards, model)[1].error == ""
    check(boards, model, 1)


def test_a_disk_that_fills_up_meanwhile(boards: sshkit.Boards, model: Manifest) -> None:
    boards.inside(1, "mkdir", "/var/lib/flowspec")
    boards.inside(1, "mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", "/var/lib/flowspec")
    try:
        def fill(board: str, done: int, total: int) -> None:
            if board == "board-1" and done > 700:
                boards.inside(1, "sh", "-c", "head -c 3000000 /dev/zero >/var/lib/flowspec/log || :")

        first = send(boards, model, progress=fill)[1]
        assert first.error == (f"board-1 (10.77.0.2): cannot write {HOME}/stage-1/target/model.safetensors: "
                               "No space left on device")
        (boards.root(1) / "var/lib/flowspec/log").unlink()
        again = send(boards, model)[1]
        assert again.error == ""
        check(boards, model, 1)
    finally:
        boards.inside(1, "umount", "/var/lib/flowspec")


def without(device: DeviceEntry, **changes: object) -> DeviceEntry:
    return device.model_copy(update=changes)


def test_others_go_on_when_one_board_cannot(boards: sshkit.Boards, model: Manifest) -> None:
    draft, first, second = boards.inventory.device
    wanted = [(without(draft, ssh_port=23), "draft"), (first, "stage-1"), (second, "stage-2")]
    shipped = ship(model.directory, wanted, boards.inventory, sys.executable)
    assert [result.error == "" for result in shipped] == [False, True, True]
    assert shipped[0].error.startswith("board-0 (10.77.0.1): ssh: connect to host")
    (no_python,) = ship(model.directory, wanted[1:2], boards.inventory, "/nowhere/python")
    assert no_python.error.startswith("board-1 (10.77.0.2): ")
    assert "/nowhere/python" in no_python.error


def test_what_is_wrong_here_is_said(boards: sshkit.Boards, model: Manifest, tmp_path: Path) -> None:
    device = boards.inventory.device[1]
    with pytest.raises(UsageError, match="has no part 'stage-7'"):
        ship(model.directory, [(device, "stage-7")], boards.inventory, sys.executable)
    with pytest.raises(UsageError, match="not a sharded model"):
        ship(tmp_path, [(device, "stage-1")], boards.inventory, sys.executable)
    path = model.directory / "stage-1/target/model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(b"x" + whole[1:])
    assert send(boards, model)[1].error == (
        f"{path} has been altered: its sha256 is not the one in manifest.json; shard the model again")
    path.write_bytes(whole[1:])
    assert "bytes, and its manifest says" in send(boards, model)[1].error
    path.unlink()
    assert send(boards, model)[1].error == f"cannot read {path}: No such file or directory"
    path.write_bytes(whole)
    assert send(boards, model)[1].error == ""
    check(boards, model, 1)


def test_the_newest_transfer_takes_over(boards: sshkit.Boards, model: Manifest) -> None:
    """The control host of an older one may have gone without a word."""
    with ShippingLink(boards.inventory, boards.inventory.device[1], sys.executable) as older:
        older.ask("open", root=MODELS, name="a" * 16, files=[], verify=False)
        assert [result.error for result in send(boards, model)] == ["", "", ""]
        with pytest.raises(FlowspecError, match=r"board-1 .*another transfer to this board has begun"):
            older.ask("finish", manifest="")
    check(boards, model, 1)


def test_ctrl_c_ends_it(boards: sshkit.Boards, model: Manifest) -> None:
    with subprocess.Popen([sys.executable, "-c", "import fleetkit; fleetkit.heed_ctrl_c()" + _CONTROLLER,
                           str(model.directory), str(boards.file)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as controller:
        assert controller.stdout is not None
        assert controller.stdin is not None
        controller.stdout.readline()
        controller.send_signal(signal.SIGINT)
        controller.stdin.close()  # the thread that reports progress may go on
        assert fleetkit.ended(controller.pid, 15)
    assert boards.left(1, BOARD) == 0

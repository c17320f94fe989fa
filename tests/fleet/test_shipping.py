"""Parts of a model to boards over a real ssh: whole or not at all, and never a byte twice."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fleetkit
import pytest
import shipkit
import sshkit

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.inventory import DeviceEntry
from flowspec_edge.fleet.places import MODELS
from flowspec_edge.fleet.shipping import Pruned, Shipped, prune, ship, would_ship
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


def send(boards: sshkit.Boards, model: Manifest, **options: Any) -> list[Shipped]:
    """Each board its part."""
    wanted = list(zip(boards.inventory.device, PARTS, strict=True))
    return ship(model.directory, wanted, boards.inventory, sys.executable, **options)


def send_one(boards: sshkit.Boards, model: Manifest, **options: Any) -> Shipped:
    """board-1 its part, stage-1."""
    (shipped,) = ship(model.directory, [(boards.inventory.device[1], "stage-1")], boards.inventory,
                      sys.executable, **options)
    return shipped


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
    bare = boards.inventory.model_copy(update={
        "cluster": boards.inventory.cluster.model_copy(update={"board_python": "/usr/bin/python3"})})
    wanted = list(zip(boards.inventory.device, PARTS, strict=True))
    assert would_ship(model.directory, wanted, bare) == [
        Shipped(f"board-{place}", (PARTS[place],), size, changed=True)
        for place, size in enumerate(sizes(model))]
    assert not any(home(boards, place).exists() for place in range(3))
    seen: dict[str, tuple[int, int]] = {}
    first = send(boards, model, progress=lambda board, done, total: seen.update({board: (done, total)}))
    assert first == [Shipped(f"board-{place}", (PARTS[place],), size, changed=True)
                     for place, size in enumerate(sizes(model))]
    assert seen == {f"board-{place}": (size, size) for place, size in enumerate(sizes(model))}
    for place in range(3):
        check(boards, model, place)
        assert boards.left(place, BOARD) == 0
    nothing = [Shipped(f"board-{place}", (PARTS[place],)) for place in range(3)]
    assert would_ship(model.directory, wanted, bare) == send(boards, model) == nothing


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
    shipped = send_one(boards, model)
    assert shipped.error == ""
    assert shipped.bytes_sent == model.part("stage-1").size - there
    check(boards, model, 1)


def test_it_goes_on_where_a_killed_board_stopped(boards: sshkit.Boards, model: Manifest) -> None:
    def kill(board: str, done: int, total: int) -> None:
        if board == "board-1" and done > total / 2:
            for pid in boards.running(1, BOARD):
                with suppress(ProcessLookupError):  # the piece before has killed it
                    os.kill(pid, signal.SIGKILL)

    draft, first, second = send(boards, model, progress=kill)
    assert (draft.error, second.error) == ("", "")
    assert first.error == "board-1 (10.77.0.2): the transfer was cut off; it goes on with the next one"
    assert not (home(boards, 1) / "manifest.json").exists()
    again = send_one(boards, model)
    assert (again.changed, again.error) == (True, "")
    assert 0 < again.bytes_sent < model.part("stage-1").size
    check(boards, model, 1)


def test_damage_is_found_and_mended(boards: sshkit.Boards, model: Manifest) -> None:
    send_one(boards, model)
    path = home(boards, 1) / "stage-1/target/model.safetensors"
    before = path.stat()
    size = model.part("stage-1").files[1].size
    for verify in (False, True):
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(b"other")
        if verify:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert send_one(boards, model).bytes_sent == 0
        assert send_one(boards, model, verify=verify).bytes_sent == size
        check(boards, model, 1)
        before = path.stat()
    assert not send_one(boards, model, verify=True).changed


def test_a_beginning_that_is_not_right_is_sent_again(boards: sshkit.Boards, model: Manifest) -> None:
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


def test_what_was_there_under_another_name_is_not_sent(boards: sshkit.Boards, model: Manifest,
                                                       tmp_path: Path) -> None:
    send_one(boards, model)
    shipped = send_one(boards, shipkit.model(tmp_path / "other", request="b" * 64))
    assert (shipped.bytes_sent, shipped.changed, shipped.error) == (0, True, "")
    keep = [(boards.inventory.device[1], [("b" * 64, "stage-1")])]
    assert prune(keep, boards.inventory, sys.executable) == [Pruned("board-1", (f"{'a' * 16}/stage-1",), "")]
    assert prune(keep, boards.inventory, sys.executable) == [Pruned("board-1", (), "")]
    assert not home(boards, 1).exists()
    Manifest.read(home(boards, 1).with_name("b" * 16)).check("stage-1")


def test_a_part_more_and_a_part_less(boards: sshkit.Boards, model: Manifest) -> None:
    device = boards.inventory.device[1]
    both = ship(model.directory, [(device, "stage-1"), (device, "draft")], boards.inventory, sys.executable)
    assert both == [Shipped("board-1", ("stage-1", "draft"), sizes(model)[1] + sizes(model)[0],
                            changed=True)]
    (home(boards, 1) / "stage-1/notes.txt").write_text("not of the model")
    (one,) = ship(model.directory, [(device, "stage-1")], boards.inventory, sys.executable)
    assert (one.bytes_sent, one.changed) == (0, True)
    there = Manifest.read(home(boards, 1))
    there.check("stage-1")
    there.check("draft")
    assert prune([(device, [("a" * 64, "stage-1")])], boards.inventory, sys.executable)[0].removed == (
        f"{'a' * 16}/draft",)
    check(boards, model, 1)


def test_a_neighbour_gives_what_it_has(boards: sshkit.Boards, tmp_path: Path) -> None:
    """board-0 has the draft part, and gives it to the others; stage-1 goes out once, and on from there."""
    model = shipkit.model(tmp_path / "large", size=5_000_000)
    devices = boards.inventory.device
    ship(model.directory, [(devices[0], "draft")], boards.inventory, sys.executable)
    seen: list[tuple[int, int]] = []
    _, first, second = ship(model.directory, [(device, "draft") for device in devices], boards.inventory,
                            sys.executable, progress=lambda board, done, total: seen.append((done, total)))
    assert first == Shipped("board-1", ("draft",), 700, 5_000_005, ("board-0",), True)
    assert second == Shipped("board-2", ("draft",), 700, 5_000_005, ("board-0",), True)
    assert max(seen) == (5_000_705, 5_000_705)
    for place in (1, 2):
        Manifest.read(home(boards, place)).check("draft")
    for place in range(3):
        boards.inside(place, "rm", "-rf", "/var/lib/flowspec")
    one, other = ship(model.directory, [(devices[0], "stage-1"), (devices[2], "stage-1")], boards.inventory,
                      sys.executable)
    assert one == Shipped("board-0", ("stage-1",), sizes(model)[1], changed=True)
    assert other == Shipped("board-2", ("stage-1",), 700, 5_000_007, ("board-0",), True)
    Manifest.read(home(boards, 2)).check("stage-1")


def test_what_a_neighbour_cannot_give_comes_from_here(boards: sshkit.Boards, tmp_path: Path) -> None:
    """Its port is taken; later what it has is not what it seemed."""
    model = shipkit.model(tmp_path / "large", size=5_000_000)
    devices = boards.inventory.device
    draft = [(devices[0], "draft")]
    ship(model.directory, draft, boards.inventory, sys.executable)
    both = [*draft, (devices[1], "draft")]
    with boards.bed.entered(0):
        port = socket.create_server((boards.bed.address(0), 7703))
    with port:
        taken = ship(model.directory, both, boards.inventory, sys.executable)[1]
    assert (taken.error, taken.bytes_sent, taken.bytes_copied) == ("", sizes(model)[0], 0)
    (note,) = taken.notes
    assert note.startswith(
        "board-1 (10.77.0.2): draft/target/model.safetensors came from here, not from board-0: "
        "board-0 (10.77.0.1): cannot listen on tcp://10.77.0.1:7703: Address already in use")
    boards.inside(1, "rm", "-rf", "/var/lib/flowspec")
    path = home(boards, 0) / "draft/target/model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    altered = ship(model.directory, both, boards.inventory, sys.executable)[1]
    assert (altered.error, altered.bytes_sent) == ("", sizes(model)[0])
    assert altered.notes == ("board-1 (10.77.0.2): draft/target/model.safetensors came from here, not from "
                             "board-0: it is not what it should be",)
    Manifest.read(home(boards, 1)).check("draft")


def test_a_full_disk_is_found_before(boards: sshkit.Boards, model: Manifest) -> None:
    boards.inside(1, "mkdir", "/var/lib/flowspec")
    boards.inside(1, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/var/lib/flowspec")
    try:
        draft, first, second = send(boards, model)
        assert (draft.error, second.error) == ("", "")
        assert first == Shipped("board-1", ("stage-1",), error=(
            f"board-1 (10.77.0.2): no room in {MODELS}: 3.00 MB are to be written and 1.04 MB are free: make "
            "room there, and run this again"))
        assert not home(boards, 1).exists()
    finally:
        boards.inside(1, "umount", "/var/lib/flowspec")
    assert send_one(boards, model).error == ""
    check(boards, model, 1)


def test_a_disk_that_fills_up_meanwhile(boards: sshkit.Boards, model: Manifest) -> None:
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
    assert send_one(boards, model).error == (
        f"{path} has been altered: its sha256 is not the one in manifest.json; shard the model again")
    path.write_bytes(whole[1:])
    assert "bytes, and its manifest says" in send_one(boards, model).error
    path.unlink()
    assert send_one(boards, model).error == f"cannot read {path}: No such file or directory"
    path.write_bytes(whole)
    assert send_one(boards, model).error == ""
    check(boards, model, 1)


def test_the_newest_transfer_takes_over(boards: sshkit.Boards, model: Manifest) -> None:
    """The control host of an older one may have gone without a word."""
    with ShippingLink(boards.inventory, boards.inventory.device[1], sys.executable) as older:
        older.ask("open", root=MODELS, name="a" * 16, files=[], verify=False, wanted=[])
        assert send_one(boards, model).error == ""
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

"""Boards that cannot take a release, probed over a real ssh, with nothing changed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from kits import ssh_boards

from flowspec_edge.boards.commands import SshRunner
from flowspec_edge.boards.inventory import Inventory
from flowspec_edge.boards.probe.checks import (
    Needs,
    PreflightReport,
    Subject,
    different_processors,
    faults,
    preflight,
    room_problems,
)
from flowspec_edge.boards.probe.facts import BoardFacts, ask_system, system_facts
from flowspec_edge.boards.probe.findings import Finding, unreachable

HUGE = 10**15
BARE = "/usr/bin/python3"  # a board's own Python, which has no torch here


def changed(boards: ssh_boards.Boards, python: str, **devices: dict[str, object]) -> Inventory:
    """The boards' inventory with another board_python, and changes to devices as board_0={…}."""
    inventory = boards.with_cluster(board_python=python)
    return inventory.model_copy(update={"device": [
        device.model_copy(update=devices.get(device.name.replace("-", "_"), {})) for device in inventory.device]})


def checks(problems: list[Finding], board: str) -> dict[str, Finding]:
    return {problem.check: problem for problem in problems if problem.board == board}


@ssh_boards.needs_boards
def test_a_board_that_only_lacks_systemd(boards: ssh_boards.Boards) -> None:
    """These boards have all but a systemd that started them; torch is really imported."""
    needs = {"board-1": Needs(10**6, 10**6, (7702, 7703))}
    problems = preflight(changed(boards, sys.executable), needs).problems
    assert [(problem.board, problem.check) for problem in problems] == [("board-1", "systemd")]


@ssh_boards.needs_boards
def test_three_unfit_boards(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    """board-0 refuses the key; on board-1 all is too little and a port is taken; board-2's user is nobody."""
    passwd = tmp_path / "passwd"
    passwd.write_text(Path("/etc/passwd").read_text() + "plain:x:4321:4321::/tmp:/bin/sh\n")
    boards.inside(2, "mount", "--bind", str(passwd), "/etc/passwd")
    boards.inside(1, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/opt")
    boards.disconnect()
    inventory = changed(boards, BARE, board_0={"ssh_key": str(boards.directory / "stranger")},
                        board_2={"ssh_user": "plain"})
    address = boards.bed.address(1)
    listen = SshRunner(inventory, inventory.device[1], own_connection=True).command(
        [sys.executable, "-m", "flowspec_edge.boards.links.linktest", "serve", address, "7702"])
    needs = {"board-0": Needs(), "board-1": Needs(2_000_000, HUGE, (7701, 7702)), "board-2": Needs()}
    before = sorted(str(path) for path in boards.root(1).glob("var/lib/*"))
    with subprocess.Popen(listen, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()  # it listens
        found = preflight(inventory, needs).problems
        listener.terminate()
    for pid in boards.running(1, f"{sys.executable} -m flowspec_edge.boards.links.linktest"):
        boards.inside(1, "kill", str(pid))
    (refused,) = checks(found, "board-0").values()
    assert refused.check == "ssh"
    assert refused.found.startswith("it does not let this user in with this key (ssh: ")
    first = checks(found, "board-1")
    assert list(first) == ["torch", "systemd", "disk", "memory", "port"]
    assert first["torch"].found.startswith(f"{BARE} has no torch ")
    assert "(ModuleNotFoundError: No module named 'torch')" in first["torch"].found
    assert first["disk"].found == "/opt/flowspec needs 0.00 GB, 0.00 GB are free"
    assert first["memory"].found.startswith("1000000.00 GB are needed, ")
    assert first["port"].found.startswith("7702 is taken by python")
    second = checks(found, "board-2")
    assert list(second) == ["sudo", "torch", "systemd"]
    assert second["sudo"].found == "plain cannot become root without a password (there is no sudo)"
    assert sorted(str(path) for path in boards.root(1).glob("var/lib/*")) == before


@ssh_boards.needs_boards
def test_ssh_failures_are_told_apart(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    inventory = changed(boards, BARE, board_0={"ssh_port": 23}, board_1={"address": "no-such-host.invalid"})
    closed, unknown = preflight(inventory, {"board-0": Needs(), "board-1": Needs()}).problems
    assert closed.found.startswith("nothing answers at port 23 (")
    assert unknown.found.startswith("the name no-such-host.invalid is unknown here")
    other = tmp_path / "config"
    other.write_text((boards.directory / "config").read_text().replace(f"{boards.directory}/known", "/dev/null"))
    boards.disconnect()
    inventory = boards.with_cluster(board_python=BARE, ssh_config=str(other))
    (stranger,) = preflight(inventory, {"board-2": Needs()}).problems
    assert stranger.check == "ssh"
    assert stranger.found.startswith("its host key is unknown here, or not the one that was known (")
    assert "ssh-keyscan -p 22 10.77.0.3" in stranger.advice


@ssh_boards.needs_boards
def test_a_board_python_that_is_no_python(boards: ssh_boards.Boards) -> None:
    (missing,) = preflight(changed(boards, "python4"), {"board-2": Needs()}).problems
    assert missing.check == "python"
    assert missing.found == "there is no python4"
    (strange,) = preflight(changed(boards, "echo"), {"board-2": Needs()}).problems
    assert (strange.check, strange.found) == ("python", "echo gave no answer")


@pytest.fixture(scope="module")
def facts(boards: ssh_boards.Boards) -> BoardFacts:
    """What a board says, as if systemd had started it and its Python had torch."""
    found = ask_system(changed(boards, BARE), boards.inventory.device[1], [7702])
    return but(found, systemd={"version": 252, "runs": True}, torch={"version": "2.6.0+cpu"})


def but(facts: BoardFacts, **changes: Any) -> BoardFacts:
    clock = {name: changes[name] for name in ("ahead", "within") if name in changes}
    return replace(facts, system=system_facts({**asdict(facts.system), **changes}), **clock)


@ssh_boards.needs_boards
@pytest.mark.parametrize(("change", "check", "found"), [
    ({}, "", ""),
    ({"ahead": 31.0, "within": 2.0}, "", ""),
    ({"ahead": 33.0, "within": 2.0, "ntp": "yes"}, "clock", "+33 s against this machine's, although NTP"),
    ({"ahead": -7200.0, "within": 0.1, "ntp": "yes"}, "clock", "-7200 s against"),
    ({"python": [3, 9, 2]}, "python", f"{BARE} is 3.9.2"),
    ({"files": {"etc/nv_tegra_release": "# R36 (release), REVISION: 3.0, GCID: 1"}}, "board",
     "L4T 36.3.0 (JetPack 6.0): there is no torch 2.6 or newer for its CUDA 12.2"),
    ({"memory": {"total": 8 * 10**9, "available": 10**9, "held": 2 * 10**9}}, "", ""),
    ({"memory": {"total": 8 * 10**9, "available": 10**9, "held": 10**9}}, "memory",
     "2.50 GB are needed, 2.00 GB of 8.00 GB are available, with the 1.00 GB of the service that runs"),
    ({"ports": {"7702": [None, ""]}}, "port", "7702 is taken by another program"),
])
def test_judging(facts: BoardFacts, change: dict[str, Any], check: str, found: str) -> None:
    assert abs(facts.ahead) < 5
    assert facts.within < 30
    problems = judged(Needs(memory_bytes=int(2.5e9)), but(facts, **change), BARE)
    if "memory" not in change:
        problems = judged(Needs(), but(facts, **change), BARE)
    assert [problem.check for problem in problems] == ([check] if check else [])
    assert all(found in problem.found and problem.advice for problem in problems)


def judged(needs: Needs, facts: BoardFacts, python: str, torch_device: str = "cpu") -> list[Finding]:
    """What `deploy up` says of a board."""
    return faults("up", Subject(facts, python, torch_device, needs))


R36 = "# R36 (release), REVISION: 4.3, GCID: 1"


def plain_facts(l4t: str = "", **changes: Any) -> BoardFacts:
    """A board with nothing in the way."""
    one = {"device": 1, "free": 5, "writable": True}
    return but(BoardFacts(), **{
        "python": [3, 10, 1], "files": {"etc/nv_tegra_release": l4t}, "user": "me",
        "torch": {"version": "2.6.0"}, "systemd": {"version": 250, "runs": True},
        "memory": {"total": 9, "available": 9}, "disks": {"/opt/flowspec": one, "/var/lib/flowspec": one},
        **changes})


def with_gpu(capability: list[int] | None) -> dict[str, Any]:
    return {"version": "2.6.0", "cuda": capability, "built_for": None, "why": ""}


@pytest.mark.parametrize(("l4t", "capability", "torch_device", "found", "note"), [
    (R36, [8, 7], "cuda", "", False),
    (R36, None, "cuda", "2.6.0, built without CUDA, sees no CUDA GPU, and torch_device is 'cuda'", False),
    ("", None, "cuda:1", "sees no CUDA GPU, and torch_device is 'cuda:1'", False),
    (R36, [8, 7], "cpu", "this Jetson computes on its CPU", True),
    ("", None, "cpu", "", False)])
def test_the_torch_device_is_there(l4t: str, capability: list[int] | None, torch_device: str, found: str,
                                   note: bool) -> None:
    facts = plain_facts(l4t=l4t, torch=with_gpu(capability))
    problems = judged(Needs(), facts, BARE, torch_device)
    assert [(p.check, found in p.found, p.state == "warning") for p in problems] == (
        [("torch", True, note)] if found else [])
    assert all("torch_device = " in problem.advice for problem in problems)


def test_nf4_is_noted_for_an_orin() -> None:
    """There bitsandbytes' product of a segment's rows is slower than one with fp16 weights."""
    orin, thor = (plain_facts(l4t=R36, torch=with_gpu(capability)) for capability in ([8, 7], [11, 0]))
    (note,) = judged(Needs(dtype="nf4"), orin, BARE, "cuda")
    assert (note.check, note.state == "warning", "int4" in note.advice) == ("torch", True, True)
    assert judged(Needs(dtype="int4"), orin, BARE, "cuda") == []
    assert judged(Needs(dtype="nf4"), thor, BARE, "cuda") == []


def test_directories_on_one_disk_share_its_space() -> None:
    facts = plain_facts()
    one = asdict(facts.system.disks["/opt/flowspec"])
    assert room(facts, 3) == []
    (full,) = room(facts, 4)
    assert full.startswith("/opt/flowspec and /var/lib/flowspec need ")
    two = but(facts, disks={"/opt/flowspec": one, "/var/lib/flowspec": {**one, "device": 2}})
    assert room(two, 4) == []
    read_only = but(facts, disks={"/opt/flowspec": {**one, "writable": False}, "/var/lib/flowspec": one})
    assert [problem.check for problem in judged(Needs(), read_only, BARE)] == ["disk"]


def test_an_upgrades_environment_needs_room() -> None:
    """Free are 5 bytes.  A board that has environments is judged when the new one's digest is known."""
    facts = plain_facts(environments=["old", "older"])
    assert [problem.check for problem in judged(Needs(6), plain_facts(), BARE)] == ["disk"]
    assert judged(Needs(6), facts, BARE) == []
    assert room(facts, 4, "new") == ["/opt/flowspec and /var/lib/flowspec need 0.00 GB, 0.00 GB are free"]
    assert room(facts, 5, "older") == []


def room(facts: BoardFacts, missing: int, digest: str = "new") -> list[str]:
    """What is wrong for an environment of 2 bytes with this digest and a part that lacks so many."""
    found = room_problems(PreflightReport([], {"b": facts}), {"b": Needs(2)}, {"b": digest}, {"b": missing})
    assert all((problem.board, problem.check) == ("b", "disk") for problem in found)
    return [problem.found for problem in found]


@pytest.mark.parametrize(("ntp", "note"), [("no", True), ("unknown", True), ("yes", False)])
def test_a_clock_that_nothing_keeps_is_no_obstacle(ntp: str, note: bool) -> None:
    (clock,) = judged(Needs(), plain_facts(ahead=-90_000_000.0, ntp=ntp), BARE)
    assert (clock.check, clock.state == "warning") == ("clock", note)
    assert clock.found.startswith("-90000000 s against this machine's")
    assert ("`up`" in clock.advice or "deploy up" in clock.advice) == note


def test_a_release_that_is_unknown_is_noted() -> None:
    (note,) = judged(Needs(), plain_facts(l4t="# R99 (release), REVISION: 1.0", torch=with_gpu([8, 7])),
                    BARE, "cuda")
    assert (note.check, note.found.startswith("L4T 99.1.0 is a release"), note.state) == (
        "board", True, "warning")


def test_processors_that_differ_are_noted() -> None:
    def found(**machines: str) -> list[Finding]:
        return different_processors({name: but(BoardFacts(), machine=it) for name, it in machines.items()})

    (note,) = found(a="aarch64", b="x86_64", c="aarch64", d="")
    assert (note.board, note.state) == ("b", "warning")
    assert found(a="aarch64", b="aarch64") == found(a="") == []


@ssh_boards.needs_boards
def test_an_unknown_ssh_error(boards: ssh_boards.Boards) -> None:
    told = unreachable(boards.inventory.device[1], "board-1: ssh: a new kind of failure")
    assert (told.check, told.found) == ("ssh", "board-1: ssh: a new kind of failure")

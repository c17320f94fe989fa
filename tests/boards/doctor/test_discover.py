"""Facts of boards, and the cluster file made from them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples

from flowspec_edge.boards.doctor.discover import (
    DiscoveredBoard,
    board_from_facts,
    parse_hosts,
    profile_of,
    render_cluster_toml,
    require_mode,
    with_host_names,
)
from flowspec_edge.boards.inventory import DeviceEntry, load_inventory
from flowspec_edge.boards.probe.board import BoardInfo
from flowspec_edge.boards.probe.facts import program, system_facts, torch_check_program
from flowspec_edge.boards.probe.onboard import system
from flowspec_edge.errors import UsageError
from flowspec_edge.util import procfs

MODEL = "sys/firmware/devicetree/base/model"
JETSON = {
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic",
    MODEL: "NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0",
    "proc/meminfo": "MemTotal:       15655000 kB\nMemAvailable:   14000000 kB\n",
    "proc/cpuinfo": "", "var/lib/nvpmodel/status": "pmode:0001",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=25W >\n"}


def told(hostname: str = "orin", interface: str = "eth0", **changes: Any) -> DiscoveredBoard:
    """A Jetson's answer."""
    return board_from_facts(DeviceEntry(name="10.0.0.1", address="10.0.0.1"), system_facts({
        "hostname": hostname, "machine": "aarch64", "python": [3, 10, 12], "files": JETSON,
        "interface": interface, "disks": {"/opt/flowspec": {"free": 50_000_000_000}},
        "gpu": True, "torch": {"version": "2.7.0", "cuda": [8, 7], "why": ""}, "sudo": "", "user": "me",
        "memory": {"held": 0}, **changes}))


def test_a_jetsons_answer() -> None:
    found = told()
    assert found.board.title == "NVIDIA Jetson Orin NX Engineering Reference Developer Kit, L4T 36.4.3"
    assert (found.board.power_mode, found.modes) == ("25W", ("MAXN", "25W"))
    assert (found.profile, found.torch_device, found.disk_mb) == ("orin-nx-16gb", "cuda", 50_000)


def test_a_board_that_reports_no_disk_still_has_its_entry() -> None:
    found = told(disks={})
    assert found.as_json()["disk_mb"] is None
    text = render_cluster_toml([found], "lab", "cluster.toml")
    assert "disk" not in text
    assert "14,336 MB of it free" in text


@pytest.mark.parametrize(("machine", "total_mb", "mode", "profile"), [
    ("NVIDIA Jetson Orin Nano Developer Kit", 7990, "15W", "orin-nano-8gb"),
    ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", 7620 * 1.048576, "MAXN_SUPER",
     "orin-nano-8gb-super"),
    ("NVIDIA Jetson Orin Nano Developer Kit", 4000, "15W", ""),
    ("NVIDIA Jetson AGX Orin Developer Kit", 65_894, "MAXN", "agx-orin-64gb"),
    ("NVIDIA Jetson AGX Orin Developer Kit", 32_000, "MAXN", ""),
    ("NVIDIA Jetson AGX Thor Developer Kit", 131_900, "", "thor-t5000"),
    ("AMD EPYC, 2 cores", 16_000, "", "")])
def test_profiles_by_model_memory_and_power_mode(machine: str, total_mb: float, mode: str, profile: str
                                                 ) -> None:
    assert profile_of(BoardInfo(machine=machine, total_mb=total_mb, power_mode=mode)) == profile


def test_the_torch_device_of_a_board() -> None:
    missing = {"version": "", "cuda": None, "why": "ModuleNotFoundError: No module named 'torch'"}
    for_cpu = {"version": "2.13.0", "cuda": None, "why": ""}
    assert told(torch=missing).torch_device == "cuda"
    bare = {**JETSON, "etc/nv_tegra_release": ""}
    assert told(torch=for_cpu).torch_device == "cuda"  # a Jetson: the wrong torch is a finding, not a choice
    assert told(torch=for_cpu, files=bare).torch_device == "cpu"
    assert told(torch=missing, gpu=False, files=bare).torch_device == "cpu"


def said(python: list[str], **environment: str) -> dict[str, Any]:
    """The probe's facts of this machine, by a Python that gets its text on standard input."""
    text = program("system", address="127.0.0.1", paths=["/opt/nothing/here", "/opt/flowspec"], ports=[],
                   torch_check=torch_check_program("cpu"))
    run = subprocess.run([*python, "-"], capture_output=True, text=True, check=True, input=text,
                         env={"PATH": os.defpath, **environment})
    facts: dict[str, Any] = json.loads(run.stdout)["system"]
    return facts


def test_the_probe_reads_this_machine() -> None:
    """By the system's own Python, as on a board; against what others say of it."""
    facts = said([shutil.which("python3", path=os.defpath) or sys.executable])
    assert facts["hostname"] == socket.gethostname()
    assert facts["machine"] == os.uname().machine
    assert facts["interface"] == "lo"
    assert facts["disks"]["/opt/nothing/here"]["free"] > 0
    found = board_from_facts(DeviceEntry(name="here", address="127.0.0.1"), system_facts(facts))
    assert found.board.total_mb == procfs.sizes(Path("/proc/meminfo"))["MemTotal"] / 1e6


def test_complete_environments_are_told(tmp_path: Path) -> None:
    for digest in ("b", "a", "half"):
        (tmp_path / "venvs" / digest).mkdir(parents=True)
        if digest != "half":
            (tmp_path / "venvs" / digest / ".complete").touch()
    assert system.environments(["/opt/nothing/here", str(tmp_path)]) == ["a", "b"]


@pytest.mark.slow
def test_the_probe_reads_torch(tmp_path: Path) -> None:
    """The last line of what the import says; a user's own packages are not for services."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "broken"], check=True)
    [packages] = (tmp_path / "broken/lib").glob("python*/site-packages")
    for name in ("numpy", "torch"):
        (packages / f"{name}.py").write_text("" if name == "numpy" else "raise OSError('libcudart.so.12')")
    facts = said([str(tmp_path / "broken/bin/python")])
    assert facts["torch"]["why"] == "OSError: libcudart.so.12"
    assert (facts["torch"]["version"], facts["torch"]["cuda"]) == ("", None)
    own = tmp_path / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    own.mkdir(parents=True)
    (own / "torch.py").write_text("raise OSError('the user has this one')")
    facts = said([sys.executable], PYTHONUSERBASE=str(tmp_path))
    assert "the user has this one" not in facts["torch"]["why"]


def test_a_torch_that_only_the_user_has_is_found(tmp_path: Path) -> None:
    """By the system's own Python, which has none."""
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    version = subprocess.run([python, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"],
                             capture_output=True, text=True, check=True).stdout.strip()
    own = tmp_path / "lib" / version / "site-packages"
    (own / "torch").mkdir(parents=True)
    (own / "torch/__init__.py").touch()
    facts = said([python], PYTHONUSERBASE=str(tmp_path))
    assert facts["torch"]["why"] == "ModuleNotFoundError: No module named 'torch'"
    assert facts["torch"]["own"] == {"torch": str(own / "torch/__init__.py")}
    found = told(torch=facts["torch"])
    [fault] = found.faults
    assert fault.startswith(f"torch: only in {own}, ")
    assert fault.endswith("sudo pip3 install --index-url https://pypi.jetson-ai-lab.io/jp6/cu126/+simple/ "
                          "'torch==2.8.0' 'numpy==1.26.4'")


def test_names_are_host_names_where_these_tell_boards_apart() -> None:
    def names(*pairs: tuple[str, str]) -> list[str]:
        return [found.device.name for found in with_host_names([
            replace(told(hostname), device=DeviceEntry(name=address, address=address))
            for address, hostname in pairs])]

    assert names(("10.0.0.1", "orin-0"), ("10.0.0.2", "orin-1.lab.example")) == ["orin-0", "orin-1"]
    assert names(("10.0.0.1", "ubuntu"), ("10.0.0.2", "ubuntu"), ("10.0.0.3", "Ubuntu")) == [
        "ubuntu", "ubuntu-2", "Ubuntu-3"]
    assert names(("10.0.0.1", "localhost"), ("b", "a b"), ("orin", "orin"), ("c", "orin")) == [
        "10.0.0.1", "b", "orin", "orin-2"]


@pytest.mark.parametrize(("hosts", "fault"), [
    (["10.0.0.1"], "a cluster needs two boards"), (["a", "A"], "A is given twice"),
    (["a", "b:99999"], "b:99999: input should be less than or equal to 65535"),
    (["a", "b:x"], "'b:x' is not"), (["a", "fe80::1"], "'fe80::1' is not"),
    (["a", "10.0.0.300"], "10.0.0.300: '10.0.0.300' is not an IPv4 address"),
    (["a", "-oProxyCommand=x"], "'-oProxyCommand=x' is not a name"),
    (["a", "b;reboot"], "'b;reboot' is not a name"),
    (["a", "-x@b"], "-x@b: '-x' is not a user's name")])
def test_malformed_hosts(hosts: list[str], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        parse_hosts(hosts)


def test_hosts_say_more_than_options() -> None:
    found = parse_hosts(["a", "me@b:2222", "c:23", "you@d"], "all", 24, "/key").device
    assert [(d.address, d.ssh_user, d.ssh_port, d.ssh_key) for d in found] == [
        ("a", "all", 24, "/key"), ("b", "me", 2222, "/key"), ("c", "all", 23, "/key"),
        ("d", "you", 24, "/key")]


@st.composite
def boards(draw: st.DrawFn) -> list[DiscoveredBoard]:
    count = draw(st.integers(2, 5))
    words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    return [replace(
        told(draw(st.sampled_from(["orin", "board", "x_y", ""])),
             interface=draw(st.sampled_from(["", "eth0", "enP8p1s0"])),
             python=draw(st.sampled_from([[3, 8, 10], [3, 12, 3]])),
             files={**JETSON, **({MODEL: draw(words)} if draw(st.booleans()) else {})},
             gpu=draw(st.booleans()),
             torch={"version": draw(st.sampled_from(["", "2.7.0"])),
                    "cuda": draw(st.sampled_from([None, [8, 7]])),
                    "why": " ".join(draw(words).split())}),
        device=DeviceEntry(name=f"10.0.0.{i}", address=f"10.0.0.{i}",
                           ssh_user=draw(st.sampled_from(["", "me"])), ssh_port=draw(st.integers(1, 65535)),
                           ssh_key=draw(st.sampled_from(["", '/a "b"\\ü']))))
        for i in range(count)]


@examples(40, quick=16)
@given(boards(), st.sampled_from(["", '/x "y"/config']))
def test_the_file_round_trips(found: list[DiscoveredBoard], ssh_config: str) -> None:
    found = with_host_names(found)
    with TemporaryDirectory() as directory:
        file = Path(directory, "cluster.toml")
        file.write_text(render_cluster_toml(found, "lab", str(file), ssh_config), encoding="utf-8")
        read = load_inventory(file)
    assert (read.cluster.name, read.cluster.ssh_config) == ("lab", ssh_config)
    for board, device in zip(found, read.device, strict=True):
        own = board.device
        assert (device.name, device.address, device.ssh_user, device.ssh_port, device.ssh_key) == (
            own.name, own.address, own.ssh_user, own.ssh_port, own.ssh_key)
        assert not board.interface or read.interface(device) == board.interface
        assert read.torch_device(device) == board.torch_device
        assert device.profile == board.profile


def of_memory(total_mb: float, name: str, profile: str = "") -> DiscoveredBoard:
    found = told(name)
    return replace(found, board=replace(found.board, total_mb=total_mb), profile=profile,
                   device=DeviceEntry(name=name, address=name))


@pytest.mark.parametrize(("found", "roles", "says"), [
    ([of_memory(8000, "a"), of_memory(65_000, "b", "agx-orin-64gb")], ["auto", "auto"],
     "For a flowspec has no profile: the speed there is ESTIMATED"),
    ([of_memory(8000, "a"), of_memory(9000, "b")], ["auto", "auto"], "For a, b flowspec has no profile"),
    ([of_memory(8000, "a", "orin-nano-8gb"), of_memory(65_000, "b", "agx-orin-64gb")], ["auto", "auto"],
     "the planner decides")])
def test_roles_and_why(found: list[DiscoveredBoard], roles: list[str], says: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(render_cluster_toml(found, "lab", "cluster.toml"))
    read = load_inventory(file)
    assert [device.role for device in read.device] == roles
    assert says in " ".join(file.read_text().replace("\n#", "").split())
    for board, device in zip(found, read.device, strict=True):
        assert device.memory_mb == (None if board.profile else board.board.total_mb)
        assert device.cores == (None if board.profile else board.board.cores)


def other_board(name: str, **facts: Any) -> DiscoveredBoard:
    found = told(name)
    device = DeviceEntry(name=name, address=f"{name}.lab")
    return replace(found, device=device, board=replace(found.board, **facts))


def test_a_power_mode_that_a_board_lacks_is_refused_with_those_it_has() -> None:
    boards = [replace(other_board(name), modes=modes) for name, modes in (
        ("a", ("MAXN", "25W")), ("b", ("15W", "30W")), ("pc", ()))]
    require_mode(boards, "")
    require_mode([boards[0], boards[2]], "25W")  # a machine without modes has none to set
    with pytest.raises(UsageError) as raised:
        require_mode(boards, "25W")
    assert str(raised.value) == "no power mode '25W': b has 15W, 30W"
    with pytest.raises(UsageError) as raised:
        require_mode(boards, "MAXN_SUPER")
    assert str(raised.value) == "no power mode 'MAXN_SUPER': a has MAXN, 25W; b has 15W, 30W"


def test_all_boards_get_a_part_and_the_one_with_the_most_memory_drafts(tmp_path: Path) -> None:
    boards = [other_board(name, total_mb=mb) for name, mb in (("a", 8e3), ("b", 64e3), ("c", 64e3))]
    file, given = tmp_path / "lab.toml", {"power_mode": "25W"}
    file.write_text(render_cluster_toml(boards, "lab", str(file), cluster_settings=given, all_boards=True))
    found = load_inventory(file)
    assert [device.role for device in found.device] == ["verify", "draft", "verify"]
    assert found.decided
    assert [found.power_mode(device) for device in found.device] == ["25W"] * 3
    assert "takes part (--all-boards), whether or not fewer would be faster; b drafts.\n" in file.read_text()
    file.write_text(render_cluster_toml(boards, "lab", str(file)))
    assert [device.role for device in load_inventory(file).device] == ["auto"] * 3

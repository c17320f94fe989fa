"""What boards say of themselves, and the cluster file that comes of it."""

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
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec_edge import procfs
from flowspec_edge.errors import UsageError
from flowspec_edge.fleet import survey_probe
from flowspec_edge.fleet.board import Board
from flowspec_edge.fleet.inventory import DeviceEntry, load_inventory
from flowspec_edge.fleet.survey import Found, named, profile_of, read_answer, targets
from flowspec_edge.fleet.survey_toml import render

JETSON = {
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic",
    "proc/device-tree/model": "NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0",
    "proc/meminfo": "MemTotal:       15655000 kB\nMemAvailable:   14000000 kB\n",
    "proc/cpuinfo": "", "var/lib/nvpmodel/status": "pmode:0001",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=25W >\n"}


def told(hostname: str = "orin", **changes: Any) -> Found:
    """A Jetson's answer."""
    return read_answer(DeviceEntry(name="10.0.0.1", address="10.0.0.1"), {
        "hostname": hostname, "arch": "aarch64", "python": "3.10.12", "files": JETSON, "interface": "eth0",
        "disk_free": 50_000_000_000, "gpu": True,
        "torch": {"version": "2.7.0", "cuda": True, "error": ""}, **changes})


def test_a_jetsons_answer() -> None:
    found = told()
    assert found.board.title == "NVIDIA Jetson Orin NX Engineering Reference Developer Kit, L4T 36.4.3"
    assert (found.board.power_mode, found.modes) == ("25W", ("MAXN", "25W"))
    assert (found.profile, found.torch_device, found.disk_mb) == ("orin-nx-16gb", "cuda", 50_000)


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
    assert profile_of(Board(machine=machine, total_mb=total_mb, power_mode=mode)) == profile


def test_where_layers_would_lie() -> None:
    missing = {"version": None, "cuda": False, "error": ""}
    for_cpu = {"version": "2.13.0", "cuda": False, "error": ""}
    assert told(torch=missing).torch_device == "cuda"
    bare = {**JETSON, "etc/nv_tegra_release": ""}
    assert told(torch=for_cpu).torch_device == "cuda"  # a Jetson: the wrong torch is a finding, not a choice
    assert told(torch=for_cpu, files=bare).torch_device == "cpu"
    assert told(torch=missing, gpu=False, files=bare).torch_device == "cpu"


def test_the_probe_reads_this_machine() -> None:
    """By the system's own Python, as on a board, from standard input; against what others say of it."""
    python = shutil.which("python3", path=os.defpath) or sys.executable
    run = subprocess.run([python, "-", "127.0.0.1", "/opt/nothing/here"], capture_output=True, text=True,
                         check=True, input=Path(survey_probe.__file__).read_text())
    said = json.loads(run.stdout)
    assert said["hostname"] == socket.gethostname()
    assert said["arch"] == os.uname().machine
    assert said["interface"] == "lo"
    assert said["disk_free"] > 0
    found = read_answer(DeviceEntry(name="here", address="127.0.0.1"), said)
    assert found.board.total_mb == procfs.sizes(Path("/proc/meminfo"))["MemTotal"] / 1e6


def test_the_probe_reads_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert survey_probe.torch() == {
        "version": torch.__version__, "cuda": torch.cuda.is_available(), "error": ""}
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open\\n shared object')")
    run = subprocess.run([sys.executable, "-S", "-", "10.9.9.9", "/"], capture_output=True, text=True,
                         check=True, input=Path(survey_probe.__file__).read_text(),
                         env={"PYTHONPATH": str(tmp_path), "SSH_CONNECTION": "10.0.0.1 5 127.0.0.1 22"})
    said = json.loads(run.stdout)
    assert said["torch"] == {"version": None, "cuda": False,
                             "error": "libcudart.so.12: cannot open shared object"}
    assert said["interface"] == "lo"


def test_names_are_host_names_where_these_tell_boards_apart() -> None:
    def names(*pairs: tuple[str, str]) -> list[str]:
        return [found.device.name for found in named([
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
def test_hosts_that_are_none(hosts: list[str], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        targets(hosts)


def test_hosts_say_more_than_options() -> None:
    found = targets(["a", "me@b:2222", "c:23", "you@d"], "all", 24, "/key").device
    assert [(d.address, d.ssh_user, d.ssh_port, d.ssh_key) for d in found] == [
        ("a", "all", 24, "/key"), ("b", "me", 2222, "/key"), ("c", "all", 23, "/key"),
        ("d", "you", 24, "/key")]


@st.composite
def boards(draw: st.DrawFn) -> list[Found]:
    count = draw(st.integers(2, 5))
    words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    return [replace(
        told(draw(st.sampled_from(["orin", "board", "x_y", ""])),
             interface=draw(st.sampled_from(["", "eth0", "enP8p1s0"])),
             python=draw(st.sampled_from(["3.8.10", "3.12.3"])),
             files={**JETSON, "proc/device-tree/model": draw(words)} if draw(st.booleans()) else JETSON,
             gpu=draw(st.booleans()),
             torch={"version": draw(st.sampled_from([None, "2.7.0"])), "cuda": draw(st.booleans()),
                    "error": " ".join(draw(words).split())}),
        device=DeviceEntry(name=f"10.0.0.{i}", address=f"10.0.0.{i}",
                           ssh_user=draw(st.sampled_from(["", "me"])), ssh_port=draw(st.integers(1, 65535)),
                           ssh_key=draw(st.sampled_from(["", '/a "b"\\ü']))))
        for i in range(count)]


@settings(max_examples=40)
@given(boards(), st.sampled_from(["", '/x "y"/config']))
def test_whatever_was_found_the_file_says_it(found: list[Found], ssh_config: str) -> None:
    found = named(found)
    with TemporaryDirectory() as directory:
        file = Path(directory, "cluster.toml")
        file.write_text(render(found, "lab", str(file), ssh_config), encoding="utf-8")
        read = load_inventory(file)
    assert (read.cluster.name, read.cluster.ssh_config) == ("lab", ssh_config)
    for board, device in zip(found, read.device, strict=True):
        own = board.device
        assert (device.name, device.address, device.ssh_user, device.ssh_port, device.ssh_key) == (
            own.name, own.address, own.ssh_user, own.ssh_port, own.ssh_key)
        assert not board.interface or read.interface(device) == board.interface
        assert read.torch_device(device) == board.torch_device
        assert device.profile == board.profile


def of_memory(total_mb: float, name: str, profile: str = "") -> Found:
    found = told(name)
    return replace(found, board=replace(found.board, total_mb=total_mb), profile=profile,
                   device=DeviceEntry(name=name, address=name))


@pytest.mark.parametrize(("found", "roles", "says"), [
    ([of_memory(8000, "a"), of_memory(8000, "b"), of_memory(16_000, "c")], ["verify", "verify", "draft"],
     "c has by far the most memory: it drafts"),
    ([of_memory(8000, "a"), of_memory(9000, "b")], ["auto", "auto"], "the first one drafts"),
    ([of_memory(8000, "a", "orin-nano-8gb"), of_memory(65_000, "b", "agx-orin-64gb")], ["auto", "auto"],
     "the planner decides")])
def test_roles_and_why(found: list[Found], roles: list[str], says: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(render(found, "lab", "cluster.toml"))
    read = load_inventory(file)
    assert [device.role for device in read.device] == roles
    assert says in " ".join(file.read_text().replace("\n#", "").split())


def test_what_needs_a_decision_is_in_the_comments() -> None:
    text = render([told("a", python="3.8.10", interface="",
                        torch={"version": None, "cuda": False, "error": "no libcudart"}),
                   told("b", torch={"version": None, "cuda": False, "error": ""}),
                   told("c", torch={"version": "2.9.0", "cuda": False, "error": ""})], "lab", "x.toml")
    for line in ("→ this Python is too old", "→ import torch fails: no libcudart", "→ no interface of it has",
                 "# power mode 25W of MAXN, 25W", 'torch_device = "cuda"',
                 "→ this torch cannot use the GPU: install the one for this JetPack",
                 "no torch yet: on a Jetson", "deploy up --cluster x.toml"):
        assert line in text

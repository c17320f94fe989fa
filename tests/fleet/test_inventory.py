"""cluster.toml: the example, and every fault by its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.inventory import load_inventory, resolve
from flowspec_edge.resources import resource_dir

HEAD = '[cluster]\nname = "lab"\n'
DRAFT = '[[device]]\nname = "a"\naddress = "10.0.0.1"\nrole = "draft"\n'
VERIFY = '[[device]]\nname = "b"\naddress = "10.0.0.2"\nrole = "verify"\n'


def write(path: Path, text: str) -> Path:
    file = path / "cluster.toml"
    file.write_text(text)
    return file


def test_the_example() -> None:
    found = load_inventory(resource_dir("deploy") / "cluster.example.toml")
    assert found.draft.name == "orin-0"
    assert [device.name for device in found.verify] == ["orin-1", "orin-2", "orin-3", "orin-4"]
    assert [found.interface(device) for device in found.verify] == ["eth0", "eth0", "enP8p1s0", "eth0"]
    assert found.torch_device(found.draft) == "cuda"
    assert found.protected_ports() == [22, 2222, 7701]


def test_an_entry_goes_before_the_cluster_and_little_must_be_given(tmp_path: Path) -> None:
    own = 'python = "/usr/bin/python3"\ninterface = "wlan0"\ntorch_device = "cuda"\n'
    found = load_inventory(write(tmp_path, HEAD + VERIFY + own + DRAFT))
    (board,) = found.verify
    assert (found.python(board), found.interface(board), found.torch_device(board)) == (
        "/usr/bin/python3", "wlan0", "cuda")
    assert (found.python(found.draft), found.interface(found.draft), found.torch_device(found.draft)) == (
        "/opt/flowspec/current/venv/bin/python", "eth0", "cpu")
    assert resolve(board) == "10.0.0.2"


@pytest.mark.parametrize(("text", "fault"), [
    (HEAD + DRAFT, 'device: no entry has role = "verify"'),
    (HEAD + VERIFY, 'device: exactly one entry needs role = "draft", and none has it'),
    (HEAD + DRAFT + VERIFY.replace("verify", "draft"), "device: exactly one .* not a and b"),
    (HEAD + DRAFT + VERIFY.replace('"b"', '"a"'), "device: name 'a' is given to entries 0 and 1"),
    (HEAD + DRAFT + VERIFY.replace("0.2", "0.1"), r"device: address '10.0.0.1' is given to entries 0 and 1"),
    (HEAD + DRAFT + VERIFY + "ssh_port = 0", r"device\.1\.ssh_port"),
    (HEAD + DRAFT + VERIFY + "ssh_port = 70000", r"device\.1\.ssh_port"),
    (HEAD + DRAFT + VERIFY + 'ssh_port = "22"', r"device\.1\.ssh_port"),
    (HEAD + "control_port = 7702\n" + DRAFT + VERIFY, r"cluster: control_port: port 7702 .* another key"),
    (HEAD + "colour = 1\n" + DRAFT + VERIFY, r"unknown key 'cluster\.colour'"),
    (HEAD + DRAFT + VERIFY.replace("10.0.0.2", "10.0.0.256"), r"device\.1\.address: .* not an IPv4 address"),
    (HEAD + DRAFT + VERIFY.replace("10.0.0.2", "-oProxyCommand=x"), r"device\.1\.address: .* host name"),
    (HEAD + DRAFT + VERIFY.replace("10.0.0.2", "fe80::1"), r"device\.1\.address: .* host name"),
    (HEAD + DRAFT + VERIFY + 'interface = "eth0; reboot"', r"device\.1\.interface"),
    (HEAD + DRAFT + VERIFY + 'ssh_user = "-x"', r"device\.1\.ssh_user"),
    (HEAD + DRAFT + VERIFY + 'python = "python3"', r"device\.1\.python"),
    (HEAD + DRAFT + VERIFY.replace("verify", "both"), r"device\.1\.role"),
    (DRAFT + VERIFY, "missing key 'cluster'"),
    ("[cluster", "not valid TOML"),
])
def test_faults_name_file_and_key(tmp_path: Path, text: str, fault: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UsageError, match=fault) as raised:
        load_inventory(file)
    assert str(raised.value).startswith(str(file))
    assert "\n" not in str(raised.value)


def test_a_name_that_nobody_knows(tmp_path: Path) -> None:
    found = load_inventory(write(tmp_path, HEAD + DRAFT + VERIFY.replace("10.0.0.2", "no-such-host.invalid")))
    with pytest.raises(FlowspecError, match=r"b: the address no-such-host\.invalid is unknown here"):
        resolve(found.verify[0])

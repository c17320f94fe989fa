"""cluster.toml: the example, and every fault by its key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples

from flowspec_edge.boards.commands import protected_ports
from flowspec_edge.boards.inventory import (
    ClusterSettings,
    DeviceEntry,
    load_inventory,
    resolve,
    with_settings,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.util.resources import resource_dir

HEAD = '[cluster]\nname = "lab"\n'
DRAFT = '[[device]]\nname = "a"\naddress = "10.0.0.1"\nrole = "draft"\n'
VERIFY = '[[device]]\nname = "b"\naddress = "10.0.0.2"\nrole = "verify"\n'
AUTO = '[[device]]\nname = "b"\naddress = "10.0.0.2"\n'


def layered(*layers: str | None) -> str:
    """A draft device a, and verify devices b, c … with such layers, each in the last line of its entry."""
    return HEAD + DRAFT + "".join(
        f'[[device]]\nname = "{name}"\naddress = "{name}"\nrole = "verify"\n' +
        (f"layers = {own}\n" if own else "") for name, own in zip("bcd", layers, strict=False))


def write(path: Path, text: str) -> Path:
    file = path / "cluster.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    return file


def test_the_example() -> None:
    found = load_inventory(resource_dir("deploy") / "cluster.example.toml")
    assert found.draft.name == "orin-0"
    assert [device.name for device in found.verify] == ["orin-1", "orin-2", "orin-3", "orin-4"]
    assert [found.interface(device) for device in found.verify] == ["eth0", "eth0", "enP8p1s0", "eth0"]
    assert found.torch_device(found.draft) == "cuda"
    assert protected_ports(found) == [22, 2222, 7701]


def test_the_port_of_former_groups_is_ignored(tmp_path: Path) -> None:
    found, without = (load_inventory(write(tmp_path, HEAD + former + DRAFT + VERIFY))
                      for former in ("group_port = 7702\n", ""))
    assert found == without


def test_the_example_has_every_key_and_its_comments_the_defaults() -> None:
    """What is commented out, uncommented, says what is true without it."""
    text = (resource_dir("deploy") / "cluster.example.toml").read_text(encoding="utf-8")
    head, *devices = text.split("[[device]]\n")
    keys = re.compile(r"^(?:# )?(\w+) = ", re.MULTILINE)
    assert set(keys.findall(head.partition("[cluster]")[2])) == set(ClusterSettings.model_fields)
    assert {key for device in devices for key in keys.findall(device)} == set(DeviceEntry.model_fields)
    for key, value in re.findall(r"^# (\w+) = ([^#\n]+)", head, re.MULTILINE):
        if key != "draft":
            assert ClusterSettings.model_fields[key].default == json.loads(value), key


def test_an_entry_overrides_the_cluster_and_its_defaults(tmp_path: Path) -> None:
    own = 'python = "/usr/bin/python3"\ninterface = "wlan0"\ntorch_device = "cuda"\npower_mode = ""\n'
    found = load_inventory(write(tmp_path, HEAD + 'power_mode = "15W"\n' + VERIFY + own + DRAFT))
    (board,) = found.verify
    assert (found.python(board), found.interface(board), found.torch_device(board)) == (
        "/usr/bin/python3", "wlan0", "cuda")
    assert (found.python(found.draft), found.interface(found.draft), found.torch_device(found.draft)) == (
        "/opt/flowspec/current/venv/bin/python", "eth0", "cpu")
    assert (found.power_mode(board), found.power_mode(found.draft)) == ("", "15W")
    assert resolve(board) == "10.0.0.2"


@pytest.mark.parametrize(("text", "fault"), [
    (HEAD + DRAFT, "3: device.0: a cluster needs two boards at least"),
    (HEAD + DRAFT + AUTO.replace("b", "a"), "8: device.1.name: 'a' is another entry's name, too (10.0.0.1)"),
    (HEAD + VERIFY + VERIFY.replace("b", "c").replace("0.2", "0.3"),
     '3: device: exactly one entry needs role = "draft", and none has it'),
    (HEAD + DRAFT + VERIFY.replace("verify", "draft"), "10: device.1.role: exactly one entry needs role"),
    (HEAD + DRAFT + VERIFY.replace('"b"', '"A"'), "8: device.1.name: 'A' is another entry's name, too"),
    (HEAD + DRAFT + VERIFY.replace("0.2", "0.1"),
     "9: device.1.address: '10.0.0.1' is another entry's address, too (a): every board needs its own"),
    (HEAD + DRAFT + VERIFY + "ssh_port = 0", "11: device.1.ssh_port: input should be greater than or equal"),
    (HEAD + DRAFT + VERIFY + 'ssh_port = "22"', "11: device.1.ssh_port: input should be a valid integer, not "
                                                '"22": write it without quotes'),
    (HEAD + DRAFT + VERIFY + "ssh_user = 5", "11: device.1.ssh_user: input should be a valid string, not 5: "
                                             "write it in quotes"),
    (HEAD + "control_port = 7702\n" + DRAFT + VERIFY,
     "3: cluster.control_port: port 7702 is given to data_port, too: every one needs its own"),
    (HEAD + "colour = 1\n" + DRAFT + VERIFY, "3: unknown key 'cluster.colour': known here are name, interf"),
    (HEAD + "\n'interfaec' = 'x' # y\n" + DRAFT + VERIFY,
     "4: unknown key 'cluster.interfaec': did you mean 'interface'?"),
    (HEAD + 'ssh_user = "x"\n' + DRAFT + VERIFY, "3: unknown key 'cluster.ssh_user': it belongs to [[devic"),
    (HEAD + DRAFT + VERIFY + 'model = "x"', "11: unknown key 'device.1.model': it belongs to [cluster]"),
    (HEAD + DRAFT + VERIFY + 'interface = "eth0; reboot"',
     "11: device.1.interface: 'eth0; reboot' is not a network interface"),
    (HEAD + DRAFT + VERIFY + 'python = "python3"', "11: device.1.python: 'python3' is not an absolute path"),
    (HEAD + DRAFT + VERIFY.replace("verify", "both"),
     "10: device.1.role: input should be 'auto', 'draft' or 'verify', not \"both\""),
    (HEAD + 'context = 0\nport = 1\n' + DRAFT + VERIFY,
     "3: cluster.context: input should be greater than or equal to 1, not 0; line 4: unknown key"),
    (HEAD + 'dtype = "int3"\n' + DRAFT + VERIFY, "3: cluster.dtype: input should be 'auto', 'fp32', 'bf16'"),
    (HEAD + 'strategy = "magic"\n' + DRAFT + VERIFY, "3: cluster.strategy: no strategy 'magic'"),
    (HEAD + 'strategy = "megatron"\n' + DRAFT + VERIFY, "3: cluster.strategy: megatron exists in virtual"),
    (HEAD + 'serve_host = "a b"\n' + DRAFT + VERIFY, "3: cluster.serve_host: 'a b' is not an address to"),
    (DRAFT + VERIFY, "missing key 'cluster'"),
    (HEAD + "[[device]]\nname = 'a'\n" + VERIFY, "3: missing key 'device.0.address'"),
    (HEAD + "[cluster", "3 is not valid TOML"),
    (HEAD + 'name = "x"\n', "3 is not valid TOML: Cannot overwrite a value (at line 3, column 11); this"),
    (HEAD + "model = demo\n", "3 is not valid TOML: Invalid value (at line 3, column 9); texts need quotes"),
    ("name = 'x'\n\udcff", "2 is not valid TOML"),
    # Layers: of two devices b and c after the draft device a.
    (layered(None, "[0, 4]"), "7: device.1: other devices have layers, but b has none: either give every"),
    (layered("[0, 4]", "[3, 8]"), "16: device.2.layers: [3, 8] overlaps the layers up to 4 of the devices"),
    (layered("[0, 4]", "[5, 8]"), "16: device.2.layers: [5, 8] leaves layer 4 without a device: begin "),
    (layered("[4, 8]", "[0, 4]"), "11: device.1.layers: [4, 8] leaves layers 0 to 3 without a device: "),
    (layered("[0, 4]", "[4, 4]"), "16: device.2.layers: [4, 4] holds no layer"),
    (layered("[0, 4, 8]", "[4, 8]"), "11: device.1.layers: give two numbers, [first, end]"),
    (layered('["0", 4]', "[4, 8]"), "11: device.1.layers.0: input should be a valid integer, not \"0\""),
    (layered("4", "[4, 8]"), "11: device.1.layers: give two numbers"),
    (HEAD + DRAFT + "layers = [0, 4]\n" + VERIFY, "7: device.0.layers: only a device with role ="),
    (HEAD + DRAFT + AUTO + "layers = [0, 4]\n", "10: device.1.layers: only a device with role ="),
])
def test_faults_name_file_line_and_key(tmp_path: Path, text: str, fault: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        load_inventory(file)
    said = str(raised.value)
    assert said.startswith(f"{file}{':' if fault[0].isdigit() else ': '}{fault}")
    assert "\n" not in said


def test_sshs_files_lie_beside_the_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    write(tmp_path, HEAD + 'ssh_config = "ssh/config"\n' + DRAFT + 'ssh_key = "~/.ssh/key"\n' + VERIFY)
    monkeypatch.chdir(tmp_path)
    found = load_inventory(Path("cluster.toml"))
    assert found.cluster.ssh_config == f"{tmp_path}/ssh/config"
    assert (found.draft.ssh_key, found.verify[0].ssh_key) == ("/home/me/.ssh/key", "")


TEXT = (resource_dir("deploy") / "cluster.example.toml").read_text(encoding="utf-8")
LINES = st.sampled_from([*TEXT.split("\n"), "[x]", "[[cluster]]", "[cluster.a]", "[device]", "[[device]]",
                         "'a\tb' = 1"])
VALUES = st.sampled_from(["1", "-1", "true", "[]", "[1, 2]", "{a = 1}", "''", "1.5", "nan", "1979-05-27",
                          "'''\nx\n'''", '"\\n"'])
EDITS = st.tuples(st.integers(0, TEXT.count("\n")), LINES, VALUES, st.sampled_from("dixv"))


@examples(100, quick=18)
@given(st.lists(EDITS, max_size=4))
def test_every_error_is_one_line(edits: list[tuple[int, str, str, str]]) -> None:
    """Lines of the example deleted, inserted, replaced, or with other values."""
    rows = TEXT.split("\n")
    for at, line, value, kind in edits:
        place = min(at, len(rows) - 1)
        other = f"{rows[place].removeprefix('# ').partition(' = ')[0]} = {value}"
        rows[place:place + (kind != "i")] = {"d": [], "i": [line], "x": [line], "v": [other]}[kind]
    with TemporaryDirectory() as directory:
        file = write(Path(directory), "\n".join(rows))
        said = ""
        try:
            load_inventory(file)
        except UsageError as error:
            said = str(error)
        assert said == "" or said.startswith(str(file))
        assert "\n" not in said


def test_undecided_roles_are_an_error_with_a_next_step(tmp_path: Path) -> None:
    verify = VERIFY.replace("b", "c").replace(".2", ".3")
    found = load_inventory(write(tmp_path, HEAD + AUTO + DRAFT + verify))
    assert not found.decided
    assert [device.name for device in found.ring] == ["a", "b", "c", "a"]
    for ask in (lambda: found.draft, lambda: found.verify):
        with pytest.raises(UsageError, match=r'cluster lab: b: role is "auto"'):
            ask()


SET = """\
# my lab, as of May
[cluster]
name = "lab"   # short
model = "demo"      # to try
# at_once = 2   # requests
cors_origins = [
  "https://a.example",  # one
]

# first board
[[device]]
name = "a"
address = "10.0.0.1"  # by the door
role = "auto"
[[device]]
name = "b"
address = "10.0.0.2"
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_settings_change_their_lines_alone(tmp_path: Path, end: str) -> None:
    file = write(tmp_path, SET.replace("\n", end))
    made = with_settings(file, {"model": "qwen3-8b", "dtype": "int4", "at_once": "3", "memory_mb": "8000",
                                "cors_origins": '["*"]'})
    assert made.count(end) == made.count("\n")
    changed = made.replace(end, "\n").splitlines()
    assert [line for line in SET.splitlines() if line not in changed] == [
        'model = "demo"      # to try', "# at_once = 2   # requests", "cors_origins = [",
        '  "https://a.example",  # one', "]"]
    assert [line for line in changed if line not in SET.splitlines()] == [
        'model = "qwen3-8b"  # to try', "at_once = 3     # requests", 'cors_origins = ["*"]',
        'dtype = "int4"', "memory_mb = 8000", "memory_mb = 8000"]


def test_a_key_without_a_value_is_left_out_and_a_boards_own_stays_with_it(tmp_path: Path) -> None:
    file = write(tmp_path, SET)
    made = with_settings(file, {"model": "", "power_mode": ""})
    assert [line for line in SET.splitlines() if line not in made.splitlines()] == [
        'model = "demo"      # to try']
    file.write_text(with_settings(file, {"power_mode": 'MAXN "x" # y'}, ["b"]))
    a, b = load_inventory(file).device
    assert (a.power_mode, b.power_mode) == (None, 'MAXN "x" # y')


@pytest.mark.parametrize(("settings", "boards", "fault"), [
    ({"modl": "x"}, [], "no key 'modl' in a cluster file: did you mean 'model'?"),
    ({"dtype": "int4", "nothing": "1"}, [], "no key 'nothing' in a cluster file: deploy/cluster.example"),
    ({"dtype": "int4"}, ["b"], "dtype is of the whole cluster, not of a board: leave --board out"),
    ({"role": "verify"}, ["c"], "no board 'c' in "),
    ({"context": "4k"}, [], "cluster.context: input should be a valid integer"),
    ({"at_once": "3\nserve_port = 9"}, [], "cluster.at_once: input should be a valid integer"),
    ({"name": ""}, [], "missing key 'cluster.name'"),
    ({"layers": "[0, 4]"}, ["b"], "other devices have layers, but a has none"),
    ({"profile": "orin-nono"}, ["a"], "no profile 'orin-nono'")])
def test_a_wrong_setting_is_named(tmp_path: Path, settings: dict[str, str], boards: list[str], fault: str
                                  ) -> None:
    file = write(tmp_path, SET)
    with pytest.raises(UsageError) as error:
        with_settings(file, settings, boards)
    assert fault in str(error.value)
    assert "\n" not in str(error.value)

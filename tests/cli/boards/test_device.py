"""flowspec device: a real measurement of this machine against a real peer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kits.tiny_model_dir import tiny_model_dir
from safetensors import safe_open

from flowspec_edge.boards.measurement.stage import ROWS
from flowspec_edge.cli.main import main
from flowspec_edge.device_profile import LaunchCost, load_profile, profile_names, render

PEER = [sys.executable, "-m", "flowspec_edge.cli.main",
        "device", "peer", "--host", "127.0.0.1", "--port", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target without draft models."""
    path = tmp_path_factory.mktemp("poor")
    whole = tiny_model_dir(tmp_path_factory.mktemp("whole"))
    (path / "target").symlink_to(whole / "target")
    return path


@pytest.mark.slow
def test_measure_this_machine_and_the_link_to_a_peer(model: Path, tmp_path: Path,
                                                     capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "board.toml"
    with subprocess.Popen([*PEER, "--for", "300"], stderr=subprocess.PIPE, text=True) as peer:
        try:
            assert peer.stderr is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", peer.stderr.readline())
            assert found
            address = found[0]
            code = main(["device", "profile", "--model", str(model), "--quick", "--threads", "1",
                         "--peer", address, "--out", str(out)])
        finally:
            peer.kill()
    said = capfd.readouterr()
    assert code == 0, said.err
    assert {line.split(" ")[1] for line in said.err.splitlines()} <= {"profile:"}  # progress
    assert f"use it with --profile {out}" in said.out
    profile = load_profile(str(out))
    assert (profile.name, profile.kind, profile.provenance) == ("board", "device", "measured")
    assert profile.stage.rows == list(ROWS)
    assert len(profile.stage.context_ms) == len(ROWS)
    assert (profile.model.layers, profile.model.hidden_width, profile.model.bytes_per_value) == (4, 64, 4)
    with safe_open(model / "target" / "model.safetensors", "np") as stored:
        names = list(stored.keys())
        layer = [stored.get_tensor(name).size for name in names if ".layers.0." in name]
    assert profile.model.layer_mb == pytest.approx(4 * sum(layer) / 1e6, rel=1e-3)
    # What the model lacks is estimated: SPD's two layers and lm_head, at the target's pace.
    ten = profile.stage.milliseconds(10)
    head = profile.lm_head.ms + 10 * profile.lm_head.row_ms
    assert profile.draft.spd_pass_ms == pytest.approx(2 * ten + head, rel=1e-2)
    assert "no EAGLE head and no small draft model and no SPD module" in profile.source
    assert "The link is that to the peer" in profile.source
    assert profile.conditions is not None
    assert (profile.conditions.peer, profile.conditions.threads) == (address, 1)
    assert os.uname().nodename not in out.read_text(encoding="utf-8")
    assert profile.memory is not None
    assert profile.memory.process_mb < 2000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["board.toml"]


def test_a_peer_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["device", "profile", "--peer", "127.0.0.1:1"]) == 1
    assert "on that device run `flowspec device peer`" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_can_be_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "show", name]) == 0
    said = capsys.readouterr().out
    profile = load_profile(name)
    assert f"{name}  {profile.kind}, {profile.provenance}" in said
    assert f"{profile.stage.rows[0]:g}" in said
    assert profile.source.split()[0] in said


def test_the_price_of_a_launch_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = load_profile("paper-7b")
    path = tmp_path / "dear.toml"
    path.write_text(render(own.model_copy(update={"launch": LaunchCost(us=31.5)})))
    assert main(["device", "show", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "31.5 µs each: 25 a layer and 18 a segment" in said
    assert "16 80.57 80.57" in said  # ms of a segment of 16 rows


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "show", "paper-7b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load_profile("paper-7b").model_dump()


def test_a_peer_ends_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "peer", "--host", "127.0.0.1", "--port", "0", "--for", "0.1"]) == 0
    assert "flowspec device profile --peer THIS-HOST:" in capsys.readouterr().err

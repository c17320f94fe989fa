"""``flowspec sweep``: real runs in virtual time, their files, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from flowspec_edge.cli.bench.sweep import app
from flowspec_edge.cli.main import main
from flowspec_edge.lab.bench.results import load_sweep

COMMANDS = ["bandwidth", "depth", "stages", "segment", "latency", "acceptance"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text('{"prompt": "import os\\n"}\n{"prompt": "def f(x):"}\n')
    return path


@pytest.fixture
def given(model: Path, prompts: Path) -> list[str]:
    return ["--model", str(model), "--prompts", str(prompts), "--max-new-tokens", "6"]


def sweep(axis: str, out: Path, *arguments: str) -> dict[str, Any]:
    assert main(["sweep", axis, "--json", str(out), *arguments]) == 0
    data: dict[str, Any] = json.loads(out.read_text())
    return data


def test_bandwidth_in_one_go_and_resumed(given: list[str], tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    whole, part, figure = tmp_path / "whole.json", tmp_path / "part.json", tmp_path / "f.svg"
    data = sweep("bandwidth", whole, *given, "--mbps", "1000,125", "--strategies", "megatron,flowspec",
                 "--out", str(figure))
    out, err = capsys.readouterr()
    assert {line.split(" ")[1] for line in err.splitlines()} <= {"sweep:"}  # progress, if it took long
    assert out.startswith("tokens/s by link bandwidth, VIRTUAL TIME under paper-7b, 4 stages, T = 0\n")
    assert "published" in out
    assert (data["kind"], data["links"]) == ("sweep", "virtual")
    assert (data["emulated"], data["complete"]) == (False, True)
    assert [point["value"] for point in data["points"]] == [1000, 125]
    for point in data["points"]:
        assert [row["strategy"] for row in point["rows"]] == ["megatron", "flowspec"]
        assert all(row["identical"] for row in point["rows"])
        assert point["measured_mbps"] is None
    fast, slow = (point["rows"][0]["tokens_per_second"] for point in data["points"])
    assert slow < 0.6 * fast  # tensor parallelism sends hidden states in every layer
    assert data["settings"]["draft"] == "eagle2"
    assert data["settings"]["temperature"] == 0.0
    assert "VIRTUAL TIME under paper-7b" in "".join(ElementTree.parse(figure).getroot().itertext())

    first = sweep("bandwidth", part, *given, "--mbps", "125", "--strategies", "megatron")
    first["points"][0]["samples"][0]["ttft_s"] = 77.0  # who measured it again would lose this
    part.write_text(json.dumps(first))
    again = sweep("bandwidth", part, *given, "--mbps", "1000,125", "--strategies", "megatron,flowspec",
                  "--resume")
    assert again["points"][1]["samples"][0]["ttft_s"] == 77.0
    assert again["points"][0] == data["points"][0]
    assert again["points"][1]["samples"][1:] == data["points"][1]["samples"][1:]
    before = part.read_bytes()
    sweep("bandwidth", part, *given, "--mbps", "125", "--strategies", "megatron", "--resume")
    assert part.read_bytes() == before
    assert load_sweep(whole).as_json() == data


def test_depth_is_a_grid(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = sweep("depth", tmp_path / "d.json", *given, "--depths", "2,4", "--expand-depths", "1,3", "--limit",
                 "1", "--out", str(tmp_path / "d.svg"))
    assert [point["value"] for point in data["points"]] == [[2, 1], [2, 3], [4, 1], [4, 3]]
    assert not {"depth", "expand_depth"} & data["settings"].keys()
    out = capsys.readouterr().out
    assert "▲ best (d0, d_exp) = (" in out
    assert "worst (8, 3) 8.79" in out


@pytest.mark.parametrize(("axis", "option", "values", "absent"), [
    ("stages", "--stages", [1, 8], "stages"),
    ("segment", "--rows", [2, 16], "segment"),
    ("latency", "--ms", [0, 40.5], "temperatures"),
    ("acceptance", "--acceptance", [0, 1.5, 2], "acceptance"),
])
def test_the_other_axes_make_a_difference(given: list[str], tmp_path: Path, axis: str, option: str,
                                          values: list[float], absent: str) -> None:
    data = sweep(axis, tmp_path / "o.json", *given, option, ",".join(map(str, values)), "--strategies",
                 "flowspec", "--limit", "1", "--temperature", "1")
    assert [point["value"] for point in data["points"]] == values
    speeds = [point["rows"][0]["tokens_per_second"] for point in data["points"]]
    assert len({*speeds}) == len(values)
    assert all(point["rows"][0]["identical"] for point in data["points"])
    assert absent not in data["settings"]
    assert data["published"] is None


@pytest.mark.parametrize("arguments", [
    ["--profile", "orin-nano-8gb"], ["--temperature", "1"], ["--stages", "2"], ["--no-published"],
])
def test_published_figures_are_shown_only_where_they_belong(given: list[str], tmp_path: Path,
                                                            arguments: list[str],
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    data = sweep("bandwidth", tmp_path / "o.json", *given, "--mbps", "125", "--strategies", "chunk_pp",
                 "--limit", "1", *arguments)
    assert data["published"] is None
    assert "published" not in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "says"), [
    (["bandwidth", "--mbps", "fast"], "--mbps must be positive numbers separated by commas, not 'fast'"),
    (["bandwidth", "--mbps", "125,"], "--mbps must be positive numbers separated by commas, not '125,'"),
    (["bandwidth", "--mbps", "125,-1"], "--mbps must be positive numbers"),
    (["bandwidth", "--mbps", "0"], "--mbps must be positive numbers"),
    (["bandwidth", "--mbps", "inf"], "--mbps must be positive numbers"),
    (["bandwidth", "--mbps", "nan"], "--mbps must be positive numbers"),
    (["bandwidth", "--mbps", "125,250,125.0"], "--mbps names 125 twice"),
    (["latency", "--ms", "-0.1"], "--ms must be numbers of at least 0 separated by commas"),
    (["acceptance", "--acceptance", "1,2.5"], "--acceptance must be numbers from 0 to 2, not '1,2.5'"),
    (["stages", "--stages", "4,2.5"], "--stages must be whole numbers from 1, separated by commas"),
    (["stages", "--stages", "0"], "--stages must be whole numbers from 1"),
    (["depth", "--depths", "3,3"], "--depths names 3 twice"),
    (["depth", "--expand-depths", "-3"], "--expand-depths must be whole numbers from 1"),
    (["segment", "--rows", "16,9000"], "a segment of 9001 rows is more than 8192"),
    (["bandwidth", "--strategies", "chunk_pp,magic"], "no strategy 'magic'"),
    (["bandwidth", "--json", "/nowhere/b.json"], "cannot write /nowhere/b.json"),
    (["bandwidth", "--out", "/nowhere/b.svg"], "cannot write /nowhere/b.svg"),
    (["bandwidth", "--out", "b.pdf"], "b.pdf: a figure must end in .svg or .png"),
    (["bandwidth", "--resume"], "--resume needs --json OUT"),
    (["bandwidth", "--profile", "nowhere"], "no profile 'nowhere'"),
    (["bandwidth", "--max-new-tokens", "2047"], "the model stops at 2048"),
])
def test_bad_input_is_one_line_and_nothing_is_written(given: list[str], tmp_path: Path, arguments: list[str],
                                                      says: str, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    axis, *others = arguments
    assert main(["sweep", axis, *given, *others]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_draft_model_is_found_first(
        model: Path, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "target").symlink_to(model / "target")
    assert main(["sweep", "latency", *given, "--model", str(bare), "--json", str(tmp_path / "o.json")]) == 2
    assert "drafts with eagle2/, which" in capsys.readouterr().err
    assert not (tmp_path / "o.json").exists()


def test_without_matplotlib_nothing_runs(given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["sweep", "latency", *given, "--json", str(tmp_path / "o.json"), "--out", "f.svg"]) == 2
    assert "pip install '.[plot]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "says"), [
    (["bandwidth", "--seed", "3"], "was measured with other settings: seed differs (0 there, 3 here)"),
    (["bandwidth", "--temperature", "1"], "other settings: temperature differs (0.0 there, 1.0 here)"),
    (["bandwidth", "--profile", "orin-nano-8gb"], "was measured with other settings: profile differs;"),
    (["latency"], "was measured with other settings: axis differs (bandwidth there, latency here)"),
])
def test_resuming_something_else_is_refused(given: list[str], tmp_path: Path, arguments: list[str], says: str,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "o.json"
    sweep("bandwidth", path, *given, "--mbps", "125", "--strategies", "chunk_pp", "--limit", "1")
    before = path.read_bytes()
    capsys.readouterr()
    axis, *others = arguments
    assert main(["sweep", axis, *given, "--limit", "1", "--strategies", "chunk_pp", "--json", str(path),
                 "--resume", *others]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err
    assert path.read_bytes() == before


def test_resuming_from_a_foreign_file_leaves_it_alone(given: list[str], tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"precious": 1}')
    assert main(["sweep", "stages", *given, "--json", str(path), "--resume"]) == 2
    assert "cannot resume: " in capsys.readouterr().err
    assert path.read_text() == '{"precious": 1}'


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_the_help_run(command: str, given: list[str], tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """The first of each, as it is written but for the model, the strategies, prompts and their length."""
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", command, "--help"]) == 0
    assert f"flowspec sweep {command}" in capsys.readouterr().out
    [text] = [info.callback.__doc__ or "" for info in app.registered_commands
              if info.name == command and info.callback]
    examples = re.findall(r"^ +flowspec (.*)$", text, re.MULTILINE)
    assert len(examples) >= 2
    assert main([*shlex.split(examples[0]), *given, "--limit", "1", "--max-new-tokens", "2", "--strategies",
                 "flowspec"]) == 0


def test_the_group_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep"]) == 2
    out, err = capsys.readouterr()
    assert all(command in out + err for command in COMMANDS)
    assert "error" not in err

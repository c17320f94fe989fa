"""``flowspec sweep``: real runs in virtual time, and their files."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from flowspec_edge.cli.bench.sweep import sweep as command
from flowspec_edge.cli.main import main
from flowspec_edge.lab.bench.axes import AXES
from flowspec_edge.lab.bench.results import load_sweep


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
    data = sweep("bandwidth=1000,125", whole, *given, "--strategies", "megatron,flowspec",
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

    first = sweep("bandwidth=125", part, *given, "--strategies", "megatron")
    first["points"][0]["samples"][0]["ttft_s"] = 77.0  # who measured it again would lose this
    part.write_text(json.dumps(first))
    again = sweep("bandwidth=1000,125", part, *given, "--strategies", "megatron,flowspec",
                  "--resume")
    assert again["points"][1]["samples"][0]["ttft_s"] == 77.0
    assert again["points"][0] == data["points"][0]
    assert again["points"][1]["samples"][1:] == data["points"][1]["samples"][1:]
    before = part.read_bytes()
    sweep("bandwidth=125", part, *given, "--strategies", "megatron", "--resume")
    assert main(["sweep", "latency", *given, "--json", str(part), "--resume"]) == 2
    assert "axis differs (bandwidth there, latency here)" in capsys.readouterr().err
    assert part.read_bytes() == before
    assert load_sweep(whole).as_json() == data


def test_depth_is_a_grid(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = sweep("depth=2,4", tmp_path / "d.json", "expand_depth=1,3", *given, "--limit", "1",
                 "--out", str(tmp_path / "d.svg"))
    assert [point["value"] for point in data["points"]] == [[2, 1], [2, 3], [4, 1], [4, 3]]
    assert not {"depth", "expand_depth"} & data["settings"].keys()
    out = capsys.readouterr().out
    assert "▲ best (d0, d_exp) = (" in out
    assert "worst (8, 3) 8.79" in out


@pytest.mark.parametrize(("axis", "values", "absent"), [
    ("stages", [1, 8], "stages"),
    ("segment", [2, 16], "segment"),
    ("latency", [0, 40.5], "temperatures"),
    ("acceptance", [0, 1.5, 2], "acceptance"),
    ("width", [1, 9], "width"),
    ("rank", ["draft", "noise"], "rank"),
])
def test_the_other_axes_make_a_difference(given: list[str], tmp_path: Path, axis: str,
                                          values: list[float | str], absent: str) -> None:
    data = sweep(f"{axis}={','.join(map(str, values))}", tmp_path / "o.json", *given, "--strategies", "flowspec",
                 "--limit", "1", "--temperature", "1", "--out", str(tmp_path / "o.svg"))
    assert [point["value"] for point in data["points"]] == values
    speeds = [point["rows"][0]["tokens_per_second"] for point in data["points"]]
    assert len({*speeds}) == len(values)
    assert all(point["rows"][0]["identical"] for point in data["points"])
    assert absent not in data["settings"]
    assert data["published"] is None


@pytest.mark.parametrize("option", ["--temperature=1", "--no-published"])
def test_published_figures_are_shown_only_where_they_belong(given: list[str], tmp_path: Path, option: str,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    data = sweep("bandwidth=125", tmp_path / "o.json", *given, "--strategies", "chunk_pp", "--limit", "1", option)
    assert data["published"] is None
    assert "published" not in capsys.readouterr().out


def test_without_matplotlib_nothing_runs(given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["sweep", "latency", *given, "--json", str(tmp_path / "o.json"), "--out", "f.svg"]) == 2
    assert "pip install '.[plot]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_two_parameters_are_a_grid(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = sweep("width=1,9", tmp_path / "g.json", "rank=draft,noise", *given, "--strategies", "flowspec", "--limit",
                 "1", "--temperature", "1", "--set", "segment=4", "--out", str(tmp_path / "g.svg"))
    assert data["axis"] == "width,rank"
    assert [point["value"] for point in data["points"]] == [[1, "draft"], [1, "noise"], [9, "draft"], [9, "noise"]]
    assert data["settings"]["segment"] == 4
    assert "▲ best (width, rank) = (" in capsys.readouterr().out
    assert load_sweep(tmp_path / "g.json").as_json() == data | {"points": [
        point | {"value": tuple(point["value"])} for point in data["points"]]}


def test_the_draft_model_may_be_the_axis(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = sweep("draft=eagle2,lm", tmp_path / "d.json", *given, "--strategies", "flowspec", "--limit", "1", "--out",
                 str(tmp_path / "d.svg"))
    assert [point["rows"][0]["draft"] for point in data["points"]] == ["eagle2", "lm"]
    assert "at most 6 new tokens.\n" in capsys.readouterr().out


def test_a_parameter_is_swept_over_the_strategies_that_have_it(given: list[str], tmp_path: Path) -> None:
    data = sweep("pearl_gamma=2,4", tmp_path / "p.json", *given, "--limit", "1")
    assert [[row["strategy"] for row in point["rows"]] for point in data["points"]] == [["pearl"], ["pearl"]]


def test_the_first_example_of_each_axis_in_the_help_runs(given: list[str], tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    """As it is written but for the model, the strategies, prompts and their length."""
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--help"]) == 0
    assert "flowspec sweep bandwidth" in capsys.readouterr().out
    examples = re.findall(r"^ +flowspec sweep (.*)$", command.__doc__ or "", re.MULTILINE)
    firsts = {re.split(r"[= ]", line)[0]: line for line in reversed(examples)}
    assert firsts.keys() > {*AXES}
    for line in firsts.values():
        short = [*given, "--limit", "1", "--max-new-tokens", "2", "--strategies", "flowspec"]
        assert main(["sweep", *shlex.split(line), *short]) == 0, line


def test_without_an_axis_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep"]) == 2
    out, err = capsys.readouterr()
    assert all(axis in out + err for axis in AXES)
    assert "error" not in err

"""``flowspec bench run``: the JSON is a contract, and in virtual time the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_dir import tiny_model_dir

from flowspec_edge.cli.main import main

PROMPTS = [
    {"prompt": "import os\n"},
    {"question_id": 81, "turns": ["def f(x):", "and then"]},
    {"prompt": "never"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2, hidden=32)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in PROMPTS) + "\n")
    return path


def bench(model: Path, prompts: Path, out: Path, *arguments: str) -> dict[str, Any]:
    assert main(["bench", "run", "--model", str(model), "--prompts", str(prompts), "--limit", "2", "--stages",
                 "2", "--max-new-tokens", "10", "--json", str(out), *arguments]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_virtual_time_gives_the_same_file_twice(model: Path, prompts: Path, tmp_path: Path, temperature: str,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--strategies", "chunk_pp,flowspec", "--temperature", temperature, "--rank", "draft")
    report = bench(model, prompts, tmp_path / "a.json", *arguments)
    bench(model, prompts, tmp_path / "b.json", *arguments)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (report["profile"], report["clock"]) == ("paper-7b", "virtual")
    assert [row["strategy"] for row in report["rows"]] == ["chunk_pp", "flowspec"]
    for row in report["rows"]:
        assert row.keys() == {"strategy", "task", "temperature", "tokens_per_second", "tokens_per_second_sd",
                              "speedup", "alt", "alr", "turns", "rounds", "tokens", "ttft_s", "itl_mean_s",
                              "itl_p50_s", "itl_p95_s", "repeats", "identical"}
        assert row["identical"] is True
        assert row["tokens_per_second"] > 0
    assert report["rows"][0]["speedup"] == 1.0
    settings = report["settings"]
    assert (settings["limit"], settings["stages"], settings["rank"]) == (2, 2, "draft")
    assert settings["versions"]["torch"]
    out = capsys.readouterr().out
    assert "VIRTUAL TIME under paper-7b, 2 stages" in out
    assert "identical" in out


def test_over_processes_there_is_no_profile(model: Path, prompts: Path, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(model, prompts, tmp_path / "w.json", "--strategies", "flowspec", "--clock", "wall")
    assert (report["profile"], report["clock"]) == (None, "wall")
    (row,) = report["rows"]
    assert (row["identical"], row["speedup"]) == (True, None)
    assert "wall clock on this machine" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "says"), [
    (["--strategies", "chunk_pp,magic"], "no strategy 'magic'"),
    (["--strategies", ","], "--strategies names none"),
    (["--prompts", "/nowhere.jsonl"], "cannot read /nowhere.jsonl"),
    (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
    (["--max-new-tokens", "2047"], "and 2047 more are asked for, but the model stops at 2048"),
])
def test_bad_input_is_one_line_and_exit_code_2(model: Path, prompts: Path, arguments: list[str], says: str,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run", "--model", str(model), "--prompts", str(prompts), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1

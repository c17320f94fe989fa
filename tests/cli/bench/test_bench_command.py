"""``flowspec bench run``: the JSON is a contract, and in virtual time the same every time."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kits.bench_reports import documented_fields
from kits.network_beds import heed_ctrl_c
from kits.plain_answers import tokenizer_of
from kits.rail_files import board, once_measured
from kits.tiny_model_dir import tiny_model_dir
from kits.transformers_generate import reference_text

from flowspec_edge.cli.main import main
from flowspec_edge.device_profile import load_profile
from flowspec_edge.lab.bench.samples import answer_digest
from flowspec_edge.sampling.rule import Sampling

PROMPTS = [
    {"prompt": "import os\n"},
    {"question_id": 81, "turns": ["def f(x):", "and then"]},
    {"prompt": "never"},
]


WATTS = 12.0
ENERGY = ("energy_j", "energy_above_idle_j", "joules_per_token", "joules_per_token_above_idle")


@pytest.fixture
def sensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is a board with an INA3221."""
    monkeypatch.setenv("FLOWSPEC_SYSFS", str(board(tmp_path / "board", WATTS)))


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
    arguments = ("--strategies", "chunk_pp,flowspec", "--temperature", temperature, "--set", "rank=draft")
    report = bench(model, prompts, tmp_path / "a.json", *arguments)
    again = bench(model, prompts, tmp_path / "b.json", *arguments)
    if report["date"] == again["date"]:  # not run across midnight
        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert {**report, "date": ""} == {**again, "date": ""}
    assert (report["profile"], report["clock"]) == ("paper-7b", "virtual")
    assert [row["strategy"] for row in report["rows"]] == ["chunk_pp", "flowspec"]
    for row in report["rows"]:
        assert row.keys() == {"strategy", "task", "temperature", *documented_fields("In a row:")}
        assert (row["identical"], row["draft"]) == (True, "eagle2")
        assert row["tokens_per_second"] > 0
    assert report["rows"][0]["speedup"] == 1.0
    settings = report["settings"]
    assert (settings["limit"], settings["stages"], settings["rank"]) == (2, 2, "draft")
    assert settings["versions"]["torch"]
    assert settings["profile"] == load_profile("paper-7b").model_dump()
    assert (settings["model"], settings["seeds"]) == (model.name, [0])
    assert report["machine"]["cores"]
    assert str(tmp_path) not in json.dumps(report)
    out = capsys.readouterr().out
    assert "VIRTUAL TIME under paper-7b, 2 stages" in out
    assert "weights and arithmetic in fp32" in " ".join(out.split())
    assert "0/2" in out


def test_processes_have_no_profile_and_measured_joules(
        model: Path, prompts: Path, tmp_path: Path, sensor: None, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> tuple[dict[str, Any], float]:
        began = time.monotonic()
        made = bench(model, prompts, tmp_path / "w.json", "--strategies", "flowspec", "--clock", "wall",
                     "--warmup", "1", "--repeats", "2", "--idle-seconds", "1.2")
        return made, time.monotonic() - began

    report, seconds = once_measured(
        run, lambda ran: all(sample["energy_j"] is not None for sample in ran[0]["samples"]), tries=3)
    assert (report["profile"], report["clock"]) == (None, "wall")
    (row,) = report["rows"]
    assert (row["identical"], row["speedup"], row["repeats"]) == (True, None, 2)
    assert row["tokens_per_second_sd"] > 0
    samples = report["samples"]
    assert len(samples) == 4
    shown = capsys.readouterr().out
    assert "wall clock on this machine" in shown

    # The three processes are on one board, which draws the same all the time.
    assert report["energy"] == "measured by the boards' INA3221, without carrier boards"
    assert sum(sample["energy_j"] for sample in samples) < WATTS * seconds
    for sample in samples:
        assert sample["energy_j"] > WATTS * sample["decode_s"]
        assert sample["energy_above_idle_j"] == pytest.approx(0, abs=1e-3 * sample["energy_j"])
    assert row["energy_j"] == pytest.approx(sum(sample["energy_j"] for sample in samples))
    assert row["joules_per_token"] == pytest.approx(row["energy_j"] / row["tokens"])
    assert row["joules_per_token_above_idle"] == pytest.approx(row["energy_above_idle_j"] / row["tokens"])
    assert re.search(r"J/token\s+above idle", shown)
    assert f"{row['joules_per_token']:.2f}" in shown


@pytest.mark.parametrize("arguments", [[], ["--emulate", "cpu-2core"]], ids=["virtual", "emulated"])
def test_time_that_is_made_up_has_no_energy(model: Path, prompts: Path, tmp_path: Path, sensor: None,
                                            arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(model, prompts, tmp_path / "o.json", "--strategies", "flowspec", "--limit", "1",
                   "--max-new-tokens", "2", *arguments)
    assert report["energy"] is None
    assert [report["rows"][0][name] for name in ENERGY] == [None] * 4
    assert "J/token" not in capsys.readouterr().out


def test_files_and_categories_are_tasks(model: Path, prompts: Path, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    categories = ["writing", "qa", "stem", "qa"]
    second = tmp_path / "spec" / "question.jsonl"
    second.parent.mkdir()
    second.write_text("".join(json.dumps({"question_id": i, "category": c, "turns": [f"{c} {i}"]}) + "\n"
                              for i, c in enumerate(categories)))
    few = ("--strategies", "chunk_pp,autoregressive", "--max-new-tokens", "4", "--temperatures", "1,0",
           "--repeats", "2", "--seed", "5")
    report = bench(model, prompts, tmp_path / "a.json", *few, "--prompts", str(second))
    assert [(t["name"], t["prompts"]) for t in report["settings"]["tasks"]] == [("p", 2), ("spec", 2)]
    assert [(r["strategy"], r["task"], r["temperature"]) for r in report["rows"]] == [
        (s, task, t) for t in (1.0, 0.0) for task in ("p", "spec") for s in ("chunk_pp", "autoregressive")]
    assert [(m["strategy"], m["temperature"]) for m in report["means"]] == [
        (s, t) for t in (1.0, 0.0) for s in ("chunk_pp", "autoregressive")]
    assert report["settings"]["seeds"] == [5, 6]
    out = capsys.readouterr().out
    assert "T = 1" in out
    assert "T = 0" in out
    assert "mean" in out

    grouped = tmp_path / "b.json"
    assert main(["bench", "run", "--model", str(model), "--prompts", str(second), "--by-category", "--stages",
                 "1", "--strategies", "autoregressive", "--max-new-tokens", "2", "--json", str(grouped)]) == 0
    tasks = json.loads(grouped.read_text())["settings"]["tasks"]
    assert [(t["name"], t["prompts"]) for t in tasks] == [("mt_bench", 2), ("qa", 2)]


def test_truncation_keeps_the_end_of_a_prompt(model: Path, tmp_path: Path) -> None:
    ends = {}
    for name, text in (("long", "x" * 5000 + "import os\n"), ("short", "import os\n")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"prompt": text}) + "\n")
        ends[name] = bench(model, path, tmp_path / "o.json", "--strategies", "chunk_pp", "--truncate", "6")
    assert ends["long"]["rows"][0]["turns"] == ends["short"]["rows"][0]["turns"]
    assert ends["long"]["samples"][0]["ttft_s"] == ends["short"]["samples"][0]["ttft_s"]


@pytest.mark.slow
@pytest.mark.nightly
def test_an_interrupted_run_keeps_what_it_has(model: Path, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    command = (sys.executable, "-m", "flowspec_edge.cli.main", "bench", "run", "--model", str(model),
               "--prompts", str(prompts), "--stages", "2", "--strategies", "autoregressive,chunk_pp",
               "--temperatures", "0,1", "--max-new-tokens", "60", "--repeats", "1000", "--json", str(path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          preexec_fn=heed_ctrl_c) as process:
        while not path.exists():  # T = 0 is quick, T = 1 longer than any test lasts
            with pytest.raises(subprocess.TimeoutExpired):  # it must not end by itself
                process.wait(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert all(line.startswith(b"flowspec: bench: ") for line in err.splitlines()), err
    report = json.loads(path.read_text())
    assert report["complete"] is False
    assert report["rows"][0]["strategy"] == "autoregressive"
    assert len(report["rows"]) < 4
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_questions_go_through_the_chat_template(tmp_path: Path, prompts: Path) -> None:
    model = tiny_model_dir(tmp_path / "model", layers=2, hidden=32)
    (model / "target" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    report = bench(model, prompts, tmp_path / "a.json", "--strategies", "flowspec_plus", "--chat")
    assert report["settings"]["chat"] is True
    answers = []
    for asked in ("import os\n", "def f(x):"):
        ids = tokenizer_of(model).apply_chat_template([{"role": "user", "content": asked}], return_dict=False,
                                                      add_generation_prompt=True)
        answers.append(answer_digest(*reference_text(model, ids, Sampling(), 10, [])))
    assert [sample["answer"] for sample in report["samples"]] == answers

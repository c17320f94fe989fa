"""Rows and means against plain arithmetic on the samples; files that are and are not reports."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.bench_reports import report

from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.results import BenchReport, load_report

STRATEGIES, TASKS = ["flowspec", "chunk_pp"], ["qa", "rag", "code"]


def made(repeats: int = 4) -> BenchReport:
    return report(STRATEGIES, TASKS, [0.0, 1.0], prompts=5, repeats=repeats)


def pick(data: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [s for s in data["samples"] if all(s[k] == v for k, v in wanted.items())]


def test_rows_follow_from_the_samples_of_the_file() -> None:
    data = json.loads(json.dumps(made().as_json()))
    expected = [(s, t, x) for x in (0.0, 1.0) for t in TASKS for s in STRATEGIES]
    assert [(r["strategy"], r["task"], r["temperature"]) for r in data["rows"]] == expected
    speed = {}
    for row in data["rows"]:
        key = {k: row[k] for k in ("strategy", "task", "temperature")}
        mine = pick(data, **key)
        assert len(mine) == 20
        speed[tuple(key.values())] = statistics.mean(s["tokens_per_second"] for s in mine)
        by_repeat = [statistics.mean(s["tokens_per_second"] for s in pick(data, **key, repeat=r))
                     for r in range(4)]
        assert row["tokens_per_second"] == pytest.approx(speed[tuple(key.values())])
        assert row["tokens_per_second_sd"] == pytest.approx(statistics.stdev(by_repeat))
        after_first = sum(s["tokens"] - 1 for s in mine)
        assert row["alt"] == pytest.approx(after_first / sum(s["turns"] for s in mine))
        assert row["alr"] == pytest.approx(after_first / sum(s["rounds"] for s in mine))
        assert row["itl_mean_s"] == pytest.approx(sum(s["decode_s"] for s in mine) / after_first)
        for name in ("ttft_s", "itl_p50_s", "itl_p95_s"):
            assert row[name] == pytest.approx(statistics.mean(s[name] for s in mine))
        assert (row["tokens"], row["rounds"], row["repeats"]) == (
            sum(s["tokens"] for s in mine), sum(s["rounds"] for s in mine), 4)
    for row in data["rows"]:
        base = speed["chunk_pp", row["task"], row["temperature"]]
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / base)


def test_means_weigh_tasks_alike() -> None:
    few = made()
    few.samples = [s for s in few.samples if s.task != "rag" or s.prompt < 2]  # tasks of different sizes
    data = few.as_json()
    assert [(m["strategy"], m["temperature"], m["task"]) for m in data["means"]] == [
        (s, t, "mean") for t in (0.0, 1.0) for s in STRATEGIES]
    speed = {}
    for mean in data["means"]:
        parts = [r for r in data["rows"]
                 if (r["strategy"], r["temperature"]) == (mean["strategy"], mean["temperature"])]
        for name in ("tokens_per_second", "alt", "alr", "ttft_s", "itl_mean_s", "itl_p50_s", "itl_p95_s"):
            assert mean[name] == pytest.approx(statistics.mean(p[name] for p in parts))
        for name in ("turns", "rounds", "tokens"):
            assert mean[name] == pytest.approx(sum(p[name] for p in parts))
        speed[mean["strategy"], mean["temperature"]] = mean["tokens_per_second"]
        repeats = []
        for repeat in range(4):
            per_task = [statistics.mean(s["tokens_per_second"] for s in pick(
                data, strategy=mean["strategy"], temperature=mean["temperature"], task=task, repeat=repeat))
                for task in TASKS]
            repeats.append(statistics.mean(per_task))
        assert mean["tokens_per_second_sd"] == pytest.approx(statistics.stdev(repeats))
    for mean in data["means"]:
        ratio = mean["tokens_per_second"] / speed["chunk_pp", mean["temperature"]]
        assert mean["speedup"] == pytest.approx(ratio)


def test_no_mean_over_only_some_tasks() -> None:
    part = made(repeats=1)
    part.samples = [s for s in part.samples if s.cell != ("flowspec", "rag", 1.0)]
    assert [(m.strategy, m.temperature) for m in part.means] == [
        ("flowspec", 0.0), ("chunk_pp", 0.0), ("chunk_pp", 1.0)]
    assert {row.tokens_per_second_sd for row in part.rows} == {None}


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    before = made()
    before.save(path)
    after = load_report(path)
    assert after == before
    after.save(tmp_path / "again.json")
    assert path.read_bytes() == (tmp_path / "again.json").read_bytes()


@pytest.mark.parametrize(("text", "says"), [
    ("{", "is not valid JSON"),
    ("[1]", r"is no report of flowspec bench run \(not a JSON object\)"),
    ('{"tokens": [1]}', r"is no report of flowspec bench run \(profile: field required\)"),
])
def test_foreign_files(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        load_report(path)


@pytest.mark.parametrize(("where", "says"), [
    (("settings", "stages"), "stages: field required"),
    (("samples", 0, "turns"), r"samples\.0\.turns: field required"),
])
def test_a_report_with_a_missing_key(tmp_path: Path, where: tuple[Any, ...], says: str) -> None:
    path = tmp_path / "r.json"
    data = made().as_json()
    *steps, last = where
    inner = data
    for step in steps:
        inner = inner[step]
    del inner[last]
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=says):
        load_report(path)


def test_energy_needs_every_request(tmp_path: Path) -> None:
    measured = made(1)
    measured.samples = [replace(s, energy_j=2.5 * s.tokens + s.prompt, energy_above_idle_j=s.tokens + 1.0)
                        for s in measured.samples]
    measured.save(tmp_path / "o.json")
    data = load_report(tmp_path / "o.json").as_json()
    assert data["energy"].startswith("measured")
    ratios = []
    for row in data["rows"]:
        mine = pick(data, **{k: row[k] for k in ("strategy", "task", "temperature")})
        tokens = sum(s["tokens"] for s in mine)
        ratios.append((row["strategy"], row["temperature"], (2.5 * tokens + 10) / tokens))  # prompts 0 to 4
        assert row["energy_j"] == pytest.approx(2.5 * tokens + 10)
        assert row["joules_per_token"] == pytest.approx(ratios[-1][2])
        assert row["energy_above_idle_j"] == pytest.approx(tokens + 5)
        assert row["joules_per_token_above_idle"] == pytest.approx((tokens + 5) / tokens)
    for mean in data["means"]:
        own = [r for s, t, r in ratios if (s, t) == (mean["strategy"], mean["temperature"])]
        assert mean["joules_per_token"] == pytest.approx(statistics.mean(own))
    measured.samples[0] = replace(measured.samples[0], energy_j=None)
    first = measured.rows[0]
    assert (first.energy_j, first.joules_per_token) == (None, None)
    assert first.energy_above_idle_j is not None
    assert (measured.means[0].energy_j, measured.means[0].joules_per_token) == (None, None)
    assert made(1).as_json()["energy"] is None

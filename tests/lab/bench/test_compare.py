"""``bench compare``: pairs by prompt, ratios against numpy's, and what the files say of themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kits.bench_reports import report

from flowspec_edge.cli.main import main
from flowspec_edge.lab.bench.results import BenchReport


def saved(path: Path, made: BenchReport, texts: list[str] | None = None, **settings: object) -> Path:
    for task in made.settings["tasks"] if texts else []:
        task["each"] = texts
    made.settings |= {"versions": {"flowspec-edge": "1.2"}, "commit": "abc", "weights": "fp32", **settings}
    made.save(path)
    return path


def compared(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[dict[str, object], str]:
    assert main(["bench", "compare", *map(str, paths), "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_prompts_are_paired_by_their_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B has A's second and third prompt as its third and first, and one of its own."""
    one = report(["chunk_pp", "flowspec"], ["qa"], [0.0], seed=1)
    other = report(["flowspec", "pearl"], ["qa"], [0.0], seed=2)
    a = saved(tmp_path / "a.json", one, ["x", "y", "z"])
    b = saved(tmp_path / "b.json", other, ["z", "new", "y"], commit="def")
    found, err = compared(capsys, a, b)
    [row] = found["rows"]  # type: ignore[misc]
    before = {s.prompt: s.tokens_per_second for s in one.samples if s.strategy == "flowspec"}
    after = {s.prompt: s.tokens_per_second for s in other.samples if s.strategy == "flowspec"}
    old, new = np.array([before[1], before[2]], float), np.array([after[2], after[0]], float)
    assert row["prompts"] == 2
    assert row["ratio"]["value"] == pytest.approx(new.mean() / old.mean())
    assert row["ratio"]["median"] == pytest.approx(np.median(new / old))
    residuals = new - row["ratio"]["value"] * old
    assert row["ratio"]["error"] == pytest.approx(
        np.sqrt((residuals ** 2).sum() / (2 - 1) / 2) / old.mean())
    assert (row["only_first"], row["only_second"]) == ([0], [1])
    assert found["alone"] == [["chunk_pp, qa, T = 0"], ["pearl, qa, T = 0"]]
    assert [(f["commit"], f["version"], f["date"], f["profile"]) for f in found["files"]] == [  # type: ignore[attr-defined]
        ("abc", "1.2", "2026-01-02", "paper-7b"), ("def", "1.2", "2026-01-02", "paper-7b")]
    assert err == ""


def test_other_conditions_are_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report(["flowspec"], ["qa"], [0.0, 1.0])
    a = saved(tmp_path / "a.json", made, ["x", "y", "z"])
    made.profile = "paper-13b-int4"
    made.samples = [replace(s, answer="other" if s.prompt == 1 else s.answer) for s in made.samples]
    b = saved(tmp_path / "b.json", made, ["x", "y", "z"], model="other", dtype="bf16", weights="int4")
    found, err = compared(capsys, a, b)
    for what in ("profile: paper-7b and paper-13b-int4", "model: tiny and other", "dtype: fp32 and bf16",
                 "weights: fp32 and int4"):
        assert f"flowspec: warning: the files differ in {what}\n" in err
        assert what in found["differences"]  # type: ignore[operator]
    assert [row["different_answers"] for row in found["rows"]] == [1, 1]  # type: ignore[attr-defined]
    assert main(["bench", "compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert f"A: {a}: flowspec-edge 1.2, commit abc, 2026-01-02, VIRTUAL TIME under paper-7b" in out
    assert "weights int4, computed in bf16" in out
    assert "1.00 ± 0.00 (1.00)" in out


def test_prompts_that_were_cut_into_other_segments_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                               ) -> None:
    made = report(["flowspec", "pearl"], ["qa"], [0.0])
    made.samples = [replace(s, prompt_chunk=64) for s in made.samples]
    a = saved(tmp_path / "a.json", made, ["x", "y", "z"])
    made.samples = [replace(s, prompt_chunk=64 if s.prompt or s.strategy == "pearl" else 128) for s in made.samples]
    b = saved(tmp_path / "b.json", made, ["x", "y", "z"])
    found, err = compared(capsys, a, b)
    assert [row["different_chunks"] for row in found["rows"]] == [1, 0]  # type: ignore[attr-defined]
    assert "flowspec: warning: the files differ in segments of prompts: 1 of 6 prompts were cut into others" in err
    older = saved(tmp_path / "older.json", report(["flowspec"], ["qa"], [0.0]), ["x", "y", "z"])
    found, err = compared(capsys, a, older)
    assert [row["different_chunks"] for row in found["rows"]] == [None]  # type: ignore[attr-defined]
    assert "segments" not in err


def test_older_files_are_paired_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = saved(tmp_path / "a.json", report(["flowspec"], ["qa"], [0.0], prompts=2))
    b = saved(tmp_path / "b.json", report(["flowspec"], ["qa"], [0.0], prompts=3), ["x", "y", "z"])
    found, _ = compared(capsys, a, b)
    [row] = found["rows"]  # type: ignore[misc]
    assert (row["prompts"], row["only_first"], row["only_second"]) == (2, [], [2])


@pytest.mark.parametrize(("text", "said"), [
    ("{}", "is no report of flowspec bench run"), ("nothing", "")])
def test_other_files_are_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str,
                                           said: str) -> None:
    a = saved(tmp_path / "a.json", report(["flowspec"], ["qa"], [0.0]))
    b = tmp_path / "b.json"
    b.write_text(text)
    for given in ([a, b], [b, a]):
        assert main(["bench", "compare", *map(str, given)]) != 0
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert str(b) in err
        assert said in err


def test_nothing_in_common_and_a_wrong_number_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                       ) -> None:
    a = saved(tmp_path / "a.json", report(["flowspec"], ["qa"], [0.0]))
    b = saved(tmp_path / "b.json", report(["pearl"], ["qa"], [0.0]))
    for given, said in (([a, b], "nothing to compare"), ([a], "give two files"), ([a, b, a], "not 3")):
        assert main(["bench", "compare", *map(str, given)]) != 0
        err = capsys.readouterr().err
        assert said in err
        assert len(err.splitlines()) == 1

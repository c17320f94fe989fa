"""``flowspec bench tables``: from a run, and the same again from its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.bench_reports import report

from flowspec_edge.cli.main import main


@pytest.mark.slow
def test_a_run_and_its_file_give_the_same_tables(model: Path, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("qa", "rag"):
        (tmp_path / f"{task}.jsonl").write_text(json.dumps({"prompt": f"{task} "}) + "\n")
    given = [part for task in ("qa", "rag") for part in ("--prompts", str(tmp_path / f"{task}.jsonl"))]
    path = tmp_path / "out.json"
    assert main(["bench", "tables", "--model", str(model), *given, "--max-new-tokens", "6", "--stages", "2",
                 "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    said = {line.split(" ")[1] for line in err.splitlines()}
    assert said - {"bench:"} == {str(path)}  # beside the progress, if it took long
    data = json.loads(path.read_text())
    assert (data["settings"]["draft"], data["settings"]["pipedec_width"]) == ("eagle2", 16)
    measured = {row["strategy"] for row in data["rows"]}
    assert {"chunk_pp", "pruned_pp", "flowspec_no_sbd", "flowspec"} <= measured
    assert "autoregressive" not in measured
    assert {row["temperature"] for row in data["rows"]} == {0.0, 1.0}
    assert all(row["identical"] for row in data["rows"])
    flowspec = next(r for r in data["rows"] if (r["strategy"], r["task"]) == ("flowspec", "rag"))
    line = next(line for line in out.splitlines() if line.startswith("| FlowSpec "))
    assert f" {flowspec['tokens_per_second']:.2f} |" in line
    assert f" {flowspec['speedup']:.2f} |" in line

    assert main(["bench", "tables", "--from", str(path)]) == 0
    assert capsys.readouterr().out == out
    assert main(["bench", "tables", "--from", str(path), "--out", str(tmp_path / "t.md")]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "t.md").read_text() == out


def test_defaults_can_be_changed(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    (tmp_path / "qa.jsonl").write_text('{"prompt": "x"}\n')
    assert main(["bench", "tables", "--model", str(model), "--prompts", str(tmp_path / "qa.jsonl"),
                 "--stages", "1", "--max-new-tokens", "3", "--strategies", "chunk_pp",
                 "--temperatures", "0.5", "--draft", "own", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["settings"]["draft"] == "own"
    assert [(row["strategy"], row["temperature"]) for row in data["rows"]] == [("chunk_pp", 0.5)]


def test_several_files_and_the_papers_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for profile in ("paper-7b", "paper-13b-int4"):
        path = tmp_path / f"{profile}.json"
        report(["autoregressive", "chunk_pp", "flowspec"], ["qa"], [0.0], profile=profile).save(path)
        files += ["--from", str(path)]
    assert main(["bench", "tables", *files, "--published"]) == 0
    out = capsys.readouterr().out
    assert out.count("VIRTUAL TIME under paper-7b") == out.count("VIRTUAL TIME under paper-13b-int4") == 3
    assert "paper, LLaMA2-Chat 13B int4" in out
    assert "autoregressive" not in out
    assert main(["bench", "tables", *files, "--strategies", "autoregressive,flowspec"]) == 0
    out = capsys.readouterr().out
    assert "| autoregressive" in out
    assert "Chunk-PP |" not in out

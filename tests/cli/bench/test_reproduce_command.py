"""``flowspec reproduce``: lists, measures, keeps what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.main import main
from flowspec_edge.lab.reproduce.catalogue import ARTEFACTS


def test_without_a_name_it_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(ARTEFACTS)
    assert all(line.endswith(" min") for line in lines)
    assert main(["reproduce", "--json"]) == 0
    assert [found["name"] for found in json.loads(capsys.readouterr().out)] == list(ARTEFACTS)


@pytest.mark.slow
def test_a_table_is_measured_once_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec_edge.cli.common.progress._EVERY_S", 0.01)
    model = tiny_model_dir(tmp_path / "model", layers=2, hidden=32)
    prompts = tmp_path / "gsm8k.jsonl"
    prompts.write_text('{"turns": ["1+1"]}\n{"turns": ["2+2"]}\n{"turns": ["3"]}\n')
    out = tmp_path / "deep" / "out"
    given = ["--model", str(model), "--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "5",
             "--out", str(out)]
    (model / "spd").rename(model / "away")
    assert main(["reproduce", "flowspec-table-3", "spd-law", *given]) == 2
    assert "spd drafts with spd/, which" in capsys.readouterr().err
    assert not out.exists()  # nothing is measured if not everything can be
    assert main(["reproduce", "flowspec-table-3", *given, "--json"]) == 0
    printed = capsys.readouterr()
    assert "flowspec: ablation-7b, virtual time under paper-7b: " in printed.err
    (found,) = json.loads(printed.out)["reproduced"]
    assert {Path(path).suffix for path in found["files"]} == {".csv", ".md", ".tex", ".pdf", ".svg"}
    speeds = {r["method"] for r in found["records"] if r["source"] == "measured"}
    assert speeds == {"chunk_pp", "pruned_pp", "flowspec_no_sbd", "flowspec"}
    assert all(r["task"] == "gsm8k" and r["prompts"] == 2 and r["standard_error"] is not None
               for r in found["records"] if (r["source"], r["quantity"]) == ("measured", "tokens_per_second"))
    text = (out / "flowspec-table-3.md").read_text(encoding="utf-8")
    assert all("virtual time under paper-7b" in line for line in text.splitlines() if line.startswith("**"))
    assert str(tmp_path) not in text  # files are named, their places are not
    assert "--prompts gsm8k.jsonl" in text

    kept = out / "measured" / "ablation-7b.json"
    before = kept.stat().st_mtime_ns
    files = set(out.iterdir())
    assert main(["reproduce", "flowspec-table-3", *given]) == 2  # hours of another run are not overwritten
    assert "ablation-7b.json is there already: keep its figures" in capsys.readouterr().err
    assert main(["reproduce", "flowspec-table-3", *given, "--resume"]) == 0
    assert kept.stat().st_mtime_ns == before
    shown = capsys.readouterr()
    assert "FlowSpec w/o SBD" in shown.out
    assert "wrote " in shown.err
    assert "INCOMPLETE" not in (out / "flowspec-table-3.md").read_text(encoding="utf-8")
    assert set(out.iterdir()) == files

    assert main(["reproduce", "flowspec-table-3", *given, "--seed", "7", "--resume"]) == 2
    assert "seed differs" in capsys.readouterr().err

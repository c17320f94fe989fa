"""``flowspec bench plot`` and ``flowspec bench timeline``."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from kits.bench_reports import report

from flowspec_edge.cli.main import main


def test_a_plot_of_files(tmp_path: Path) -> None:
    given = []
    for stages in (2, 4):
        path = tmp_path / f"{stages}.json"
        report(["chunk_pp", "flowspec"], ["qa"], [0.0], stages=stages).save(path)
        given += ["--from", str(path)]
    assert main(["bench", "plot", *given, "--out", str(tmp_path / "f.svg")]) == 0
    text = "".join(ElementTree.parse(tmp_path / "f.svg").getroot().itertext())
    assert "VIRTUAL TIME under paper-7b" in text
    assert "stages" in text


def test_a_timeline_as_text_and_as_a_figure(model: Path, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(model), "--prompt", "import os", "--stages", "2", "--max-new-tokens", "16"]
    assert main(["bench", "timeline", "--strategy", "chunk_pp", *given, "--turns", "9", "--skip-turns", "4",
                 "--out", str(tmp_path / "t.svg")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "chunk_pp, VIRTUAL TIME under paper-7b, 2 stages, T = 0"
    assert lines[1].split()[:3] == ["turn", "4", "5"]
    assert [line[:10].strip() for line in lines[2:-1]] == ["D0 draft", "D0 verify", "V1", "V2"]
    assert max(map(len, lines)) <= 100
    runs = {part for part in lines[4][10:].replace(".", "=").split("=") if part}
    texts = {"".join(t.itertext()) for t in ElementTree.parse(tmp_path / "t.svg").iter(
        "{http://www.w3.org/2000/svg}text")}
    assert runs & texts
    assert any("VIRTUAL TIME under paper-7b" in text for text in texts)

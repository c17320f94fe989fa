"""Figures: parsed as XML or as images, and compared with the reports they were drawn from."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kits.bench_reports import report

from flowspec_edge.drivers.virtual.clock import Span
from flowspec_edge.lab.bench.plots import gantt, plot
from flowspec_edge.lab.bench.timeline import window

SVG = "{http://www.w3.org/2000/svg}"
STRATEGIES = ["chunk_pp", "flowspec", "pipedec"]
ABOVE_THE_BARS = "above the bars: tokens/s over Chunk-PP's"


def texts(path: Path) -> list[str]:
    """Everything that is written in an SVG, in the order of drawing."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def test_bars_by_task_with_their_ratios(tmp_path: Path) -> None:
    made = report(STRATEGIES, ["qa", "rag"], [0.0, 1.0], repeats=2)
    plot([made], tmp_path / "f.svg")
    found = texts(tmp_path / "f.svg")
    for temperature in (0, 1):
        assert f"tiny, 4 stages, VIRTUAL TIME under paper-7b, T = {temperature}; {ABOVE_THE_BARS}" in found
    assert found.count("qa") == found.count("mean") == 2  # a panel for each temperature
    assert found.count("tokens/s") == 2
    assert {name: found.count(f"{name} (eagle2)") for name in STRATEGIES} == dict.fromkeys(STRATEGIES, 2)
    for row in (*made.rows, *made.means):
        assert f"{row.speedup:.2f}" in found


def test_bars_by_temperature_when_there_is_one_task(tmp_path: Path) -> None:
    here = report(STRATEGIES, ["qa"], [0.0, 0.6], profile=None)
    plot([report(STRATEGIES, ["qa"], [0.0, 0.6]), here], tmp_path / "f.svg")
    found = texts(tmp_path / "f.svg")
    assert f"tiny, 4 stages, VIRTUAL TIME under paper-7b, qa; {ABOVE_THE_BARS}" in found
    assert f"tiny, 4 stages, wall clock on this machine, qa; {ABOVE_THE_BARS}" in found
    assert found.count("T = 0") == found.count("T = 0.6") == 2


def test_bars_are_as_high_as_the_figures(tmp_path: Path) -> None:
    made = report(["chunk_pp", "flowspec"], ["qa"], [0.0])
    plot([made], tmp_path / "f.svg")
    heights = []
    for path in ElementTree.parse(tmp_path / "f.svg").iter(f"{SVG}path"):
        y = [float(number) for number in re.findall(r"[ML] \S+ (\S+)", path.get("d", ""))]
        if re.search("fill: #(4477aa|ee6677)", path.get("style", "")):
            heights.append(max(y) - min(y))
    bars = heights[:2]  # the legend's come after
    chunk, flow = (row.tokens_per_second for row in made.rows)
    assert bars[1] / bars[0] == pytest.approx(flow / chunk, rel=1e-3)


def test_lines_over_stages(tmp_path: Path) -> None:
    made = [report(STRATEGIES, ["qa", "rag"], [0.0], stages=n, seed=n) for n in (14, 4, 7)]
    plot(made, tmp_path / "f.svg")
    found = texts(tmp_path / "f.svg")
    assert "tiny, VIRTUAL TIME under paper-7b, T = 0" in found
    assert "stages" in found
    assert [text for text in found if text in ("4", "7", "14")][:3] == ["4", "7", "14"]
    assert not any("SR" in text for text in found)


def test_png_and_svg(tmp_path: Path) -> None:
    made = report(STRATEGIES, ["qa"], [0.0])
    plot([made], tmp_path / "f.PNG")
    data = (tmp_path / "f.PNG").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 600
    assert height > 300
    plot([made], tmp_path / "a.svg")
    plot([made], tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_texts_that_differ_are_marked(tmp_path: Path) -> None:
    made = report(["chunk_pp", "flowspec"], ["qa"], [0.0])
    made.samples[-1] = replace(made.samples[-1], identical=False)
    plot([made], tmp_path / "f.svg")
    assert f"{made.rows[1].speedup:.2f} ≠" in texts(tmp_path / "f.svg")


def test_a_bar_for_every_piece_of_work_in_the_window(tmp_path: Path) -> None:
    spans = [Span(0, "draft", 0.0, 0.3, -1, 10), Span(0, "verify", 1.0, 1.1, 2, 3),
             *(Span(1, "compute", i * 1.0, i + 1.0, 31 + i, 16) for i in range(6)),
             Span(2, "compute", 1.5, 2.5, 77, 16, cancelled=True)]
    gantt(spans, 2, window(1.0, 9.0, 1.0, turns=3), "a caption", tmp_path / "g.svg")
    found = texts(tmp_path / "g.svg")
    assert [text for text in found if text in ("D0 draft", "D0 verify", "V1", "V2")] == [
        "D0 draft", "D0 verify", "V1", "V2"]
    assert [text for text in found if text in map(str, range(30, 80))] == ["32", "33", "34", "77"]
    assert "a caption; grey: cancelled" in found
    assert "turns after the first token (1 turn = 1e+03 ms)" in found

"""Reproduced files against the reports they are made of, and against parsers of their formats."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kits.bench_reports import measured

from flowspec_edge.lab.bench.samples import Sample
from flowspec_edge.lab.bench.styles import STYLES, style_of
from flowspec_edge.lab.reproduce.catalogue import ARTEFACTS
from flowspec_edge.lab.reproduce.documents import document_of, write_all
from flowspec_edge.lab.reproduce.records import law
from flowspec_edge.strategies.registry import STRATEGIES

SUFFIXES = ("csv", "md", "tex", "pdf", "svg")
TASKS = ["mt_bench", "50% & more"]


def halved(samples: list[Sample]) -> list[Sample]:
    """Every second token was drafted, and one prompt's texts repeat themselves."""
    return [replace(s, repeating=s.prompt == 1, accepted=s.tokens // 2) for s in samples]


@pytest.mark.slow
@pytest.mark.parametrize("name", {artefact.kind: name for name, artefact in ARTEFACTS.items()}.values())
def test_every_format_holds_the_figures(name: str, tmp_path: Path) -> None:
    artefact = ARTEFACTS[name]
    found = [measured(m, TASKS, halved) for m in artefact.measurements]
    document = document_of(artefact, found, f"flowspec reproduce {name}")
    paths = write_all(artefact, found, document, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(paths) == sorted(tmp_path / f"{name}.{s}" for s in SUFFIXES)

    # The CSV against the rows that bench and sweep compute for themselves.
    lines = (tmp_path / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    records = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    rows = [(point, row) for m in found for _, stages, point in m.points() for row in point.rows]
    assert {r["method"] for r in records} <= {row.strategy for _, row in rows}
    for quantity, field in (("tokens_per_second", "tokens_per_second"), ("alt", "alt"), ("alr", "alr")):
        ours = [float(r["figure"]) for r in records if (r["source"], r["quantity"]) == ("measured", quantity)
                and r["task"] != "mean"]
        theirs = [getattr(row, field) for _, row in rows]
        assert ours == [] or sorted(ours) == pytest.approx(sorted(theirs))

    # Every measured figure of the table is in the Markdown and in the LaTeX.
    text, tex = ((tmp_path / f"{name}.{s}").read_text(encoding="utf-8") for s in ("md", "tex"))
    for panel in document.panels:
        for row in panel.rows:
            for cell in row[1:]:
                assert f" {cell} |" in text
                assert re.match(r"[\d.]*", cell)[0] in tex  # type: ignore[index]
    for heading in ("VIRTUAL TIME", "seed 0", "flowspec-edge", f"flowspec reproduce {name}", "±"):
        assert heading in text
    assert text.count("Published, not measured here") + text.count("Published: ") == 1
    assert len(re.findall("^profiles? ", text, re.MULTILINE)) == 1

    assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    svg = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    if artefact.kind == "depth":
        assert svg.count(">paper: ") == 2  # its best and its worst cell
    if artefact.kind not in ("depth", "law"):
        for method in {r["method"] for r in records}:
            assert style_of(method).colour in svg


@pytest.mark.parametrize("name", ["flowspec-table-1", "spd-law"])
def test_latex_is_well_formed(name: str) -> None:
    """Environments nest, every line has as many cells as its tabular has columns, nothing is left raw."""
    from flowspec_edge.lab.reproduce.documents import latex

    artefact = ARTEFACTS[name]
    tex = latex(document_of(artefact, [measured(m, TASKS, halved) for m in artefact.measurements], "flowspec"))
    body = "\n".join(line for line in tex.splitlines() if not line.startswith("%"))
    stack: list[str] = []
    for kind, environment in re.findall(r"\\(begin|end)\{(\w+\*?)\}", body):
        if kind == "begin":
            stack.append(environment)
        else:
            assert stack.pop() == environment
    assert stack == []
    assert body.count("{") == body.count("}")
    for columns, inside in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", body, re.DOTALL):
        for line in (found for found in inside.splitlines() if found.endswith(r"\\")):
            assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1
    assert not re.search(r"(?<!\\)[%#_]", body)
    assert body.isascii()


def test_a_method_has_one_look_in_every_figure() -> None:
    assert STYLES.keys() >= STRATEGIES.keys()
    assert len(set(STYLES.values())) == len(STYLES)
    assert style_of("two_chains") == style_of("two_chains")
    assert style_of("two_chains").label == "two_chains"


def test_the_law() -> None:
    assert law(8, 1.0) == 8
    assert law(8, 0.0) == 1
    assert law(4, 0.5) == pytest.approx(4 / 2.5)

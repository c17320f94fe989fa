"""Everything that a reproduced table or figure becomes: CSV, Markdown, LaTeX, PDF and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowspec_edge.bench.render.plots import figure_bytes
from flowspec_edge.bench.reproduce.catalogue import Artefact
from flowspec_edge.bench.reproduce.documents import PaperDocument, comma_separated, latex, markdown
from flowspec_edge.bench.reproduce.figures import figure_of
from flowspec_edge.bench.reproduce.provenance import about, notes
from flowspec_edge.bench.reproduce.records import Measured, records_of
from flowspec_edge.bench.reproduce.tables import panels_of
from flowspec_edge.bench.results.paper_results import load_paper_results
from flowspec_edge.util.files import write_output


def document_of(artefact: Artefact, found: Sequence[Measured], command: str) -> PaperDocument:
    paper = load_paper_results()
    records = records_of(artefact, found, paper)
    return PaperDocument(artefact.name, f"{artefact.paper}, reproduced in virtual time",
                         about(artefact, found, command), panels_of(artefact.kind, records),
                         notes(artefact, found, records, paper), records)


def write_all(artefact: Artefact, found: Sequence[Measured], document: PaperDocument, folder: Path
              ) -> list[Path]:
    """Each file is replaced atomically, after all of them have been made."""
    head = [f"{document.title}. {document.about[0]}", *document.about[1:]]
    figure = figure_of(artefact.kind, document.records, found, [*head, *document.notes])
    description = " ".join(head)
    made: dict[str, str | bytes] = {
        "csv": comma_separated(document), "md": markdown(document), "tex": latex(document),
        "pdf": figure_bytes(figure, "pdf", description), "svg": figure_bytes(figure, "svg", description)}
    paths = []
    for suffix, data in made.items():
        paths.append(folder / f"{artefact.name}.{suffix}")
        write_output(paths[-1], data)
    return paths

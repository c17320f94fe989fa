"""A reproduced table as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from flowspec_edge.lab.bench.paper_results import load_paper_results
from flowspec_edge.lab.bench.plots import figure_bytes
from flowspec_edge.lab.bench.tables import markdown_table
from flowspec_edge.lab.reproduce.catalogue import Artefact
from flowspec_edge.lab.reproduce.figures import figure_of
from flowspec_edge.lab.reproduce.provenance import about, notes
from flowspec_edge.lab.reproduce.records import Measured, Record, records_of
from flowspec_edge.lab.reproduce.tables import PaperPanel, panels_of
from flowspec_edge.util.files import write_output

_LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
          "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$",
          "–": "--", "…": r"\ldots{}", "≠": r"$\neq$", "·": r"$\cdot$", "−": "$-$", "⁶": "$^6$",
          "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}


@dataclass(frozen=True)
class PaperDocument:
    """A paper's tables as a document.

    ``about`` is the head of every file, ``notes`` are the tables' footnotes.
    """

    name: str
    title: str
    about: list[str]
    panels: list[PaperPanel]
    notes: list[str]
    records: list[Record]


def markdown(document: PaperDocument) -> str:
    parts = [f"# {document.title}", *document.about]
    for panel in document.panels:
        parts += [f"**{panel.heading}**", markdown_table(panel.header, panel.rows)]
    return "\n\n".join([*parts, *document.notes]) + "\n"


def latex(document: PaperDocument) -> str:
    """Return a ``table*`` for a document with the packages booktabs and adjustbox, in UTF-8."""
    lines = [f"% {line}" for line in (document.title, *document.about)]
    lines += ["% needs \\usepackage{booktabs} and \\usepackage{adjustbox}", r"\begin{table*}", r"\centering",
              rf"\caption{{{_escaped(document.title)}}}",
              rf"\label{{tab:{document.name}}}"]
    for panel in document.panels:
        lines += [rf"{{\small {_escaped(panel.heading)}}}\\[2pt]", r"\begin{adjustbox}{max width=\linewidth}",
                  rf"\begin{{tabular}}{{l{'r' * (len(panel.header) - 1)}}}", r"\toprule",
                  _line(panel.header), r"\midrule", *map(_line, panel.rows), r"\bottomrule",
                  r"\end{tabular}", r"\end{adjustbox}", r"\\[6pt]"]
    notes = " ".join(map(_escaped, document.notes))
    return "\n".join([*lines, rf"\parbox{{\linewidth}}{{\footnotesize {notes}}}", r"\end{table*}"]) + "\n"


def comma_separated(document: PaperDocument) -> str:
    """Comment lines that begin with #, then a row for each record."""
    text = io.StringIO()
    text.writelines(f"# {line}\n" for line in (document.title, *document.about))
    names = [field.name for field in fields(Record)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for record in document.records:
        writer.writerow({key: value for key, value in asdict(record).items() if value is not None})
    return text.getvalue()


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(_escaped, cells)) + r" \\"


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def document_of(artefact: Artefact, results: Sequence[Measured], command: str) -> PaperDocument:
    paper = load_paper_results()
    records = records_of(artefact, results, paper)
    return PaperDocument(artefact.name, f"{artefact.paper}, reproduced in virtual time",
                         about(artefact, results, command), panels_of(artefact.kind, records),
                         notes(artefact, results, records, paper), records)


def write_all(artefact: Artefact, results: Sequence[Measured], document: PaperDocument, folder: Path
              ) -> list[Path]:
    """Each file is replaced atomically, after all of them have been made."""
    head = [f"{document.title}. {document.about[0]}", *document.about[1:]]
    figure = figure_of(artefact.kind, document.records, results, [*head, *document.notes])
    description = " ".join(head)
    contents: dict[str, str | bytes] = {
        "csv": comma_separated(document), "md": markdown(document), "tex": latex(document),
        "pdf": figure_bytes(figure, "pdf", description), "svg": figure_bytes(figure, "svg", description)}
    paths = []
    for suffix, data in contents.items():
        paths.append(folder / f"{artefact.name}.{suffix}")
        write_output(paths[-1], data)
    return paths

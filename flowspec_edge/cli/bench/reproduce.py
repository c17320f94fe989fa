"""``flowspec reproduce``: one command for each table or figure of the papers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.bench.options import BenchOptions
from flowspec_edge.cli.bench.subject import BenchSubject, subject_of
from flowspec_edge.cli.common.options import (
    MOST_REPEATS,
    MOST_TOKENS,
    DeviceOption,
    DtypeOption,
    MaxNewTokensOption,
    ModelOption,
)
from flowspec_edge.cli.common.streams import saved
from flowspec_edge.cli.common.workload import fail_if_different
from flowspec_edge.errors import UsageError
from flowspec_edge.model.opened import DEMO
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.util.files import make_directory

if TYPE_CHECKING:
    from flowspec_edge.lab.reproduce.catalogue import Artefact, Measurement
    from flowspec_edge.lab.reproduce.documents import PaperDocument
    from flowspec_edge.lab.reproduce.records import Measured

_DEMO_PROMPTS = 16  # of the 64: some minutes


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(
        metavar="[NAME]...", help="The tables and figures to reproduce, or all.  Without a name: list them.",
        show_default=False)] = None,
    out: Annotated[Path, typer.Option(
        "--out", metavar="DIR", help="The folder for the files; made if it is missing.",
    )] = Path("reproduced"),
    prompts: Annotated[list[Path] | None, typer.Option(
        "--prompts", help="JSONL as Spec-Bench's; each file is a task, named by its stem.  Default: the "
                          "demonstration model's own task.", metavar="F.jsonl", show_default=False)] = None,
    by_category: Annotated[bool, typer.Option(
        "--by-category", help="Each category of the files is a task, as in Spec-Bench.")] = False,
    limit: Annotated[int | None, typer.Option(
        "--limit", min=1, max=MOST_REPEATS, show_default=False,
        help=f"Maximum prompts of a task: its first N.  Default: all; {_DEMO_PROMPTS} of the demonstration's.",
    )] = None,
    truncate: Annotated[int | None, typer.Option(
        "--truncate", min=1, max=MOST_TOKENS, metavar="N",
        help="Maximum tokens of a prompt: its last N.  Default: all.")] = None,
    max_new_tokens: MaxNewTokensOption = 128,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the noise at T = 1.")] = 0,
    model: ModelOption = DEMO,
    recording: Annotated[Path | None, typer.Option(
        "--recording", help="What a model said (flowspec record), in place of --model and --prompts: takes "
                            "seconds.  Not where a method drafts with a model of its own.",
        metavar="FILE", show_default=False)] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    jobs: Annotated[int | None, typer.Option(
        "--jobs", min=1, max=1024, help="Processes for requests; figures are those of one.  Default: 1, or with "
                                        "--recording one for each core.", metavar="N", show_default=False)] = None,
    dask: Annotated[str | None, typer.Option(
        "--dask", help="Let the workers of this Dask scheduler compute.", metavar="ADDRESS",
        show_default=False)] = None,
    resume: Annotated[bool, typer.Option(
        "--resume", help="Keep what DIR/measured has and measure the missing figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, not tables.")] = False,
) -> None:
    """Reproduce tables and figures of the papers in virtual time: CSV, Markdown, LaTeX, PDF and SVG.

    The methods, settings and profiles are the paper's, the model and the prompts are yours.  The paper's
    published figures stand beside ours.  DIR/measured keeps the measurements, as bench and sweep write them.

    Examples:

      flowspec reproduce
      flowspec reproduce flowspec-table-1 --out DIR
      flowspec reproduce flowspec-table-2 --prompts mt_bench.jsonl --prompts gsm8k.jsonl --jobs 4
      flowspec reproduce flowspec-figure-5 --recording smollm2.flowrec
      flowspec reproduce all --limit 8 --out DIR --resume
    """
    from flowspec_edge.cli.common.listing import print_columns
    from flowspec_edge.lab.reproduce.catalogue import ARTEFACTS, artefacts_named

    if not names:
        if as_json:
            print(json.dumps([{"name": a.name, "paper": a.paper, "what": a.description, "minutes": a.minutes}
                              for a in ARTEFACTS.values()]))
        else:
            print_columns([(a.name, a.paper, a.description, f"{a.minutes} min") for a in ARTEFACTS.values()])
            print("Run one: flowspec reproduce NAME --out DIR; with --limit N it takes fewer prompts", file=sys.stderr)
        return
    artefacts = artefacts_named(names)

    from flowspec_edge.lab.bench.plots import check_figure
    from flowspec_edge.lab.reproduce.documents import document_of, write_all

    options = BenchOptions(
        prompts=prompts, by_category=by_category, limit=limit or (None if prompts else _DEMO_PROMPTS),
        truncate=truncate, max_new_tokens=max_new_tokens, model=model, recording=recording, dtype=dtype, device=device,
        jobs=jobs, dask=dask)
    subject = subject_of(options)
    # Before anything runs.
    artefacts = _possible(artefacts, subject, leaves_out="all" in names and recording is not None)
    measurements = {measurement.name: measurement for artefact in artefacts for measurement in artefact.measurements}
    folder = out / "measured"
    for name in () if resume else measurements:
        if (folder / f"{name}.json").exists():
            raise UsageError(f"{folder / f'{name}.json'} is there already: keep its figures and measure the missing "
                             "ones with --resume, or give another --out DIR")
    make_directory(folder, "--out")
    check_figure(out / "figure.svg")
    measured: dict[str, Measured] = {}  # tables that share a measurement share its figures
    differences: list[str] = []
    objects = []
    for artefact in artefacts:
        for measurement in artefact.measurements:
            if measurement.name not in measured:
                file_options = replace(options, out=folder / f"{measurement.name}.json", resume=resume)
                measured[measurement.name] = _measured(measurement, file_options, Sampling(seed=seed))
        results = [measured[measurement.name] for measurement in artefact.measurements]
        document = document_of(artefact, results, _command(artefact, options, seed))
        paths: list[Path] = []
        saved(out, lambda: paths.extend(write_all(artefact, results, document, out)))  # noqa: B023 - called here
        if as_json:
            objects.append(_as_json(artefact, document, paths))
        else:
            _show(document, paths)
        differences += [text for measured in results for text in measured.results.different_texts()]
    if as_json:
        print(json.dumps({"reproduced": objects}))
    fail_if_different(differences)


def _possible(artefacts: Sequence[Artefact], subject: BenchSubject, leaves_out: bool) -> list[Artefact]:
    """Return what ``subject`` can measure.

    The rest is an error, or with ``leaves_out`` a note each, as long as any remains.
    """
    possible: list[Artefact] = []
    for artefact in artefacts:
        try:
            for measurement in artefact.measurements:
                subject.require(measurement.strategies, measurement.params, "virtual", 1)
        except UsageError as error:
            if not leaves_out:
                raise
            print(f"flowspec: note: {artefact.name} is left out: {error}", file=sys.stderr)
        else:
            possible.append(artefact)
    if not possible:
        raise UsageError("nothing of this can be reproduced from the recording: give --model")
    return possible


def _command(artefact: Artefact, options: BenchOptions, seed: int) -> str:
    """Return the command for the same figures, with files by their names alone."""
    parts = ["flowspec", "reproduce", artefact.name]
    for name in ("model", "limit", "truncate", "max_new_tokens"):
        value = getattr(options, name)
        if value is not None and (name, value) != ("model", DEMO):
            parts += [f"--{name.replace('_', '-')}", Path(str(value)).name]
    if options.recording is not None:
        parts += ["--recording", options.recording.name]
    for path in options.prompts or []:
        parts += ["--prompts", path.name]
    if options.by_category:
        parts.append("--by-category")
    return " ".join([*parts, "--seed", str(seed)])


def _as_json(artefact: Artefact, document: PaperDocument, paths: list[Path]) -> dict[str, object]:
    return {"name": artefact.name, "paper": artefact.paper, "about": document.about, "notes": document.notes,
            "files": [str(path) for path in paths], "records": [asdict(r) for r in document.records]}


def _show(document: PaperDocument, paths: list[Path]) -> None:
    from rich.console import Console

    from flowspec_edge.lab.bench.tables import show
    from flowspec_edge.lab.reproduce.tables import terminal
    from flowspec_edge.util.terminal import printable

    console = Console(highlight=False)
    print(document.title)
    for panel in document.panels:
        show(console, terminal(panel))
    for line in document.notes:
        print(printable(line))
    if paths:
        print(f"wrote {', '.join(str(path) for path in paths)}", file=sys.stderr)


def _measured(measurement: Measurement, options: BenchOptions, sampling: Sampling) -> Measured:
    from flowspec_edge.boards.planning.testbed import profile_or_testbed
    from flowspec_edge.cli.bench.measure import MeasureRequest, measure
    from flowspec_edge.lab.bench.axes import AXES
    from flowspec_edge.lab.reproduce.records import Measured

    request = MeasureRequest(
        ",".join(measurement.strategies), axis=AXES[measurement.axis] if measurement.axis else None,
        values=measurement.values,
        temperatures=None if measurement.axis else ",".join(f"{t:g}" for t in measurement.temperatures),
        label=f"{measurement.name}, virtual time under {profile_or_testbed(measurement.profile).name}")
    options = replace(options, profile=measurement.profile, acceptance=measurement.acceptance)
    return Measured(measurement, measure(request, options, sampling, measurement.params))

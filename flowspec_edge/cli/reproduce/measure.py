"""The measurements behind reproduced tables and figures, by ``bench`` and ``sweep``; each runs once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from flowspec_edge.bench.render.plots import check_figure
from flowspec_edge.bench.reproduce.catalogue import Measurement
from flowspec_edge.bench.reproduce.records import Measured
from flowspec_edge.bench.results.axes import AXES
from flowspec_edge.bench.results.report import Results
from flowspec_edge.cli.bench.measure import Asked, measure
from flowspec_edge.cli.bench.options import BenchOptions
from flowspec_edge.cli.common.workload import require_runnable
from flowspec_edge.errors import UsageError
from flowspec_edge.fleet.planning.testbed import profile_or_testbed
from flowspec_edge.model.modeldir import resolve_model
from flowspec_edge.sampling.rule import Sampling


def make_folders(out: Path) -> None:
    """UsageError if the files could not be written, or there is no matplotlib."""
    try:
        (out / "measured").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {out / 'measured'}: {error.strerror}; give another --out") from error
    check_figure(out / "figure.svg")


class Measurements:
    """Runs each measurement once; tables that share one share its figures."""

    def __init__(self, options: BenchOptions, sampling: Sampling, folder: Path, resume: bool) -> None:
        self._options, self._sampling, self._folder, self._resume = options, sampling, folder, resume
        self._done: dict[str, Measured] = {}

    def check(self, wanted: Iterable[Measurement]) -> None:
        """UsageError if the model lacks a draft model that one of them needs."""
        model = resolve_model(self._options.model)
        for measurement in wanted:
            require_runnable(measurement.strategies, model, measurement.params, "virtual", 1)

    def of(self, wanted: Measurement) -> Measured:
        if wanted.name not in self._done:
            self._done[wanted.name] = Measured(wanted, self._run(wanted))
        return self._done[wanted.name]

    def _run(self, wanted: Measurement) -> Results:
        path = self._folder / f"{wanted.name}.json"
        options = replace(self._options, profile=wanted.profile, out=path, resume=self._resume,
                          acceptance=wanted.acceptance)
        asked = Asked(
            ",".join(wanted.strategies), axis=AXES[wanted.axis] if wanted.axis else None,
            values=wanted.values,
            temperatures=None if wanted.axis else ",".join(f"{t:g}" for t in wanted.temperatures),
            label=f"{wanted.name}, virtual time under {profile_or_testbed(wanted.profile).name}")
        return measure(asked, options, self._sampling, wanted.params)

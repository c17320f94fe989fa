"""``flowspec bench``: the group of its commands; each has a file of its own."""

from __future__ import annotations

import typer

from flowspec_edge.cli import bench_figures, bench_run, bench_tables

app = typer.Typer(help="Benchmarks.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Benchmarks."""


app.command("run")(bench_run.run)
app.command("tables")(bench_tables.tables)
app.command("plot")(bench_figures.plot)
app.command("timeline")(bench_figures.timeline)

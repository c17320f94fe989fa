"""Draws docs/speed.svg, a figure of docs/explained/method.md: every method over Chunk-PP with the same drafts.

    flowspec reproduce methods --limit 24 --max-new-tokens 96 --seed 1 --out reproduced
    cd reproduced/measured
    python ../../docs/build_speed.py methods-7b.json methods-7b-ngram.json ../../docs/speed.svg

A bar is the median over the prompts of the speed over Chunk-PP's on the same prompt, a dot with a line the
ratio of the means ± its standard error.  Answers of at most one token have no speed; answers that loop are
left out.  Both are counted in the title, and methods that were not measured are named.  The fastest method,
by the mean of its bars, is on top.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from flowspec_edge.lab.bench.estimates import Estimate, speed, speedup
from flowspec_edge.lab.bench.exactness import types_of
from flowspec_edge.lab.bench.results import BenchReport, load_report
from flowspec_edge.lab.bench.rows import BASELINE
from flowspec_edge.lab.bench.samples import Sample, is_short
from flowspec_edge.lab.bench.styles import style_of
from flowspec_edge.strategies.registry import STRATEGIES

_TITLE_WIDTH = 105  # characters that fit beside the methods' names
_WAYS = {False: "head alone", True: "head and n-grams"}


def counted(report: BenchReport, method: str) -> list[Sample]:
    """Return a method's answers with a speed that do not loop."""
    return [s for s in report.samples if s.strategy == method and not is_short(s) and not s.repeating]


def ratios(report: BenchReport) -> dict[str, tuple[Estimate, Estimate]]:
    """Return by method the speed over Chunk-PP's, and tokens/s."""
    base = counted(report, BASELINE)
    found = {}
    for method in dict.fromkeys(s.strategy for s in report.samples):
        mine = counted(report, method)
        over, own = speedup(mine, base), speed(mine)
        if over is None or own is None:
            raise SystemExit(f"{method} has no answer that counts: measure more prompts")
        found[method] = over, own
    return found


def title(report: BenchReport, measured: set[str]) -> str:
    s = report.settings
    base = [sample for sample in report.samples if sample.strategy == BASELINE]
    short, loops = sum(map(is_short, base)), sum(bool(sample.repeating) for sample in base)
    missing = [style_of(name).label for name in STRATEGIES if name not in measured]
    left_out = f"; not measured: {', '.join(missing)}" if missing else ""
    lines = (f"VIRTUAL TIME under {report.profile}: {s['stages']} stages, one request, greedy, "
             f"{types_of(s)}\n"
             f"{len(base) - short - loops} of {len(base)} held-out prompts of the {s['model']} model: "
             f"{short} answers have no second token, {loops} loop{left_out}\n"
             "bars: median over the prompts; dots: ratio of the means ± standard error")
    return "\n".join(textwrap.fill(line, _TITLE_WIDTH) for line in lines.splitlines())


def draw(sources: list[Path], target: Path) -> None:
    reports = [load_report(source) for source in sources]
    for source, report in zip(sources, reports, strict=True):
        if report.clock != "virtual":
            raise SystemExit(f"{source}: a run in virtual time is needed, not on the {report.clock} clock")
    found = [(bool(report.settings.get("ngram")), ratios(report)) for report in reports]
    every = {method for _, methods in found for method in methods}
    names = sorted(every, key=lambda name: fmean(_middle(methods[name][0]) for _, methods in found
                                                 if name in methods))
    figure = Figure(figsize=(8.4, 1.1 + 0.24 * len(names) * (1 + len(found)) / 1.5), layout="constrained")
    axis = figure.subplots()
    height = 0.8 / len(found)
    for place, name in enumerate(names):
        for at, (looks_up, methods) in enumerate(found):
            if name not in methods:
                continue
            over, own = methods[name]
            y, style = place + 0.4 - (at + 0.5) * height, style_of(name)
            axis.barh(y, _middle(over), height * 0.92, color=style.colour, alpha=0.55 if looks_up else 1.0)
            axis.errorbar(over.value, y, xerr=over.error, fmt="o", color="#222222", markersize=2.5,
                          elinewidth=0.8)
            axis.text(max(_middle(over), over.value + (over.error or 0)) + 0.03, y,
                      f"{_middle(over):.2f} ×  {_middle(own):.1f} tokens/s, {_WAYS[looks_up]}", va="center",
                      fontsize=7)
    axis.set_yticks(range(len(names)), [style_of(name).label for name in names], fontsize=9)
    axis.axvline(1.0, color="#888888", linewidth=0.8, linestyle=":")
    widest = max(over.value + (over.error or 0) for _, methods in found for over, _ in methods.values())
    axis.set_xlim(0, 1.45 * widest)
    axis.set_xlabel("speed over Chunk-PP's with the same drafts", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title(reports[0], every), loc="left", fontsize=8)
    figure.savefig(target)


def _middle(estimate: Estimate) -> float:
    return estimate.value if estimate.median is None else estimate.median


if __name__ == "__main__":
    draw([Path(source) for source in sys.argv[1:-1]], Path(sys.argv[-1]))

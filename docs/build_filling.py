"""Draws docs/filling.svg: ways to fill a pipeline, by how often the draft's first choice is right.

    for stages and T in (4, 0), (4, 1), (8, 0):
        flowspec sweep acceptance --prompts humaneval.jsonl --limit 5 --truncate 96 --max-new-tokens 48 \
            --stages STAGES --temperature T --json nSTAGES-tT.json
    python docs/build_filling.py n4-t0.json n4-t1.json n8-t0.json docs/filling.svg

The axis is measured: of the tokens of the strategy chain, those that its draft had first, 1 - rounds/tokens.
Below the head's own acceptance only later choices differ: those points are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flowspec_edge.lab.bench.plots import draw_curve, finish, new_figure, save_figure
from flowspec_edge.lab.bench.results import load_sweep
from flowspec_edge.lab.bench.styles import style_of

_CHAIN = "chain"


def points(source: Path) -> tuple[str, dict[str, list[tuple[float, float, float | None]]]]:
    """Return a caption, and by strategy (acceptance, tokens/s, standard error), from the head's own up."""
    sweep = load_sweep(source)
    found: dict[str, list[tuple[float, float, float | None]]] = {}
    for point in sweep.points:
        rows: dict[str, Any] = {row.strategy: row for row in point.report.rows}
        assert isinstance(point.value, int | float)
        if point.value >= 1:
            first = 1 - 1 / rows[_CHAIN].alr if rows[_CHAIN].rounds else 1.0
            for name, row in rows.items():
                found.setdefault(name, []).append((first, row.tokens_per_second, row.tokens_per_second_se))
    settings = sweep.settings
    return (f"VIRTUAL TIME under {sweep.profile}: {settings['stages']} stages, "
            f"T = {settings['temperature']:g}, {settings['limit']} prompts"), found


def draw(sources: list[Path], target: Path) -> None:
    figure, axes = new_figure(len(sources), 7.6, 2.6)
    for axis, source in zip(axes, sources, strict=True):
        caption, lines = points(source)
        for name, line in lines.items():
            draw_curve(axis, name, line, style_of(name).label)
        axis.set_xlabel("share of tokens that the draft has first; on the left the EAGLE-2 head's own",
                        fontsize=8)
        finish(axis, caption)
    save_figure(figure, target)


if __name__ == "__main__":
    draw([Path(source) for source in sys.argv[1:-1]], Path(sys.argv[-1]))

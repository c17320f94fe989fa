"""Draws docs/speed.svg, the README's figure, from a run of every strategy.

    flowspec bench run --strategies all --limit 24 --max-new-tokens 96 --seed 1 --json all.json
    python docs/build_speed.py all.json docs/speed.svg

Bars count the answers that do not loop alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from flowspec_edge.bench.styles import style_of

_BASE = "chunk_pp"


def draw(source: Path, target: Path) -> None:
    report = json.loads(source.read_text(encoding="utf-8"))
    if report["clock"] != "virtual":
        raise SystemExit(f"{source}: a run in virtual time is needed, not on the {report['clock']} clock")
    speed = {row["strategy"]: row["tokens_per_second_other"] for row in report["rows"]}
    draft = {row["strategy"]: f" ({row['draft']})" * (row["draft"] != "none") for row in report["rows"]}
    row, settings = report["rows"][0], report["settings"]
    counted = row["answers"] - row["repeating"]
    names = sorted(speed, key=lambda name: speed[name])
    figure = Figure(figsize=(8.0, 0.9 + 0.34 * len(names)), layout="constrained")
    axis = figure.subplots()
    for place, name in enumerate(names):
        style, ratio = style_of(name), speed[name] / speed[_BASE]
        axis.barh(place, ratio, color=style.colour)
        axis.text(ratio + 0.02, place, f"{ratio:.2f} ×   {speed[name]:.1f} tokens/s", va="center", fontsize=9,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axis.set_yticks(range(len(names)), [f"{style_of(name).label}{draft[name]}" for name in names])
    axis.axvline(1.0, color="#888888", linewidth=0.8, linestyle=":")
    axis.set_xlim(0, 1.35 * max(speed.values()) / speed[_BASE])
    axis.set_xlabel("speed over Chunk-PP")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(
        f"VIRTUAL TIME under {report['profile']}: {settings['stages']} stages, one request, greedy; "
        "in brackets the drafter;\n"
        f"{counted} held-out prompts of the {settings['model']} model whose answers do not loop",
        loc="left", fontsize=9)
    figure.savefig(target)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))

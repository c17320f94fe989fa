"""The result of ``flowspec plan``, as a JSON object and as tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from flowspec_edge.bench.render.table import show as show_whole
from flowspec_edge.cli.common.listing import figures_table
from flowspec_edge.fleet.planning.draft_turn import DraftTurn, draft_turn
from flowspec_edge.fleet.planning.estimate import Prediction, SingleBoardEstimate
from flowspec_edge.fleet.planning.model_size import ModelBytes
from flowspec_edge.fleet.planning.plan_table import BoardRow
from flowspec_edge.fleet.planning.planner import PipelinePlan
from flowspec_edge.util.terminal import plain, printable


@dataclass
class PlanReport:
    """``plan``: None if one board holds the whole model; ``other_devices``: boards whose profile is of
    another device than their file's torch_device."""

    size: ModelBytes
    context: int
    boards: list[BoardRow]
    plan: PipelinePlan | None
    label: str = ""
    predictions: list[Prediction] = field(default_factory=list)
    alone: SingleBoardEstimate | None = None
    at_once: int = 1
    other_devices: list[str] = field(default_factory=list)

    @property
    def draft(self) -> DraftTurn | None:
        """D0's work against the slowest stage's; None without a pipeline."""
        plan = self.plan
        return draft_turn(plan.d0.profile, plan.slowest, plan.problem.rows) if plan else None

    @property
    def notes(self) -> list[str]:
        """Which figures are not measured."""
        found = [f"profile {row.profile} is {row.provenance}" for row in self.boards
                 if row.provenance != "measured"]
        found += [f"profile {row.profile} is {row.scaled}" for row in self.boards if row.scaled]
        if self.size.draft_estimated:
            found.append(f"{self.size.name} has no EAGLE head: it is taken to be one layer and fc")
        found += self.other_devices
        return list(dict.fromkeys(found))

    def as_json(self) -> dict[str, Any]:
        """Sizes in MB (10^6 bytes), times in ms."""
        plan = self.plan
        boards = [{key: round(value, 3) if isinstance(value, float) else value
                   for key, value in asdict(row).items()} for row in self.boards]
        return {
            "model": self.size.name, "dtype": self.size.dtype, "context": self.context,
            "at_once": self.at_once, "boards": boards,
            "slowest_stage_ms": round(plan.slowest * 1e3, 6) if plan else None,
            "segment_ms": round(plan.latency * 1e3, 6) if plan else None,
            "draft_device": self.draft.as_json() if self.draft else None,
            "predictions": [{**asdict(p), "label": self.label} for p in self.predictions],
            "one_board": asdict(self.alone) if self.alone else None,
            "estimated": bool(self.notes), "notes": self.notes,
        }


def show(report: PlanReport) -> None:
    console, plan = Console(highlight=False), report.plan

    def say(text: str) -> None:
        console.print(printable(text), markup=False, soft_wrap=True)

    show_whole(console, _boards(report))
    for row in report.boards:
        if row.why:
            say(f"left out: {row.name}: {row.why}")
    if plan:
        what = "link" if plan.link_bound else "stage"
        say(f"The slowest {what} takes {_ms(plan.slowest * 1e3)} ms for a segment of {plan.problem.rows} "
            f"rows, its way through all {_ms(plan.latency * 1e3)} ms.")
    if plan and report.draft and (warning := report.draft.warning(plan.d0.name)):
        say(f"{warning[:1].upper()}{warning[1:]}.")
    say("")
    if report.label:
        say(report.label.replace("virtual time", "VIRTUAL TIME", 1) + "; all draft with the EAGLE head")
    if report.predictions:
        show_whole(console, _predictions(report.predictions))
    if report.alone:
        text = report.alone.text
        say(f"{text[:1].upper()}{text[1:]}." if report.alone.enough else f"{text}.")
    for note in report.notes:
        say(f"estimated: {note}")


def _boards(report: PlanReport) -> Table:
    several = f", {report.at_once} requests at once" if report.at_once > 1 else ""
    title = f"{report.size.name}, {report.size.dtype}, {report.context} tokens of context{several}"
    table = figures_table(title, ("role", "board"), ("layers", "weights MB", "cache MB", "process MB",
                                                     "used / usable MB", "headroom MB", "stage ms"))
    for row in report.boards:
        if row.role is None:
            continue
        layers = f"{row.layers[0]}–{row.layers[1] - 1}" if row.layers else "draft"
        table.add_row(
            row.role, plain(row.name), layers,
            *(f"{mb:,.0f}" for mb in (row.weights_mb, row.kv_mb, row.process_mb)),
            f"{row.used_mb:,.0f} / {row.usable_mb:,.0f}", f"{row.headroom_mb:,.0f}",
            "–" if row.stage_ms is None else _ms(row.stage_ms))
    return table


def _predictions(predictions: list[Prediction]) -> Table:
    table = figures_table(None, ("strategy",), ("tokens/s", "speedup", "tokens a turn"))
    for p in predictions:
        speedup = "–" if p.speedup is None else f"{p.speedup:.2f}×"
        table.add_row(plain(p.strategy), f"{p.tokens_per_second:.2f}", speedup, f"{p.tokens_per_turn:.3f}")
    return table


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds >= 1 else f"{milliseconds:.2g}"

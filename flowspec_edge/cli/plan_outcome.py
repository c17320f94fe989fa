"""What ``flowspec plan`` found, as a JSON object and as tables for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flowspec_edge.bench.table import show as show_whole
from flowspec_edge.fleet.draft_turn import DraftTurn, draft_turn
from flowspec_edge.fleet.estimate import OneBoard, Prediction
from flowspec_edge.fleet.layout import BoardRow
from flowspec_edge.fleet.memory import ModelBytes
from flowspec_edge.fleet.planner import Plan


@dataclass
class Outcome:
    """All that there is to say.

    plan           None where one board does everything, because no pipeline fits or it is the only one
    label          what the predictions are; empty without any
    at_once        requests beside one another that the caches hold
    other_devices  boards whose profile is not of the device on which their file says that they compute
    """

    size: ModelBytes
    context: int
    boards: list[BoardRow]
    plan: Plan | None
    label: str = ""
    predictions: list[Prediction] = field(default_factory=list)
    alone: OneBoard | None = None
    at_once: int = 1
    other_devices: list[str] = field(default_factory=list)

    @property
    def draft(self) -> DraftTurn | None:
        """D0's work beside the slowest stage's; None where one board does everything."""
        plan = self.plan
        return draft_turn(plan.d0.profile, plan.slowest, plan.problem.rows) if plan else None

    @property
    def notes(self) -> list[str]:
        """What is not measured, in words."""
        found = [f"profile {row.profile} is {row.provenance}" for row in self.boards
                 if row.provenance != "measured"]
        found += [f"profile {row.profile} is {row.scaled}" for row in self.boards if row.scaled]
        if self.size.draft_estimated:
            found.append(f"{self.size.name} has no EAGLE head: it is taken to be one layer and fc")
        found += self.other_devices
        return list(dict.fromkeys(found))

    def as_json(self) -> dict[str, Any]:
        """The --json object: sizes in MB (10^6 bytes), times in ms."""
        plan = self.plan
        boards = [{key: round(value, 3) if isinstance(value, float) else value
                   for key, value in asdict(row).items()} for row in self.boards]
        return {
            "model": self.size.name, "dtype": self.size.dtype, "context": self.context,
            "at_once": self.at_once, "boards": boards,
            "slowest_stage_ms": round(plan.slowest * 1e3, 6) if plan else None,
            "segment_ms": round(plan.way * 1e3, 6) if plan else None,
            "draft_device": self.draft.as_json() if self.draft else None,
            "predictions": [{**asdict(p), "label": self.label} for p in self.predictions],
            "one_board": asdict(self.alone) if self.alone else None,
            "estimated": bool(self.notes), "notes": self.notes,
        }


def show(outcome: Outcome) -> None:
    """Print it for people."""
    console, plan = Console(highlight=False), outcome.plan

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    show_whole(console, _boards(outcome))
    for row in outcome.boards:
        if row.why:
            say(f"left out: {row.name}: {row.why}")
    if plan:
        what = "link" if plan.link_bound else "stage"
        say(f"The slowest {what} takes {_ms(plan.slowest * 1e3)} ms for a segment of {plan.problem.rows} "
            f"rows, its way through all {_ms(plan.way * 1e3)} ms.")
    if plan and outcome.draft and (warning := outcome.draft.warning(plan.d0.name)):
        say(f"{warning[:1].upper()}{warning[1:]}.")
    say("")
    if outcome.label:
        say(outcome.label.replace("virtual time", "VIRTUAL TIME", 1) + "; all draft with the EAGLE head")
    if outcome.predictions:
        show_whole(console, _predictions(outcome.predictions))
    if outcome.alone:
        text = outcome.alone.text
        say(f"{text[:1].upper()}{text[1:]}." if outcome.alone.enough else f"{text}.")
    for note in outcome.notes:
        say(f"estimated: {note}")


def _boards(outcome: Outcome) -> Table:
    several = f", {outcome.at_once} requests at once" if outcome.at_once > 1 else ""
    table = _table(f"{outcome.size.name}, {outcome.size.dtype}, {outcome.context} tokens of context{several}",
                   ("role", "board"), ("layers", "weights MB", "cache MB", "process MB", "used / usable MB",
                                       "headroom MB", "stage ms"))
    for row in outcome.boards:
        if row.role is None:
            continue
        layers = f"{row.layers[0]}–{row.layers[1] - 1}" if row.layers else "draft"
        table.add_row(
            row.role, row.name, layers, *(f"{mb:,.0f}" for mb in (row.weights_mb, row.kv_mb, row.process_mb)),
            f"{row.used_mb:,.0f} / {row.usable_mb:,.0f}", f"{row.headroom_mb:,.0f}",
            "–" if row.stage_ms is None else _ms(row.stage_ms))
    return table


def _predictions(predictions: list[Prediction]) -> Table:
    table = _table(None, ("strategy",), ("tokens/s", "speedup", "tokens a turn"))
    for p in predictions:
        speedup = "–" if p.speedup is None else f"{p.speedup:.2f}×"
        table.add_row(p.strategy, f"{p.tokens_per_second:.2f}", speedup, f"{p.tokens_per_turn:.3f}")
    return table


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds >= 1 else f"{milliseconds:.2g}"


def _table(title: str | None, names: tuple[str, ...], figures: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True)
    return table

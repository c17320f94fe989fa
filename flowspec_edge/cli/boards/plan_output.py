"""The result of ``flowspec plan``, as a JSON object and as tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from flowspec_edge.bench.tables import frame
from flowspec_edge.bench.tables import show as show_whole
from flowspec_edge.fleet.planning.draft_heads import HeadCost
from flowspec_edge.fleet.planning.draft_turn import Drafter, DraftTurn, draft_turn
from flowspec_edge.fleet.planning.estimate import Prediction
from flowspec_edge.fleet.planning.model_size import EAGLE3_VOCABULARY, ModelBytes
from flowspec_edge.fleet.planning.one_board import OtherPrograms, SingleBoardEstimate, SmallestBoard
from flowspec_edge.fleet.planning.plan_table import BoardRow
from flowspec_edge.fleet.planning.planner import PipelinePlan
from flowspec_edge.fleet.planning.scaling import at_context
from flowspec_edge.model.catalogue import find_known
from flowspec_edge.util.terminal import plain, printable

_SHOWN_MS = 0.05  # of a stage's time


@dataclass(frozen=True)
class Alternative:
    """A split, or one board alone, that was compared; ``boards``: D0 first, then the stages in order.

    bandwidth_alone  whether its times assume the memory bandwidth that other engines reach
    chosen           whether it is the split that the report describes
    """

    boards: tuple[str, ...]
    dtype: str
    strategy: str | None
    tokens_per_second: float | None
    slowest_stage_ms: float
    segment_ms: float
    bandwidth_alone: bool
    chosen: bool = False


@dataclass
class PlanReport:
    """``plan``: None if one board holds the whole model; ``other_devices``: boards whose profile is of
    another device than their file's torch_device, which for D0 is ``torch_device``."""

    size: ModelBytes
    context: int
    boards: list[BoardRow]
    plan: PipelinePlan | None
    label: str = ""
    predictions: list[Prediction] = field(default_factory=list)
    alone: SingleBoardEstimate | None = None
    at_once: int = 1
    drafter: Drafter = "head"
    torch_device: str = ""
    other_devices: list[str] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)
    others: OtherPrograms | None = None
    smallest: SmallestBoard | None = None
    heads: list[HeadCost] = field(default_factory=list)

    @property
    def draft(self) -> DraftTurn | None:
        """D0's work against the slowest stage's; None without a pipeline."""
        if not (plan := self.plan):
            return None
        profile = at_context(plan.d0.profile, self.size, self.context)
        return draft_turn(profile, plan.slowest, plan.problem.rows, self.drafter, self.torch_device)

    def mark_chosen(self) -> None:
        """Mark the alternative that this report describes, and put the fastest first."""
        names = tuple(row.name for row in self.boards if row.role)
        self.alternatives = sorted(
            (replace(a, chosen=(a.boards, a.dtype) == (names, self.size.dtype)) for a in self.alternatives),
            key=lambda a: -(a.tokens_per_second or 0))

    @property
    def by_bandwidth(self) -> list[str]:
        """Profiles whose stage times assume other engines' memory bandwidth, having no int4 kernel's."""
        return list(dict.fromkeys(row.profile for row in self.boards if row.basis == "bandwidth"))

    @property
    def notes(self) -> list[str]:
        """Which figures are not measured."""
        found = [f"profile {row.profile} is {row.provenance}" for row in self.boards
                 if row.provenance != "measured"]
        found += [f"profile {row.profile} is {row.scaled}" for row in self.boards if row.scaled]
        found += [f"profile {name} has no times of a kernel for {self.size.dtype} weights: its stages are "
                  "charged for the memory bandwidth that other engines reach, in brackets for the "
                  "memory's own and for the slowest of them (the FlowSpec paper's 4-bit kernel was slower by "
                  "far: 400 ms for 10 layers of 13B on Orin Nanos); measure it on the board with: flowspec "
                  "device profile" for name in self.by_bandwidth]
        if self.size.draft_estimated or self.size.own_mtp:
            found.append(self._head_note())
        found += self.other_devices
        return list(dict.fromkeys(found))

    def _head_note(self) -> str:
        name, known = self.size.name, find_known(self.size.name)
        if self.size.own_mtp:
            return (f"the draft head is {name}'s own MTP layer, which is used only if named: --draft mtp, or "
                    'draft = "mtp" in cluster.toml')
        size = "its size is taken to be one layer and fc"
        if not self.size.draft_lm_head:
            size = f"its size is taken to be one layer, fc and an lm_head of {EAGLE3_VOCABULARY:,} tokens"
        if known is None or not known[1].heads:
            return (f"{name} has no EAGLE head: {size}; without one: --draft ngram, and see: "
                    f"flowspec models head {name if known else 'MODEL'}")
        kind, repository = next(iter(known[1].heads.items()))
        return (f"the head of {name}, {repository} ({kind}), is not on this machine: {size}; "
                f"flowspec models fetch {name} downloads both")

    def as_json(self) -> dict[str, Any]:
        """Sizes in MB (10^6 bytes), times in ms."""
        plan = self.plan
        boards = [{key: round(value, 3) if isinstance(value, float) else value
                   for key, value in asdict(row).items()} for row in self.boards]
        return {
            "model": self.size.name, "dtype": self.size.dtype, "lm_head": self.size.head_bits,
            "kv_cache": self.size.kv_cache,
            "context": self.context, "at_once": self.at_once, "boards": boards,
            "bandwidth_alone": bool(self.by_bandwidth),
            "slowest_stage_ms": round(plan.slowest * 1e3, 6) if plan else None,
            "context_ms": round(plan.context_ms, 6) if plan else None,
            "segment_ms": round(plan.latency * 1e3, 6) if plan else None,
            "draft_device": self.draft.as_json() if self.draft else None,
            "predictions": [{**asdict(p), "draft": self.drafter, "label": self.label}
                            for p in self.predictions],
            "one_board": asdict(self.alone) if self.alone else None,
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
            "smallest_single_board": asdict(self.smallest) if self.smallest else None,
            "other_programs": self.others.as_json() if self.others else None,
            "draft_heads": [asdict(cost) for cost in self.heads],
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
        least = "about " if report.by_bandwidth else ""
        say(f"The slowest {what} takes {least}{_ms(plan.slowest * 1e3)} ms for a segment of "
            f"{plan.problem.rows} rows"
            + (f" ({_ms(plan.context_ms)} of them to read {report.context} cached tokens)"
               if plan.context_ms >= _SHOWN_MS else "")
            + f", its way through all {_ms(plan.latency * 1e3)} ms.")
    if plan and report.draft and (warning := report.draft.warning(plan.d0.name)):
        say(f"{warning[:1].upper()}{warning[1:]}.")
    say("")
    if report.label:
        say(report.label.replace("virtual time", "VIRTUAL TIME", 1)
            + ("; all draft by n-grams" if report.drafter == "ngram" else "; all draft with the EAGLE head"))
    if report.at_once > 1:
        say(f"chosen for {report.at_once} requests at once; the speeds are those of one")
    if report.predictions:
        show_whole(console, _predictions(report.predictions))
    if report.alone:
        text = report.alone.text
        say(f"{text[:1].upper()}{text[1:]}." if report.alone.enough else f"{text}.")
    if report.others:
        text = report.others.text
        say(f"{text[:1].upper()}{text[1:]}.")
    if report.smallest:
        say(f"The smallest single board that holds it: {report.smallest.profile}, with about "
            f"{report.smallest.plain_tokens_per_second:.1f} tokens/s of plain decoding.")
    if len(report.alternatives) > 1:
        say("")
        show_whole(console, _alternatives(report))
    if report.heads:
        say("")
        show_whole(console, _heads(report.heads))
    for note in report.notes:
        say(f"estimated: {note}")


def _boards(report: PlanReport) -> Table:
    several = f", {report.at_once} requests at once" if report.at_once > 1 else ""
    parts = {"lm_head": report.size.head_bits, "KV caches": report.size.kv_cache}
    packed = ", ".join(f"{part} {bits}" for part, bits in parts.items() if bits != "16bit")
    dtype = f"{report.size.dtype} ({packed})" if packed else report.size.dtype
    title = f"{report.size.name}, {dtype}, {report.context} tokens of context{several}"
    table = frame(("role", "board"), ("layers", "weights MB", "cache MB", "process MB", "used / usable MB",
                                      "headroom MB", "stage ms"), title, wide=True)
    for row in report.boards:
        if row.role is None:
            continue
        layers = f"{row.layers[0]}–{row.layers[1] - 1}" if row.layers else "draft"
        table.add_row(
            row.role, plain(row.name), layers,
            *(f"{mb:,.0f}" for mb in (row.weights_mb, row.kv_mb, row.process_mb)),
            f"{row.used_mb:,.0f} / {row.usable_mb:,.0f}", f"{row.headroom_mb:,.0f}",
            "–" if row.stage_ms is None else _ms(row.stage_ms) + _span(row.stage_ms_range))
    return table


def _predictions(predictions: list[Prediction]) -> Table:
    calibrated = any(p.tokens_per_second_calibrated is not None for p in predictions)
    columns = ("tokens/s", *(["at the paper's acceptance"] * calibrated), "speedup", "tokens a turn")
    table = frame(("strategy",), columns, wide=True)
    for p in predictions:
        speedup = "–" if p.speedup is None else f"{p.speedup:.2f}×"
        like_paper = [f"{p.tokens_per_second_calibrated:.2f}"] if p.tokens_per_second_calibrated else []
        table.add_row(plain(p.strategy), f"{p.tokens_per_second:.2f}", *like_paper, speedup,
                      f"{p.tokens_per_turn:.3f}")
    return table


def _alternatives(report: PlanReport) -> Table:
    table = frame(("boards", "dtype", "strategy"), ("slowest stage ms", "tokens/s"),
                  "compared: D0, then the stages", wide=True)
    for a in report.alternatives:
        about = "≈ " * a.bandwidth_alone
        rate = "–" if a.tokens_per_second is None else f"{about}{a.tokens_per_second:.2f}"
        table.add_row(plain(", ".join(a.boards)) + " ← this plan" * a.chosen, a.dtype, a.strategy or "–",
                      f"{about}{_ms(a.slowest_stage_ms)}", rate)
    return table


def _heads(costs: list[HeadCost]) -> Table:
    table = frame(("head", "bits"), ("memory MB", "fits", "ms a pass", "ms for 8 depths"),
                  "draft heads on D0, by bytes over bandwidth: lm_head included, caches not", wide=True)
    for cost in costs:
        table.add_row(cost.kind, cost.bits, f"{cost.memory_mb:,.0f}", "yes" if cost.fits else "no",
                      _ms(cost.pass_ms), _ms(cost.tree_ms))
    return table


def _span(ends: tuple[float, float] | None) -> str:
    return f" ({_ms(ends[0])}–{_ms(ends[1])})" if ends else ""


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds >= 1 else f"{milliseconds:.2g}"

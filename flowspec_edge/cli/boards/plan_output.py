"""The result of ``flowspec plan``, as a JSON object and as tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from flowspec_edge.boards.planning.draft_heads import HeadCost
from flowspec_edge.boards.planning.draft_turn import DraftTurn, draft_turn
from flowspec_edge.boards.planning.model_size import ModelBytes
from flowspec_edge.boards.planning.one_board import (
    OtherPrograms,
    SingleBoardEstimate,
    SmallestBoard,
    rate_text,
)
from flowspec_edge.boards.planning.plan_table import BoardRow
from flowspec_edge.boards.planning.planner import PipelinePlan
from flowspec_edge.boards.planning.scaling import at_context
from flowspec_edge.lab.bench.tables import first_token_table, frame
from flowspec_edge.lab.bench.tables import show as show_whole
from flowspec_edge.lab.first_token import FirstToken
from flowspec_edge.lab.predictions import Prediction
from flowspec_edge.model.catalogue import find_known_model
from flowspec_edge.strategies.draft_choice import draft_label
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.util.terminal import plain, printable

if TYPE_CHECKING:
    pass

QUALITY = 0.95  # of int4's tokens/s: 16 bits that reach it are taken, since int4 costs some quality
_SHOWN_MS = 0.05  # of a stage's time
_TIGHT_MB = 100  # of a board's usable memory: with less to spare, anything else that runs there may end the service


@dataclass(frozen=True)
class Alternative:
    """A split, or one board alone, that was compared; ``boards``: D0 first, then the stages in order.

    bandwidth_alone  whether its times assume the memory bandwidth that other engines reach
    chosen           whether it is the split that the report describes
    recommended      whether it is what should be run
    """

    boards: tuple[str, ...]
    dtype: str
    strategy: str | None
    tokens_per_second: float | None
    slowest_stage_ms: float
    segment_ms: float
    bandwidth_alone: bool
    chosen: bool = False
    recommended: bool = False


@dataclass(frozen=True)
class Recommendation:
    """The split, or the board alone, that should be run.

    boards         D0 first, then the stages in order; one if it holds everything
    dtype_why      why this element type
    unused_boards  the other boards, each with the reason
    best           the fastest strategy; None if nothing was predicted
    """

    boards: tuple[str, ...]
    dtype: str
    dtype_why: str
    unused_boards: tuple[tuple[str, str], ...]
    best: Prediction | None


@dataclass
class PlanReport:
    """What `flowspec plan` shows.

    plan           None if no split fits, but one board holds the whole model
    alone_rows     the table of boards if one of them alone is recommended
    other_devices  boards whose profile is of another device than their file's torch_device, which for D0 is
                   ``torch_device``
    next           commands
    kinds_of       whose texts ``Prediction.by_kind`` is of, if they are not the label's
    """

    size: ModelBytes
    context: int
    boards: list[BoardRow]
    plan: PipelinePlan | None
    label: str = ""
    predictions: list[Prediction] = field(default_factory=list)
    alone: SingleBoardEstimate | None = None
    at_once: int = 1
    draft_why: str = ""
    torch_device: str = ""
    other_devices: list[str] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)
    others: OtherPrograms | None = None
    smallest: SmallestBoard | None = None
    heads: list[HeadCost] = field(default_factory=list)
    recommended: Recommendation | None = None
    alone_rows: list[BoardRow] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    kinds_of: str = ""
    first_tokens: list[FirstToken] = field(default_factory=list)

    @property
    def draft(self) -> DraftTurn | None:
        """D0's work against the slowest stage's; None without a pipeline."""
        if not (plan := self.plan):
            return None
        profile = at_context(plan.d0.profile, self.size, self.context)
        return draft_turn(profile, plan.slowest, plan.problem.rows, self.size.planned.kind,
                          self.torch_device)

    def drafts_with(self, strategy: str) -> str:
        """Name what drafts, as ``draft_choice.draft_label`` does."""
        strategy_type, params = strategy_class(strategy), Params(draft=self.size.planned.kind.name)
        return draft_label(strategy_type, params, strategy_type.drafts_with(params))

    def mark_alternatives(self) -> None:
        """Mark the alternative that this report describes, and put the fastest first."""
        names = tuple(row.name for row in self.boards if row.role)
        recommended = self.recommended and (self.recommended.boards, self.recommended.dtype)
        self.alternatives = sorted(
            (replace(a, chosen=(a.boards, a.dtype) == (names, self.size.dtype),
                     recommended=(a.boards, a.dtype) == recommended) for a in self.alternatives),
            key=lambda a: -(a.tokens_per_second or 0))

    @property
    def by_bandwidth(self) -> list[str]:
        """Profiles whose stage times assume other engines' memory bandwidth, having no int4 kernel's."""
        return list(dict.fromkeys(row.profile for row in self.boards if row.basis == "bandwidth"))

    @property
    def notes(self) -> list[str]:
        """Say which figures are not measured."""
        notes = [f"profile {row.profile} is {row.provenance}"
                 + (f" ({row.assumed})" if row.assumed else "") for row in self.boards
                 if row.provenance != "measured"]
        notes += [f"profile {row.profile} is {row.scaled}" for row in self.boards if row.scaled]
        names = ", ".join(self.by_bandwidth)
        subject = f"profiles {names} have" if len(self.by_bandwidth) > 1 else f"profile {names} has"
        notes += [f"{subject} no times of a kernel for {self.size.dtype} weights: their stages are "
                  "charged for the memory bandwidth that other engines reach; in brackets: the time at the "
                  "memory's full bandwidth, and at the slowest engine's (the FlowSpec paper's 4-bit kernel was "
                  "slower by far: 400 ms for 10 layers of 13B on Orin Nanos); measure it on the board with: flowspec "
                  "device profile" ] if names else []
        if note := self._draft_note():
            notes.append(note)
        notes += self.other_devices
        return list(dict.fromkeys(notes))

    def _draft_note(self) -> str:
        """Say what is unknown of the draft model, or what has to be done to get it."""
        size, planned = self.size, self.size.planned
        name, entry = size.name, find_known_model(size.name)
        called = entry[0] if entry else "MODEL"
        if planned.by_ngrams:
            return self.draft_why and (
                f"{name} drafts by n-grams of the text: {self.draft_why}; --draft head plans with a head, "
                f"and flowspec models head {called} says how to get one")
        if planned.kind.by_name_only:
            setting = planned.setting()
            return (f"the draft head is {name}'s {planned.kind.title}, which is used only if named: --draft "
                    f'{setting}, or draft = "{setting}" in cluster.toml')
        if planned.origin == "here":
            return ""
        size_note = f"its size is taken to be {planned.kind.usual}"
        if planned.origin == "untrained":
            return (f"{name} has no EAGLE head: {size_note}; without one: --draft ngram, and see: "
                    f"flowspec models head {called}")
        return (f"the head of {name}, {planned.repository} ({planned.kind.name}), is not on this machine: "
                f"{size_note}; flowspec models fetch {called} downloads both")

    def as_json(self) -> dict[str, Any]:
        """Return the fields of ``--json``, sizes in MB (10^6 bytes), times in ms."""
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
            "draft": {**self.size.planned.as_json(), "why": self.draft_why},
            "predictions": [{**asdict(p), "draft": self.drafts_with(p.strategy), "label": self.label}
                            for p in self.predictions],
            "recommended": self._recommended_json(),
            "one_board": asdict(self.alone) if self.alone else None,
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
            "smallest_single_board": asdict(self.smallest) if self.smallest else None,
            "other_programs": self.others.as_json() if self.others else None,
            "first_tokens": [asdict(first_token) for first_token in self.first_tokens],
            "draft_heads": [asdict(cost) for cost in self.heads],
            "kinds_of": self.kinds_of, "estimated": bool(self.notes), "notes": self.notes,
        }

    def _recommended_json(self) -> dict[str, Any] | None:
        plan = self.recommended
        if plan is None:
            return None
        best = plan.best
        return {"boards": list(plan.boards), "dtype": plan.dtype, "dtype_why": plan.dtype_why,
                "left_out": [{"name": name, "why": why} for name, why in plan.unused_boards],
                "strategy": best.strategy if best else None,
                "draft": self.drafts_with(best.strategy) if best else None,
                "tokens_per_second": best.tokens_per_second if best else None,
                "first_token_s": best.first_token_s if best else None,
                "prompt_tokens": best.prompt_tokens if best else None, "next": self.next}


def answer(report: PlanReport) -> list[str]:
    """Return the first lines: what to run, on which of the boards, how fast, and the next commands."""
    plan, size = report.recommended, report.size
    assert plan
    best, board_count, used_count = plan.best, len(report.boards), len(plan.boards)
    if board_count == 1:
        boards_text = "your only board"
    elif used_count == board_count:
        boards_text = f"all {used_count} of your boards"
    else:
        boards_text = f"{used_count} of your {board_count} boards"
    line = f"Run {size.name} in {size.dtype} on {boards_text}"
    if best:
        about = "about " if report.by_bandwidth else ""
        line += f", with {best.strategy}: PREDICTED {about}{rate_text(best.tokens_per_second)} tokens/s"
        about_heads = []
        if best.tokens_per_second_calibrated:
            paper = rate_text(best.tokens_per_second_calibrated)
            about_heads.append(f"{paper} with a head that is right as rarely as the paper's")
        if best.by_kind:
            source_text = f", as in {report.kinds_of}" if report.kinds_of else ""
            about_heads.insert(0, f"expect {_range(best.by_kind.values())} by kind of text{source_text}")
        if about_heads:
            line += f" ({'; '.join(about_heads)})"
        if best.first_token_s:
            line += (f", the first token {_seconds(best.first_token_s)} after a prompt of "
                     f"{best.prompt_tokens:.0f} tokens")
    else:
        line += "; how fast is not predicted (--no-predict)"
    d0, *stages = plan.boards
    lines = [f"{line}.", f"{size.dtype}: {plan.dtype_why}."]
    if stages:
        several = "are the stages" if len(stages) > 1 else "is the only stage"
        lines.append(f"Boards: {d0} drafts (D0); {', '.join(stages)} {several}.")
    else:
        lines.append(f"Boards: {d0} holds everything.")
    reasons: dict[str, list[str]] = {}
    for name, why in plan.unused_boards:
        reasons.setdefault(why, []).append(name)
    lines += [f"Left out: {', '.join(names)}: {why}." for why, names in reasons.items()]
    if best is None or report.drafts_with(best.strategy) != "none":
        looked_up = best is not None and report.drafts_with(best.strategy).endswith("+ngram")
        origin = {"published": " (not here yet)", "untrained": " (estimated)"}.get(size.planned.origin, "")
        lines.append(f"Drafts with {size.planned.name}{origin}{', and n-grams of the text' * looked_up}"
                     + (f": {report.draft_why}" if report.draft_why else "") + ".")
    full = [row for row in report.alone_rows or report.boards if row.role and row.headroom_mb < _TIGHT_MB]
    if full:
        left = ", ".join(f"{row.name} ({row.headroom_mb:,.0f} MB)" for row in full)
        lines.append(f"Hardly any usable memory is left on {left}: run nothing else there, or plan with a smaller "
                     "--context.")
    estimated = list(dict.fromkeys(row.name for row in report.boards if row.assumed))
    if estimated:
        lines.append(f"ESTIMATED, not measured: {', '.join(estimated)}; measure with: flowspec device profile")
    faster = [(a, a.tokens_per_second) for a in report.alternatives
              if best and a.dtype != plan.dtype and a.tokens_per_second
              and a.tokens_per_second * QUALITY > best.tokens_per_second]
    if faster:
        other, rate = faster[0]
        lines.append(f"Faster: --dtype {other.dtype}, about {rate_text(rate)} tokens/s on "
                     f"{', '.join(other.boards)}.")
    return [*lines, *(f"Next: {command}" for command in report.next)]


def show(report: PlanReport) -> None:
    console, plan = Console(highlight=False), report.plan

    def say(text: str) -> None:
        console.print(printable(text), markup=False, soft_wrap=True)

    for line in answer(report):
        say(line)
    say("")
    if report.alone_rows:
        show_whole(console, _boards(report, report.alone_rows))
        if plan:
            say("")
            say("The fastest split over several boards:")
    if plan:
        show_whole(console, _boards(report, report.boards))
    for row in report.boards if plan else ():
        if row.why:
            say(f"left out: {row.name}: {row.why}")
    if plan:
        slowest_part = "link" if plan.link_bound else "stage"
        least = "about " if report.by_bandwidth else ""
        say(f"The slowest {slowest_part} takes {least}{_ms(plan.slowest * 1e3)} ms for a segment of "
            f"{plan.problem.rows} rows"
            + (f" ({_ms(plan.context_ms)} ms of that to read {report.context} cached tokens)"
               if plan.context_ms >= _SHOWN_MS else "")
            + f"; all stages and links together take {_ms(plan.latency * 1e3)} ms.")
    if plan and report.draft and (warning := report.draft.warning(plan.d0.name)):
        say(f"{warning[:1].upper()}{warning[1:]}.")
    say("")
    label = report.label.replace("virtual time", "VIRTUAL TIME", 1)
    if label and (report.predictions or not report.alone):
        say(label)
    if report.at_once > 1:
        say(f"chosen for {report.at_once} requests at once; the speeds are those of one")
    if report.predictions:
        show_whole(console, _predictions(report))
    for p in report.predictions if report.kinds_of else ():
        if p.by_kind:
            rates = ", ".join(f"{kind} {rate_text(rate)}" for kind, rate in p.by_kind.items())
            say(f"{p.strategy} in {report.kinds_of}: {rates}.")
    if report.first_tokens:
        say("")
        say("the first token of a prompt alone, by its length:")
        show_whole(console, first_token_table(report.first_tokens))
        say("")
    if report.alone:
        text = report.alone.text
        if label and not report.predictions:  # no table that it could head
            text += f" ({label})"
        say(f"{text[:1].upper()}{text[1:]}." if report.alone.enough else f"{text}.")
    if report.others:
        text = report.others.text
        say(f"{text[:1].upper()}{text[1:]}.")
    if report.smallest and not report.alone:
        rate = rate_text(report.smallest.plain_tokens_per_second)
        say("None of these boards holds it alone under flowspec.  The smallest of the known boards that "
            f"does: {report.smallest.profile}, with about {rate} tokens/s of plain decoding.")
    if len(report.alternatives) > 1:
        say("")
        show_whole(console, _alternatives(report))
    if report.heads:
        say("")
        show_whole(console, _heads(report.heads))
    for note in report.notes:
        say(f"estimated: {note}")


def _boards(report: PlanReport, rows: Sequence[BoardRow]) -> Table:
    several = f", {report.at_once} requests at once" if report.at_once > 1 else ""
    parts = {"lm_head": report.size.head_bits, "KV caches": report.size.kv_cache}
    packed = ", ".join(f"{part} {bits}" for part, bits in parts.items() if bits != "16bit")
    dtype = f"{report.size.dtype} ({packed})" if packed else report.size.dtype
    title = f"{report.size.name}, {dtype}, {report.context} tokens of context{several}"
    table = frame(("role", "board"), ("layers", "weights MB", "cache MB", "process MB", "used / usable MB",
                                      "headroom MB", "stage ms"), title, wide=True)
    for row in rows:
        if row.role is None:
            continue
        layers = f"{row.layers[0]}–{row.layers[1] - 1}" if row.layers else "draft"
        table.add_row(
            row.role, plain(row.name), layers,
            *(f"{mb:,.0f}" for mb in (row.weights_mb, row.kv_mb, row.process_mb)),
            f"{row.used_mb:,.0f} / {row.usable_mb:,.0f}", f"{row.headroom_mb:,.0f}",
            "–" if row.stage_ms is None else _ms(row.stage_ms) + _span(row.stage_ms_range))
    return table


def _predictions(report: PlanReport) -> Table:
    predictions = report.predictions
    calibrated = any(p.tokens_per_second_calibrated is not None for p in predictions)
    ranges = not report.kinds_of and any(p.by_kind for p in predictions)
    columns = ("tokens/s", *(["at the paper's acceptance"] * calibrated), *(["by kind of text"] * ranges),
               "×chunk_pp", "tokens a turn")
    table = frame(("strategy", "drafts with"), columns)
    for p in predictions:
        speedup = "–" if p.speedup is None else f"{p.speedup:.2f}×"
        like_paper = [rate_text(p.tokens_per_second_calibrated, 2)] if p.tokens_per_second_calibrated else []
        table.add_row(plain(p.strategy), report.drafts_with(p.strategy), rate_text(p.tokens_per_second, 2),
                      *like_paper, *([_range((p.by_kind or {}).values())] * ranges), speedup,
                      f"{p.tokens_per_turn:.3f}")
    return table


def _alternatives(report: PlanReport) -> Table:
    table = frame(("boards", "dtype", "strategy"), ("slowest stage ms", "tokens/s"),
                  "compared: D0, then the stages", wide=True)
    for a in report.alternatives:
        about = "≈ " * a.bandwidth_alone
        rate = "–" if a.tokens_per_second is None else f"{about}{rate_text(a.tokens_per_second, 2)}"
        mark = " ← recommended" if a.recommended else " ← the split above" if a.chosen else ""
        table.add_row(plain(", ".join(a.boards)) + mark, a.dtype, a.strategy or "–",
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


def _range(rates: Collection[float]) -> str:
    """Write the range from the least to the largest."""
    return f"{rate_text(min(rates))} to {rate_text(max(rates))}" if rates else "–"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.01 else "within 0.01 s"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds >= 1 else f"{milliseconds:.2g}"

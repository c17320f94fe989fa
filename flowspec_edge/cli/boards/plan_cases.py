"""What ``flowspec plan`` decides between: splits over subsets of the boards, element types, one board."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from flowspec_edge.cli.bench.options import PUBLISHED_SHARE
from flowspec_edge.cli.boards.plan_output import Alternative, PlanReport
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.planning import estimate, planner
from flowspec_edge.fleet.planning.board_spec import BoardSpec
from flowspec_edge.fleet.planning.draft_turn import Drafter, device_mismatch
from flowspec_edge.fleet.planning.layer_split import Ranges, plan_as_listed, problem_for
from flowspec_edge.fleet.planning.memory_check import memory_error
from flowspec_edge.fleet.planning.model_size import ModelBytes, PlanDtype, model_bytes
from flowspec_edge.fleet.planning.one_board import (
    SingleBoardEstimate,
    best_alone,
    other_programs,
    plain_tokens_per_second,
    single_board_headroom,
    smallest_board,
)
from flowspec_edge.fleet.planning.plan_table import alone_rows, plan_rows
from flowspec_edge.fleet.planning.planner import CandidateBoard, PipelinePlan, SplitProblem
from flowspec_edge.fleet.planning.scaling import Scaling
from flowspec_edge.fleet.planning.throughput import Throughput
from flowspec_edge.model.manifest import CacheBits, HeadBits
from flowspec_edge.runtime.request import Request

_COMPARED_TYPES: tuple[PlanDtype, ...] = ("fp16", "int4")
_COMPARED = 3  # splits over different boards with the best rates


@dataclass
class Case:
    """One element type.

    plans  splits over different boards, the best first; empty if none fits
    alone  the fastest board that holds everything
    """

    problem: SplitProblem
    boards: list[CandidateBoard]
    scaled: dict[str, Scaling]
    plans: list[PipelinePlan]
    alone: CandidateBoard | None
    rate: Throughput

    @property
    def bandwidth(self) -> bool:
        """Whether times assume memory bandwidth alone."""
        return any(how.basis == "bandwidth" for how in self.scaled.values())

    @property
    def expected(self) -> float:
        """The best split's rate; 0 without one."""
        return max((self.rate(p.d0, p.slowest, p.latency) for p in self.plans), default=0.0)

    def shortlist(self) -> list[PipelinePlan]:
        """Those worth a run: the best by the rate, and the one with the fastest slowest stage.

        A run is of one request; for several at once the rate alone decides.
        """
        if self.rate.at_once > 1:
            return self.plans[:1]
        quickest = min(self.plans, key=lambda p: p.slowest, default=None)
        best = self.plans[:_COMPARED]
        return best if quickest is None or quickest in best else [*best, quickest]

    def alternative(self, plan: PipelinePlan, strategy: str | None = None, rate: float | None = None
                    ) -> Alternative:
        names = (plan.d0.name, *(stage.board.name for stage in plan.stages))
        return Alternative(names, self.problem.size.dtype, strategy, rate, plan.slowest * 1e3,
                           plan.latency * 1e3, self.bandwidth)

    def alternative_alone(self, strategy: str | None = None, rate: float | None = None) -> Alternative:
        assert self.alone
        seconds = self.alone.profile.stage_seconds(self.problem.rows, self.problem.size.layers,
                                                   self.problem.context)
        return Alternative((self.alone.name,), self.problem.size.dtype, strategy, rate, seconds * 1e3,
                           seconds * 1e3, self.bandwidth)

    def report(self, plan: PipelinePlan | None, members: Sequence[BoardSpec]) -> PlanReport:
        """``plan`` None: one board holds everything, and no split fits."""
        problem, able = self.problem, self.alone
        if plan:
            rows = plan_rows(plan, self.scaled)
        else:
            assert able
            rows = alone_rows(able, [b for b in self.boards if b is not able], problem, self.scaled)
        devices = {member.name: member.torch_device for member in members}
        return PlanReport(
            problem.size, problem.context, rows, plan,
            alone=SingleBoardEstimate(able.name, f"{able.name} alone holds everything",
                                      plain_tokens_per_second(able, problem)) if able else None,
            smallest=smallest_board(problem),
            others=other_programs(self.boards, problem), at_once=self.rate.at_once, drafter=self.rate.draft,
            torch_device=devices[plan.d0.name] if plan else "",
            other_devices=[f"{member.name}: {why}" for member in members if member.torch_device
                           and (why := device_mismatch(member.profile, member.torch_device))])


def case_of(model: str, dtype: PlanDtype, members: Sequence[BoardSpec], context: int, at_once: int,
            draft: Drafter, lm_head: HeadBits | None = None, kv_cache: CacheBits | None = None) -> Case:
    """``kv_cache`` None: "int8" where only that fits.  UsageError for a context that the model was not made
    for; ``planner.DoesNotFit`` with what is missing."""
    if kv_cache is None:
        try:
            return case_of(model, dtype, members, context, at_once, draft, lm_head, "16bit")
        except planner.DoesNotFit:
            kv_cache = "int8"
    kept_in = kv_cache

    def size_in(dtype: PlanDtype, kv_cache: CacheBits = kept_in) -> ModelBytes:
        size = model_bytes(model, dtype, lm_head, kv_cache)
        return size.without_head() if draft == "ngram" else size

    size = size_in(dtype)
    if context > size.max_positions:
        raise UsageError(f"--context {context} is more than the {size.max_positions} tokens that "
                         f"{size.name} was made for")
    given = [member.for_model(size) for member in members]
    boards = [board for board, _ in given]
    problem = problem_for(size, context, at_once, len(given))
    rate = Throughput(problem, draft, at_once)
    case = Case(problem, boards, {board.name: how for board, how in given}, [], best_alone(boards, problem),
                rate)
    try:
        if len(boards) > 1:
            verify = [board for board in boards if board.role == "verify"]
            drafts = [board for board in boards if board.role == "draft"]
            layers = _listed_layers(members, size)
            if len(drafts) == 1 and len(verify) == len(boards) - 1:
                case.plans = [plan_as_listed(drafts[0], verify, problem, layers)]
            else:
                case.plans = planner.search(boards, problem, rate)
    except planner.DoesNotFit:
        if not case.alone:
            raise memory_error(boards, problem, size_in) from None
    if not case.plans and not case.alone:
        missing = -single_board_headroom(boards[0], problem) / 1e6
        bare = replace(problem, size=size.without_head())
        without_head = ", or --draft ngram, with which it fits" if best_alone(boards, bare) else ""
        raise planner.DoesNotFit(
            f"{boards[0].name} alone lacks {missing:,.0f} MB for all of {size.name} in {size.dtype}, and a "
            f"pipeline needs two boards at least: give more --devices{without_head}; "
            f"{other_programs(boards, problem).text}")
    return case


def choose_dtype(model: str, wanted: str, members: Sequence[BoardSpec], context: int, at_once: int,
                 draft: Drafter, lm_head: HeadBits | None = None, kv_cache: CacheBits | None = None
                 ) -> tuple[Case, list[Case]]:
    """The case of the element type ``wanted``, "auto" for the fastest that fits, and those to compare."""
    errors: list[FlowspecError] = []

    def found(kinds: Sequence[PlanDtype]) -> list[Case]:
        cases = []
        for kind in kinds:
            try:
                cases.append(case_of(model, kind, members, context, at_once, draft, lm_head, kv_cache))
            except (planner.DoesNotFit, UsageError) as error:  # a profile may not scale to other weights
                errors.append(error)
        return cases

    if wanted == "auto":
        cases = sorted(found(_COMPARED_TYPES), key=lambda case: -case.expected)
        if not cases:
            raise errors[-1]  # of the smallest
        return cases[0], cases[1:]
    first = cast(PlanDtype, wanted)
    main = case_of(model, first, members, context, at_once, draft, lm_head, kv_cache)
    return main, found([kind for kind in _COMPARED_TYPES
                        if kind != first and (first, kind) != ("bf16", "fp16")])


def _listed_layers(members: Sequence[BoardSpec], size: ModelBytes) -> Ranges | None:
    given = [member for member in members if member.layers]
    if not given:
        return None
    if any(member.role == "auto" for member in members):
        raise UsageError(f"{given[0].name} has layers in its cluster file: give that file alone, or take "
                         "the layers out")
    ranges = tuple(member.layers for member in given if member.layers)
    if ranges[-1][1] != size.layers:
        raise UsageError(f"{given[-1].name}: its layers end with {ranges[-1][1]}, and {size.name} has "
                         f"{size.layers}")
    return ranges


class Runs:
    """Runs the candidates in virtual time and completes the report with the fastest."""

    def __init__(self, main: Case, others: Sequence[Case], names: Sequence[str], calibrates: bool) -> None:
        """calibrates  whether the chosen split also runs with the acceptance of a published head"""
        self._main, self._others, self._names, self._calibrates = main, others, names, calibrates
        self._lead = "flowspec_plus" if "flowspec_plus" in names else names[0]

    @property
    def steps(self) -> int:
        """Runs of each request."""
        count = len(self._main.shortlist())
        count += (len(self._names) * (1 + self._calibrates) - 1) * bool(self._main.plans)
        count += len(estimate.ALONE) * bool(self._main.alone)
        return count + sum(bool(case.plans) + bool(case.alone) for case in self._others)

    def __call__(self, members: Sequence[BoardSpec], model_dir: Path, requests: Sequence[Request],
                 advance: estimate.Advance) -> PlanReport:
        main, lead, run = self._main, self._lead, (model_dir, requests, advance)
        leads = [(plan, estimate.predict(plan, [lead], *run)[0]) for plan in main.shortlist()]
        chosen, first = max(leads, key=lambda pair: pair[1].tokens_per_second, default=(None, None))
        report = main.report(chosen, members)
        if chosen and first:
            rest = estimate.predict(chosen, [name for name in self._names if name != lead], *run)
            made = {p.strategy: p for p in (first, *rest)}
            report.predictions = estimate.with_speedup([made[name] for name in self._names])
            if self._calibrates:
                report.predictions = [
                    replace(p, tokens_per_second_calibrated=q.tokens_per_second) for p, q in zip(
                        report.predictions,
                        estimate.predict(chosen, self._names, *run, right_children=PUBLISHED_SHARE),
                        strict=True)]
            best = max(report.predictions, key=lambda p: p.tokens_per_second)
            leads = [(plan, best if plan is chosen else p) for plan, p in leads]
        report.alternatives = [main.alternative(plan, p.strategy, p.tokens_per_second) for plan, p in leads]
        if main.alone:
            own = estimate.predict_alone(main.alone, main.problem, *run)
            boards = len(chosen.stages) + 1 if chosen else 1
            report.alone = estimate.compare(main.alone, main.problem, own, boards,
                                            report.predictions)
            report.alternatives.append(
                main.alternative_alone(report.alone.strategy, report.alone.tokens_per_second))
        for case in self._others:
            if case.plans:
                [p] = estimate.predict(case.plans[0], [lead], *run)
                report.alternatives.append(case.alternative(case.plans[0], lead, p.tokens_per_second))
            if case.alone:
                [p] = estimate.predict_alone(case.alone, case.problem, *run, estimate.ALONE[:1])
                report.alternatives.append(case.alternative_alone(p.strategy, p.tokens_per_second))
        report.mark_chosen()
        return report


def unpredicted(main: Case, others: Sequence[Case], members: Sequence[BoardSpec]) -> PlanReport:
    """The split that the rate alone chooses."""
    report = main.report(main.plans[0] if main.plans else None, members)
    report.alternatives = [main.alternative(plan) for plan in main.shortlist()]
    report.alternatives += [case.alternative(case.plans[0]) for case in others if case.plans]
    report.alternatives += [case.alternative_alone() for case in (main, *others) if case.alone]
    report.mark_chosen()
    return report

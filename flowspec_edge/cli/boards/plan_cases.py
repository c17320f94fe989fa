"""What ``flowspec plan`` decides between: splits over subsets of the boards, element types, one board."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from flowspec_edge.boards.planning import planner
from flowspec_edge.boards.planning.board_spec import BoardSpec
from flowspec_edge.boards.planning.draft_turn import device_mismatch
from flowspec_edge.boards.planning.layer_split import Ranges, plan_as_listed, problem_for
from flowspec_edge.boards.planning.memory_check import memory_error
from flowspec_edge.boards.planning.model_size import ModelBytes, PlanDtype, model_bytes
from flowspec_edge.boards.planning.one_board import (
    SingleBoardEstimate,
    best_alone,
    other_programs,
    plain_tokens_per_second,
    rate_text,
    single_board_headroom,
    smallest_board,
)
from flowspec_edge.boards.planning.plan_table import alone_rows, plan_rows
from flowspec_edge.boards.planning.planner import CandidateBoard, PipelinePlan, SplitProblem
from flowspec_edge.boards.planning.scaling import Scaling
from flowspec_edge.boards.planning.throughput import Throughput
from flowspec_edge.cli.bench.options import PUBLISHED_SHARE
from flowspec_edge.cli.boards.plan_output import QUALITY, Alternative, PlanReport, Recommendation
from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.drivers.virtual.recording import Recording
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.lab import first_token, predictions
from flowspec_edge.lab.first_token import FirstToken
from flowspec_edge.lab.predictions import Prediction
from flowspec_edge.model.draft_kinds import NGRAM, PlannedDraftName
from flowspec_edge.model.manifest import CacheBits, HeadBits
from flowspec_edge.util.threads import cores

_COMPARED_TYPES: tuple[PlanDtype, ...] = ("fp16", "int4")
_COMPARED = 3  # splits over different boards with the best rates


@dataclass
class Case:
    """The plans for one element type.

    plans      splits over different boards, the best first; empty if none fits
    alone      the fastest board that holds everything
    draft_why  why it drafts by n-grams, where --draft does not ask for that
    """

    problem: SplitProblem
    boards: list[CandidateBoard]
    scaled: dict[str, Scaling]
    plans: list[PipelinePlan]
    alone: CandidateBoard | None
    rate: Throughput
    draft_why: str = ""

    @property
    def bandwidth(self) -> bool:
        """Whether times assume memory bandwidth alone."""
        return any(scaling.basis == "bandwidth" for scaling in self.scaled.values())

    @property
    def expected(self) -> float:
        """Return the best split's rate; 0 without one."""
        return max((self.rate(p.d0, p.slowest, p.latency) for p in self.plans), default=0.0)

    def shortlist(self) -> list[PipelinePlan]:
        """Return the splits worth a run: the best by the rate, and the one with the fastest slowest stage.

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

    def first_tokens(self, plan: PipelinePlan | None, lengths: Sequence[int] = first_token.LENGTHS) -> list[FirstToken]:
        """Return the time to the first token by the length of the prompt, for a request alone.

        plan  on whose boards; None: on the board that holds everything
        """
        return [self._first_token(plan, tokens) for tokens in lengths]

    def _first_token(self, plan: PipelinePlan | None, tokens: int) -> FirstToken:
        size, context = self.problem.size, tokens + 1
        if context > size.max_positions:
            return FirstToken(tokens, None, f"{size.name} was made for {size.max_positions:,} tokens")
        longer = problem_for(size, max(context, self.problem.context), self.problem.requests, len(self.boards))
        if missing := self._missing(plan, longer):
            return FirstToken(tokens, None, missing)
        if plan:
            devices = Devices(plan.d0.profile, tuple(stage.board.profile for stage in plan.stages),
                              tuple(float(hi - lo) for lo, hi in (stage.layers for stage in plan.stages)), "the plan",
                              replace(plan, problem=longer).predicted_prompt_rows)
        else:
            assert self.alone
            devices = predictions.single_board(self.alone, self.alone.profile, longer)
        estimate = first_token.in_virtual_time(devices, tokens)
        if context <= self.problem.context:
            return estimate
        return replace(estimate, why=f"with --context {context} or more, for prompt and answer")

    def _missing(self, plan: PipelinePlan | None, problem: SplitProblem) -> str:
        """Say what memory a board lacks for the caches of ``problem`` beside its layers; "" for none."""
        if plan is None:
            assert self.alone
            missing_bytes = {self.alone.name: -single_board_headroom(self.alone, problem)}
        else:
            missing_bytes = {plan.d0.name: problem.d0 - plan.d0.room}
            missing_bytes |= {stage.board.name: problem.stage(stage.layers[1] - stage.layers[0]) - stage.board.room
                              for stage in plan.stages}
        name, most = max(missing_bytes.items(), key=lambda item: item[1])
        return f"does not fit: {name} lacks {most / 1e6:,.0f} MB for the caches" if most > 0 else ""

    def report(self, plan: PipelinePlan | None, members: Sequence[BoardSpec]) -> PlanReport:
        """Return the report of a split; ``plan`` None: one board holds everything, and no split fits."""
        problem, able = self.problem, self.alone
        assumed = {member.name: member.assumed for member in members}
        if plan:
            rows = plan_rows(plan, self.scaled)
        else:
            assert able
            rows = alone_rows(able, [b for b in self.boards if b is not able], problem, self.scaled)
        rows = [replace(row, assumed=assumed[row.name]) for row in rows]
        devices = {member.name: member.torch_device for member in members}
        return PlanReport(
            problem.size, problem.context, rows, plan,
            alone=SingleBoardEstimate(able.name, f"{able.name} alone holds everything",
                                      plain_tokens_per_second(able, problem)) if able else None,
            smallest=smallest_board(problem, self.boards),
            others=other_programs(self.boards, problem), at_once=self.rate.at_once,
            draft_why=self.draft_why,
            torch_device=devices[plan.d0.name] if plan else "",
            other_devices=[f"{member.name}: {why}" for member in members if member.torch_device
                           and (why := device_mismatch(member.profile, member.torch_device))])


def case_of(model: str, dtype: PlanDtype, members: Sequence[BoardSpec], context: int, at_once: int,
            draft: PlannedDraftName = "auto", lm_head: HeadBits | None = None, kv_cache: CacheBits | None = None
            ) -> Case:
    """Plan a model in one element type.

    draft     with "auto", n-grams where no head fits
    kv_cache  None: "int8" where only that fits

    Raise UsageError for a context that the model was not made for; ``planner.DoesNotFit`` with what is missing.
    """
    caches: Sequence[CacheBits] = [kv_cache] if kv_cache else ["16bit", "int8"]
    drafts: Sequence[PlannedDraftName] = ["auto", NGRAM.name] if draft == "auto" else [draft]
    errors: list[planner.DoesNotFit] = []
    for draft_choice in drafts:
        for cache_bits in caches:
            try:
                case = _case_of(model, dtype, members, context, at_once, draft_choice, lm_head, cache_bits)
            except planner.DoesNotFit as error:
                errors.append(error)
                continue
            if draft == "auto" and case.problem.size.planned.by_ngrams:
                case.draft_why = ("no draft head is known for it" if draft_choice == "auto" else
                                  "with a draft head it does not fit on these boards")
            return case
    raise errors[len(caches) - 1]  # what is missing with a head


def _case_of(model: str, dtype: PlanDtype, members: Sequence[BoardSpec], context: int, at_once: int,
             draft: PlannedDraftName, lm_head: HeadBits | None, kv_cache: CacheBits) -> Case:
    def size_in(dtype: PlanDtype, kv_cache: CacheBits = kv_cache) -> ModelBytes:
        return model_bytes(model, dtype, lm_head, kv_cache, draft)

    size = size_in(dtype)
    if context > size.max_positions:
        raise UsageError(f"--context {context} is more than the {size.max_positions} tokens that "
                         f"{size.name} was made for: give --context {size.max_positions} or less")
    scaled = [member.for_model(size) for member in members]
    boards = [board for board, _ in scaled]
    problem = problem_for(size, context, at_once, len(scaled))
    rate = Throughput(problem, at_once)
    case = Case(problem, boards, {board.name: scaling for board, scaling in scaled}, [], best_alone(boards, problem),
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


@dataclass
class Cases:
    """The element types to compare.

    main    the one that was asked for; with --dtype auto, the one with the best rate
    auto    whether another may be taken instead
    unfit   why types were not compared
    """

    main: Case
    others: list[Case]
    auto: bool = False
    unfit: dict[PlanDtype, FlowspecError] = field(default_factory=dict)

    def choose(self, rate: Callable[[Case], float], predicted: bool = True) -> tuple[Case, str]:
        """Choose the case to recommend, and say why its element type.

        ``rate`` gives the tokens/s of a case's best, which only rank unless they are ``predicted``.
        """
        if not self.auto:
            return self.main, "as --dtype asks"
        fits = {case.problem.size.dtype: case for case in (self.main, *self.others)}
        if len(fits) < len(_COMPARED_TYPES):
            [missing] = [kind for kind in _COMPARED_TYPES if kind not in fits]
            why = (f"{missing} does not fit on these boards" if isinstance(self.unfit[missing],
                                                                         planner.DoesNotFit)
                   else f"in {missing} there is no plan: {self.unfit[missing]}")
            return self.main, why
        full, packed = rate(fits["fp16"]), rate(fits["int4"])
        rates = f"{rate_text(full)} tokens/s, int4 {rate_text(packed)}"
        if not packed:
            return self.main, "both fit"
        if full >= QUALITY * packed:
            comparison = f"make {rates}" if predicted else "are as fast as int4"
            return fits["fp16"], f"16 bits fit and {comparison}, which is no gain for its loss of quality"
        comparison = f"make {rates}" if predicted else (
            f"int4 is ranked {packed / full:.1f} times as fast")
        return fits["int4"], f"16 bits fit, too, but {comparison}; for the best quality give --dtype fp16"


def choose_dtype(model: str, dtype: str, members: Sequence[BoardSpec], context: int, at_once: int,
                 draft: PlannedDraftName = "auto", lm_head: HeadBits | None = None,
                 kv_cache: CacheBits | None = None) -> Cases:
    """Return the case of the element type ``dtype``, and the cases to compare it with.

    For "auto" predictions decide between the cases.
    """
    unfit: dict[PlanDtype, FlowspecError] = {}

    def fitting_cases(kinds: Sequence[PlanDtype]) -> list[Case]:
        cases = []
        for kind in kinds:
            try:
                cases.append(case_of(model, kind, members, context, at_once, draft, lm_head, kv_cache))
            except (planner.DoesNotFit, UsageError) as error:  # a profile may not scale to other weights
                unfit[kind] = error
        return cases

    if dtype == "auto":
        cases = sorted(fitting_cases(_COMPARED_TYPES), key=lambda case: -case.expected)
        if not cases:
            large = [error for error in unfit.values() if isinstance(error, planner.DoesNotFit)]
            raise large[-1] if large else list(unfit.values())[-1]  # of the smallest
        return Cases(cases[0], cases[1:], True, unfit)
    first = cast(PlanDtype, dtype)
    main = case_of(model, first, members, context, at_once, draft, lm_head, kv_cache)
    return Cases(main, fitting_cases([kind for kind in _COMPARED_TYPES
                                      if kind != first and (first, kind) != ("bf16", "fp16")]))


def _listed_layers(members: Sequence[BoardSpec], size: ModelBytes) -> Ranges | None:
    with_layers = [member for member in members if member.layers]
    if not with_layers:
        return None
    if any(member.role == "auto" for member in members):
        raise UsageError(f"{with_layers[0].name} has layers in its cluster file: give that file alone, or take "
                         "the layers out")
    ranges = tuple(member.layers for member in with_layers if member.layers)
    if ranges[-1][1] != size.layers:
        raise UsageError(f"{with_layers[-1].name}: its layers end with {ranges[-1][1]}, and {size.name} has "
                         f"{size.layers}")
    return ranges


@dataclass
class _Runs:
    """Predictions of a case: of its splits by the leading strategy, and of one board alone."""

    leads: list[tuple[PipelinePlan, Prediction]]
    alone: list[Prediction]

    @property
    def split(self) -> tuple[PipelinePlan, Prediction] | None:
        return max(self.leads, key=lambda pair: pair[1].tokens_per_second, default=None)

    @property
    def best(self) -> float:
        return max((p.tokens_per_second for p in (*(p for _, p in self.leads), *self.alone)), default=0.0)


@dataclass(frozen=True)
class Tokens:
    """The source of the tokens of a prediction.

    source      a model's directory, or a recording
    acceptance  whose it is, for the label
    calibrates  whether the chosen split also runs with the acceptance of a published head
    kinds       of the requests' texts, if there are several
    beside      texts of several kinds with another head, for the range over them
    """

    source: Path | Recording
    acceptance: str
    requests: Sequence[Request]
    calibrates: bool
    kinds: Sequence[str] = ()
    beside: Tokens | None = None


class Runs:
    """What runs the candidates in virtual time, and reports on the best."""

    def __init__(self, cases: Cases, names: Sequence[str], tokens: Callable[[Case], Tokens]) -> None:
        self._cases, self._names, self._tokens = cases, names, tokens
        self._workers: predictions.Workers | None = None
        self._lead = "flowspec_plus" if "flowspec_plus" in names else names[0]

    @property
    def steps(self) -> int:
        """Return the maximum number of runs of a request."""
        cases = (self._cases.main, *self._cases.others)
        count = sum(len(self._shortlist(case)) + len(predictions.ALONE) * bool(case.alone) for case in cases)
        return count + max((len(self._names) * (1 + self._tokens(case).calibrates) - 1
                            for case in cases if case.plans), default=0) + self._steps_beside()

    def _steps_beside(self) -> int:
        """Return the steps for the requests beside the main case, in runs of its own requests, rounded up."""
        tokens = self._tokens(self._cases.main)
        return -(-len(tokens.beside.requests) // len(tokens.requests)) if tokens.beside else 0

    def _shortlist(self, case: Case) -> list[PipelinePlan]:
        return case.shortlist() if case is self._cases.main else case.plans[:1]

    @contextmanager
    def in_processes(self) -> Iterator[None]:
        """Have a process for each core simulate, within the block, what recordings simulate."""
        tokens = [self._tokens(case) for case in (self._cases.main, *self._cases.others)]
        beside = [case_tokens.beside for case_tokens in tokens if case_tokens.beside]
        sources = [case_tokens.source for case_tokens in (*tokens, *beside)]
        recordings = [source for source in sources if isinstance(source, Recording)]
        if not recordings or cores() == 1:
            yield
            return
        with predictions.Workers(recordings, cores()) as self._workers:
            yield
        self._workers = None

    def __call__(self, members: Sequence[BoardSpec], advance: predictions.Advance) -> PlanReport:
        lead, cases, workers = self._lead, [self._cases.main, *self._cases.others], self._workers

        def run_of(case: Case) -> tuple[Path | Recording, Sequence[Request], predictions.Advance]:
            tokens = self._tokens(case)
            return tokens.source, tokens.requests, advance

        def kinds_of(case: Case) -> Sequence[str]:
            return self._tokens(case).kinds

        def led(case: Case, plan: PipelinePlan) -> Prediction:
            return predictions.predict(plan, [lead], *run_of(case), kinds=kinds_of(case), workers=workers)[0]

        runs_of_cases = [_Runs([(plan, led(case, plan)) for plan in self._shortlist(case)],
                               predictions.predict_alone(case.alone, case.problem, *run_of(case), workers=workers)
                               if case.alone else [])
                         for case in cases]
        case, why = self._cases.choose(lambda case: runs_of_cases[_index_of(cases, case)].best)
        case_runs, run = runs_of_cases[_index_of(cases, case)], run_of(case)
        best_plan, first = case_runs.split or (None, None)
        report = case.report(best_plan, members)
        if best_plan and first:
            other_predictions = predictions.predict(best_plan, [name for name in self._names if name != lead], *run,
                                                    kinds=kinds_of(case), workers=workers)
            by_strategy = {p.strategy: p for p in (first, *other_predictions)}
            report.predictions = predictions.with_speedup([by_strategy[name] for name in self._names])
            if self._tokens(case).calibrates:
                report.predictions = [
                    replace(p, tokens_per_second_calibrated=q.tokens_per_second) for p, q in zip(
                        report.predictions,
                        predictions.predict(best_plan, self._names, *run, right_children=PUBLISHED_SHARE,
                                            workers=workers),
                        strict=True)]
            best = max(report.predictions, key=lambda p: p.tokens_per_second)
            if beside := self._tokens(case).beside:
                [ranged] = predictions.predict(best_plan, [best.strategy], beside.source, beside.requests, advance,
                                               kinds=beside.kinds, workers=workers)
                report.predictions[report.predictions.index(best)] = best = replace(best, by_kind=ranged.by_kind)
                report.kinds_of = beside.acceptance
            case_runs.leads = [(plan, best if plan is best_plan else p) for plan, p in case_runs.leads]
        if case.alone:
            boards = len(best_plan.stages) + 1 if best_plan else 1
            report.alone = predictions.compare(case.alone, case.problem, case_runs.alone, boards, report.predictions)
        for other, runs in zip(cases, runs_of_cases, strict=True):
            report.alternatives += [other.alternative(plan, p.strategy, p.tokens_per_second)
                                    for plan, p in runs.leads]
            if runs.alone:
                fastest = max(runs.alone, key=lambda p: p.tokens_per_second)
                report.alternatives.append(
                    other.alternative_alone(fastest.strategy, fastest.tokens_per_second))
        report.label = (f"virtual time, {report.context} tokens of context, acceptance of "
                        f"{self._tokens(case).acceptance}"
                        + (", int4 by memory bandwidth alone" if report.by_bandwidth else ""))
        report = _recommended(report, case, why, case_runs.alone)
        report.first_tokens = case.first_tokens(None if report.alone_rows else best_plan)
        return report


def _index_of(cases: Sequence[Case], case_to_find: Case) -> int:
    return next(i for i, case in enumerate(cases) if case is case_to_find)


def unpredicted(cases: Cases, members: Sequence[BoardSpec]) -> PlanReport:
    """Report the split that the rate alone chooses."""
    case, why = cases.choose(lambda case: case.expected, predicted=False)
    report = case.report(case.plans[0] if case.plans else None, members)
    for other in (case, *(other for other in (cases.main, *cases.others) if other is not case)):
        plans = other.shortlist() if other is case else other.plans[:1]
        report.alternatives += [other.alternative(plan) for plan in plans]
    report.alternatives += [other.alternative_alone() for other in (cases.main, *cases.others) if other.alone]
    return _recommended(report, case, why, [])


def _recommended(report: PlanReport, case: Case, why: str, alone: Sequence[Prediction]) -> PlanReport:
    """Return ``report`` with what to run: its split, or one board that is at least as fast for a single request."""
    by_itself = report.plan is None or (
        report.alone is not None and bool(report.alone.enough) and report.at_once == 1)
    if by_itself:
        assert case.alone
        names: tuple[str, ...] = (case.alone.name,)
        best = max(alone, key=lambda p: p.tokens_per_second, default=None)
        report.alone_rows = alone_rows(case.alone, [b for b in case.boards if b is not case.alone],
                                       case.problem, case.scaled)
        rate = f"{rate_text(best.tokens_per_second)} tokens/s by itself" if best else "everything by itself"
        unused_boards = [(b.name, f"{names[0]} makes {rate}, and with others no more" if best and report.plan
                          else "no pipeline over these boards fits") for b in case.boards if b is not case.alone]
    else:
        assert report.plan
        names = (report.plan.d0.name, *(stage.board.name for stage in report.plan.stages))
        best = max(report.predictions, key=lambda p: p.tokens_per_second, default=None)
        unused_boards = [(board.name, reason) for board, reason in report.plan.unused_boards]
    report.recommended = Recommendation(names, report.size.dtype, why, tuple(unused_boards), best)
    report.mark_alternatives()
    return report

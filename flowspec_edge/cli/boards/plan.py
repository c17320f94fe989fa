"""``flowspec plan``: the role, layers and memory of each board, and the expected speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowspec_edge.cli.common.options import MOST_TOKENS
from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import DEMO, ModelDir, resolve_model

if TYPE_CHECKING:
    from flowspec_edge.cli.boards.plan_report import PlanReport
    from flowspec_edge.fleet.planning.board_spec import BoardSpec
    from flowspec_edge.fleet.planning.layer_split import Ranges
    from flowspec_edge.fleet.planning.model_size import ModelBytes
    from flowspec_edge.fleet.planning.planner import CandidateBoard, SplitProblem
    from flowspec_edge.fleet.planning.scaling import Scaling
    from flowspec_edge.runtime.request import Request

_PROMPTS, _TOKENS = 2, 48  # of a prediction, which takes seconds
_SMALL = 10**9  # bytes; predictions run smaller models themselves



def plan(
    model: Annotated[str, typer.Option(
        "--model", help="A name (see: flowspec models list), a directory with target/ and eagle2/, a "
                        "checkpoint's directory, a config.json alone, or OWNER/NAME on Hugging Face's hub.",
        metavar="NAME|DIR|HUB_ID")] = DEMO,
    devices: Annotated[list[str] | None, typer.Option(
        "--devices", help="A device profile by name or path, NAME:5 for five boards, or a cluster file; may "
                          "be given several times.", show_default=False,
        metavar="PROFILE[:N]|CLUSTER")] = None,
    context: Annotated[int, typer.Option(
        "--context", min=1, max=MOST_TOKENS, help="Tokens of prompt and answer that the caches must hold.",
        metavar="N")] = 2048,
    at_once: Annotated[int, typer.Option(
        "--at-once", min=1, max=4096, help="Concurrent requests, which share the --context tokens.",
        metavar="N")] = 1,
    dtype: Annotated[Literal["fp32", "bf16", "fp16", "int4"], typer.Option(
        "--dtype", help="Element type of the weights.")] = "fp16",
    strategies: Annotated[str | None, typer.Option(
        "--strategies", help="Strategies to predict, separated by commas.  Default: flowspec_plus, flowspec, "
                             "chunk_pp, pipedec, speculative, autoregressive.", show_default=False)] = None,
    draft: Annotated[Literal["head", "ngram"], typer.Option(
        "--draft", help="What the predictions draft with: an EAGLE head, or n-grams of the text, which need "
                        "no draft model.")] = "head",
    predict: Annotated[bool, typer.Option(
        "--predict/--no-predict", help="Predict tokens/s in virtual time.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, not tables.")] = False,
) -> None:
    """Split a model over boards: roles, layers, memory and expected speed.

    The split minimises the time of the slowest stage within the boards' memory.  Roles and layers of a
    cluster file are kept.  No weights are downloaded or loaded: sizes follow from config.json.  A time with ≥
    assumes memory bandwidth alone: the profile has no times of an int4 kernel (flowspec device profile).

    Examples:

      flowspec plan --model llama-2-7b --devices orin-nano-8gb:5
      flowspec plan --model llama-2-7b --devices orin-nano-8gb:5 --draft ngram
      flowspec plan --model llama-13b/ --dtype int4 --devices agx-orin-64gb --devices orin-nano-8gb:3
      flowspec plan --model llama-7b/config.json --devices cluster.toml --context 4096 --no-predict --json
    """
    if not devices:
        raise UsageError("give --devices: a profile (see: flowspec profiles), NAME:5 for five, "
                         "or a cluster file")

    from flowspec_edge.fleet.planning.board_spec import parse_devices

    members = parse_devices(devices)  # a wrong name is found before torch is imported
    from flowspec_edge.cli.bench.options import parse_strategies
    from flowspec_edge.cli.boards.plan_report import show
    from flowspec_edge.fleet.planning.draft_turn import device_mismatch
    from flowspec_edge.fleet.planning.estimate import STRATEGIES, check_strategies
    from flowspec_edge.fleet.planning.layer_split import problem_for
    from flowspec_edge.fleet.planning.model_size import model_bytes

    names = parse_strategies(strategies) if strategies else list(STRATEGIES)
    check_strategies(names)
    size = model_bytes(model, dtype)
    if context > size.max_positions:
        raise UsageError(f"--context {context} is more than the {size.max_positions} tokens that "
                         f"{size.name} was made for")
    given = [member.for_model(size) for member in members]
    problem = problem_for(size, context, at_once, len(given))
    report = _decide(model, problem, [board for board, _ in given],
                      {board.name: how for board, how in given}, _listed_layers(members, size))
    report.at_once = at_once
    report.other_devices = [f"{member.name}: {why}" for member in members if member.torch_device
                             and (why := device_mismatch(member.profile, member.torch_device))]
    if predict:
        _predict(report, problem, model, names, [board for board, _ in given], draft)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report)


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


def _decide(model: str, problem: SplitProblem, boards: list[CandidateBoard], scaled: dict[str, Scaling],
            layers: Ranges | None = None) -> PlanReport:
    """The best split (in the given order if all roles are given), else one board, else the error."""
    from flowspec_edge.cli.boards.plan_report import PlanReport
    from flowspec_edge.fleet.planning import planner
    from flowspec_edge.fleet.planning.estimate import SingleBoardEstimate, best_alone
    from flowspec_edge.fleet.planning.layer_split import plan_as_listed
    from flowspec_edge.fleet.planning.memory_check import memory_error
    from flowspec_edge.fleet.planning.model_size import model_bytes
    from flowspec_edge.fleet.planning.plan_table import alone_rows, plan_rows

    size, context = problem.size, problem.context
    able = best_alone(boards, problem)
    alone = SingleBoardEstimate(able.name, f"{able.name} alone holds everything") if able else None
    try:
        if len(boards) > 1:
            verify = [board for board in boards if board.role == "verify"]
            drafts = [board for board in boards if board.role == "draft"]
            made = (plan_as_listed(drafts[0], verify, problem, layers)
                    if len(drafts) == 1 and len(verify) == len(boards) - 1 else planner.plan(boards, problem))
            return PlanReport(size, context, plan_rows(made, scaled), made, alone=alone)
    except planner.DoesNotFit:
        if not able:
            raise memory_error(boards, problem, lambda dtype: model_bytes(model, dtype)) from None
    if not able:
        missing = -planner.single_board_headroom(boards[0], problem) / 1e6
        raise planner.DoesNotFit(
            f"{boards[0].name} alone lacks {missing:,.0f} MB for all of {size.name} in {size.dtype}, and a "
            "pipeline needs two boards at least: give more --devices")
    others = [board for board in boards if board is not able]
    return PlanReport(size, context, alone_rows(able, others, problem, scaled), None, alone=alone)


def _predict(report: PlanReport, problem: SplitProblem, model: str, names: Sequence[str],
             boards: Sequence[CandidateBoard], draft: Literal["head", "ngram"]) -> None:
    from flowspec_edge.cli.common.workload import progress, require_runnable
    from flowspec_edge.fleet.planning import estimate

    source, owner = _source(model)
    report.label = (f"virtual time, {report.context} tokens of context, acceptance of {owner}"
                    + (", int4 by memory bandwidth alone" if report.by_bandwidth else ""))
    report.drafter = draft
    requests = prediction_requests(source, draft)
    params, stages = requests[0].params, len(report.plan.stages) if report.plan else 1
    require_runnable(names if report.plan else estimate.ALONE, source, params, "virtual", stages)
    steps = len(requests) * ((len(names) if report.plan else 0) + len(estimate.ALONE) * bool(report.alone))
    with progress(steps, "plan") as advance:
        if report.plan:
            report.predictions = estimate.predict(report.plan, names, source.path, requests, advance)
        if report.alone:
            [board] = [b for b in boards if b.name == report.alone.board]
            own = estimate.predict_alone(board, problem, source.path, requests, advance)
            report.alone = estimate.compare(board.name, own, len(boards), report.predictions)


def _source(model: str) -> tuple[ModelDir, str]:
    """The model whose acceptance a prediction uses, and its name in the label."""
    try:
        found = resolve_model(model)
        if (found.draft("eagle2") or found.draft("eagle3")) and found.size < _SMALL:
            return found, f"{found.name} itself"
    except UsageError:
        pass  # a bare checkpoint or config.json cannot be run
    return resolve_model(DEMO), "the demonstration model"


def prediction_requests(source: ModelDir, draft: Literal["head", "ngram"]) -> list[Request]:
    """All strategies draft with the EAGLE head, whose memory the plan counts, or all by look-up."""
    from flowspec_edge.bench.run.tasks import load_prompts
    from flowspec_edge.cli.common.workload import demo_prompts, requests_for
    from flowspec_edge.model.text import Tokenizer
    from flowspec_edge.sampling.settings import Sampling
    from flowspec_edge.strategies.params import Draft, Params

    prompts = load_prompts(demo_prompts(), _PROMPTS)
    head: Draft = "eagle2" if source.draft("eagle2") else "eagle3"
    return requests_for(Tokenizer(source), source, prompts, _TOKENS, Sampling(),
                        Params(draft="ngram" if draft == "ngram" else head),
                        truncate=max(1, source.max_positions - _TOKENS))

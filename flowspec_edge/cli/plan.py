"""``flowspec plan``: which board does what, how full it gets, and how fast it would be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import DEMO, ModelDir, resolve_model

if TYPE_CHECKING:
    from flowspec_edge.cli.plan_outcome import Outcome
    from flowspec_edge.fleet.memory import ModelBytes
    from flowspec_edge.fleet.planner import Board, Problem
    from flowspec_edge.fleet.roster import Member
    from flowspec_edge.fleet.splitting import Ranges
    from flowspec_edge.runtime.request import Request

_PROMPTS, _TOKENS = 2, 48  # of a prediction: enough for a figure, and done in seconds
_SMALL = 10**9  # bytes of a model that is run itself

_EXAMPLES = """
Examples:

  flowspec plan --model llama-7b/ --devices orin-nano-8gb:5

  flowspec plan --model llama-13b/ --dtype int4 --devices agx-orin-64gb --devices orin-nano-8gb:3

  flowspec plan --model llama-7b/config.json --devices cluster.toml --context 4096 --no-predict --json
"""


def plan(
    model: Annotated[str, typer.Option(
        "--model", help="A model that comes with the package, a directory with target/ and eagle2/, a "
                        "checkpoint's directory, or a config.json alone.", metavar="DIR")] = DEMO,
    devices: Annotated[list[str] | None, typer.Option(
        "--devices", help="A device profile by name or path, NAME:5 for five of them, or a cluster file; may "
                          "be given several times.", show_default=False,
        metavar="PROFILE[:N]|CLUSTER")] = None,
    context: Annotated[int, typer.Option(
        "--context", min=1, help="Tokens of prompt and answer that the caches must hold.",
        metavar="N")] = 2048,
    at_once: Annotated[int, typer.Option(
        "--at-once", min=1, help="Requests beside one another, whose texts together have --context tokens.",
        metavar="N")] = 1,
    dtype: Annotated[Literal["fp32", "bf16", "fp16", "int4"], typer.Option(
        "--dtype", help="Element type of the weights.")] = "fp16",
    strategies: Annotated[str | None, typer.Option(
        "--strategies", help="To predict, separated by commas.  Default: flowspec_plus, flowspec, chunk_pp, "
                             "pipedec, speculative, autoregressive.", show_default=False)] = None,
    predict: Annotated[bool, typer.Option(
        "--predict/--no-predict", help="Say what tokens/s to expect, from virtual time.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, not tables.")] = False,
) -> None:
    """Split a model over boards: who drafts, who has which layers, what fits, how fast it would be.

    The split makes the slowest stage as fast as the boards' memory allows.  What a cluster file says of roles
    and layers is kept.  Nothing is downloaded or loaded: sizes follow from config.json.
    """
    if not devices:
        raise UsageError("give --devices: a profile (see: flowspec profiles), NAME:5 for five, "
                         "or a cluster file")

    from flowspec_edge.cli.bench_options import parse_strategies
    from flowspec_edge.cli.plan_outcome import show
    from flowspec_edge.fleet.draft_turn import other_device
    from flowspec_edge.fleet.estimate import STRATEGIES, check_strategies
    from flowspec_edge.fleet.memory import model_bytes
    from flowspec_edge.fleet.roster import parse_devices
    from flowspec_edge.fleet.splitting import problem_for

    names = parse_strategies(strategies) if strategies else list(STRATEGIES)
    check_strategies(names)
    members = parse_devices(devices)
    size = model_bytes(model, dtype)
    if context > size.max_positions:
        raise UsageError(f"--context {context} is more than the {size.max_positions} tokens that "
                         f"{size.name} was made for")
    given = [member.for_model(size) for member in members]
    problem = problem_for(size, context, at_once, len(given))
    outcome = _decide(model, problem, [board for board, _ in given],
                      {board.name: how for board, how in given}, _listed_layers(members, size))
    outcome.at_once = at_once
    outcome.other_devices = [f"{member.name}: {why}" for member in members if member.torch_device
                             and (why := other_device(member.profile, member.torch_device))]
    if predict:
        _predict(outcome, problem, model, names, [board for board, _ in given])
    if as_json:
        print(json.dumps(outcome.as_json(), indent=2))
    else:
        show(outcome)


plan.__doc__ = f"{cleandoc(plan.__doc__ or '')}\n{_EXAMPLES}"


def _listed_layers(members: Sequence[Member], size: ModelBytes) -> Ranges | None:
    """The stages' layers where a cluster file gives them; None where it does not."""
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


def _decide(model: str, problem: Problem, boards: list[Board], scaled: dict[str, str],
            layers: Ranges | None = None) -> Outcome:
    """The best split; where every board has its role, the best in their order, or the one with these
    ``layers``; one board where only that is possible; or the refusal."""
    from flowspec_edge.cli.plan_outcome import Outcome
    from flowspec_edge.fleet import planner
    from flowspec_edge.fleet.estimate import OneBoard, best_alone
    from flowspec_edge.fleet.layout import alone_rows, plan_rows
    from flowspec_edge.fleet.memory import model_bytes
    from flowspec_edge.fleet.refusal import refusal
    from flowspec_edge.fleet.splitting import plan_as_listed

    size, context = problem.size, problem.context
    able = best_alone(boards, problem)
    alone = OneBoard(able.name, f"{able.name} alone holds everything") if able else None
    try:
        if len(boards) > 1:
            verify = [board for board in boards if board.role == "verify"]
            drafts = [board for board in boards if board.role == "draft"]
            made = (plan_as_listed(drafts[0], verify, problem, layers)
                    if len(drafts) == 1 and len(verify) == len(boards) - 1 else planner.plan(boards, problem))
            return Outcome(size, context, plan_rows(made, scaled), made, alone=alone)
    except planner.DoesNotFit:
        if not able:
            raise refusal(boards, problem, lambda dtype: model_bytes(model, dtype)) from None
    if not able:
        missing = -planner.alone(boards[0], problem) / 1e6
        raise planner.DoesNotFit(
            f"{boards[0].name} alone lacks {missing:,.0f} MB for all of {size.name} in {size.dtype}, and a "
            "pipeline needs two boards at least: give more --devices")
    others = [board for board in boards if board is not able]
    return Outcome(size, context, alone_rows(able, others, problem, scaled), None, alone=alone)


def _predict(outcome: Outcome, problem: Problem, model: str, names: Sequence[str], boards: Sequence[Board]
             ) -> None:
    """Fill in ``predictions`` and what one board alone would do."""
    from flowspec_edge.cli.measuring import progress, require_runnable
    from flowspec_edge.fleet import estimate

    source, whose = _source(model)
    outcome.label = f"virtual time, {outcome.context} tokens of context, acceptance of {whose}"
    requests = _requests(source)
    params, stages = requests[0].params, len(outcome.plan.stages) if outcome.plan else 1
    require_runnable(names if outcome.plan else estimate.ALONE, source, params, "virtual", stages)
    steps = len(requests) * ((len(names) if outcome.plan else 0) + len(estimate.ALONE) * bool(outcome.alone))
    with progress(steps) as advance:
        if outcome.plan:
            outcome.predictions = estimate.predict(outcome.plan, names, source.path, requests, advance)
        if outcome.alone:
            [board] = [b for b in boards if b.name == outcome.alone.board]
            own = estimate.predict_alone(board, problem, source.path, requests, advance)
            outcome.alone = estimate.compare(board.name, own, len(boards), outcome.predictions)


def _source(model: str) -> tuple[ModelDir, str]:
    """The model whose tokens a prediction takes, and what to call it."""
    try:
        found = resolve_model(model)
        if (found.eagle2 or found.draft("eagle3")) and found.size < _SMALL:
            return found, f"{found.name} itself"
    except UsageError:
        pass  # a bare checkpoint or config.json: there is nothing to run
    return resolve_model(DEMO), "the demonstration model"


def _requests(source: ModelDir) -> list[Request]:
    """A few held-out prompts; everything drafts with the EAGLE head, whose memory the plan counts."""
    from flowspec_edge.bench.prompts import load_prompts
    from flowspec_edge.cli.measuring import demo_prompts, requests_for
    from flowspec_edge.sampling import Sampling
    from flowspec_edge.strategies.params import Params
    from flowspec_edge.text import Tokenizer

    prompts = load_prompts(demo_prompts(), _PROMPTS)
    return requests_for(Tokenizer(source), source, prompts, _TOKENS, Sampling(),
                        Params(draft="eagle2" if source.eagle2 else "eagle3"),
                        truncate=max(1, source.max_positions - _TOKENS))

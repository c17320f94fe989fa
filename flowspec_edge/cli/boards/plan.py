"""``flowspec plan``: the role, layers and memory of each board, and the expected speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowspec_edge.cli.common.options import MOST_TOKENS
from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, NGRAM, PlannedDraftName
from flowspec_edge.model.opened import ANSWERING, DEMO, OpenModel, require_name, resolve_model

if TYPE_CHECKING:
    from flowspec_edge.boards.planning.board_spec import BoardSpec
    from flowspec_edge.boards.planning.planned_draft import PlannedDraft
    from flowspec_edge.cli.boards.plan_cases import Case, Cases, Tokens
    from flowspec_edge.cli.boards.plan_output import PlanReport
    from flowspec_edge.d0.request import Request
    from flowspec_edge.model.draft_kind import DraftKind

_PROMPTS, _TOKENS = 2, 48  # for a prediction with a model, which takes seconds
# Texts for a prediction with a recording.  If it has at least as many kinds of texts, one text of each kind is used.
_RECORDED, _RECORDED_TOKENS = 4, 32
_SMALL = 10**9  # bytes; predictions run smaller models themselves

def plan(
    model: Annotated[str, typer.Option(
        "--model", help="A name (see: flowspec models list), a directory with target/ and eagle2/, a "
                        "checkpoint's directory, a GGUF file, a config.json alone, or OWNER/NAME on Hugging Face's "
                        "hub.",
        metavar="NAME|DIR|HUB_ID")] = DEMO,
    devices: Annotated[list[str] | None, typer.Option(
        "--devices", help="A device profile by name or path, NAME:5 for five boards, or a cluster file; may "
                          "be given several times.", show_default=False,
        metavar="PROFILE[:N]|CLUSTER")] = None,
    context: Annotated[int, typer.Option(
        "--context", min=1, max=MOST_TOKENS, help="Maximum tokens of prompt and answer, of all requests "
                                                  "together; all times are those at this length.",
        metavar="N")] = 2048,
    at_once: Annotated[int, typer.Option(
        "--at-once", min=1, max=4096, help="Concurrent requests, which share the --context tokens.",
        metavar="N")] = 1,
    dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16", "int4"], typer.Option(
        "--dtype", help="Element type of the weights; auto: fp16 if it fits and int4 would be less than 5 % "
                        "faster, else int4.")] = "auto",
    lm_head: Annotated[Literal["auto", "16bit", "int8", "int4"], typer.Option(
        "--lm-head", help="Bits of lm_head; beside int8 and int4 a draft head has 4; auto: int8 with int4, else "
                          "16bit.")] = "auto",
    kv_cache: Annotated[Literal["auto", "16bit", "int8"], typer.Option(
        "--kv-cache", help="How stages keep keys and values; auto: 16bit, or int8 where only that "
                           "fits.")] = "auto",
    strategies: Annotated[str | None, typer.Option(
        "--strategies", help="Strategies to predict, separated by commas.  Default: flowspec_plus, flowspec, "
                             "chunk_pp, pipedec, speculative, autoregressive.", show_default=False)] = None,
    draft: Annotated[PlannedDraftName, typer.Option(
        "--draft", help="What D0 drafts with.  head: the model's draft head, else its own MTP layer, else a "
                        "head yet to be trained; mtp: the MTP layer; ngram: n-grams of the text, which need "
                        "no draft model; auto: as head, but ngram if there is neither, or no "
                        "room.")] = "auto",
    predict: Annotated[bool, typer.Option(
        "--predict/--no-predict", help="Predict tokens/s in virtual time.")] = True,
    recording: Annotated[Path | None, typer.Option(
        "--recording", help="Whose acceptance predictions assume: what a model and its head said (flowspec record).  "
                            "Default: the demonstration's, and the range over smollm2-135m's.",
        metavar="FILE", show_default=False)] = None,
    heads: Annotated[bool, typer.Option(
        "--heads/--no-heads", help="List what each kind of draft head would take on D0, in 16, 8 and 4 "
                                   "bits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, not tables.")] = False,
) -> None:
    """Split a model over boards: roles, layers, memory and expected speed.

    The first lines say what to run, on which of the boards, how fast that is predicted to be, and the next
    command; the tables below say why.

    Three speeds are given: with the acceptance of the demonstration model's head, on program text; with that
    head made as fallible as the FlowSpec paper's (bench run --acceptance paper); and the range over six kinds of
    chats with SmolLM2-135M-Instruct and its head, which is right less often than published ones.  --recording
    takes another model's texts in place of all three.

    Subsets of the boards, their order and their layers are searched for the most tokens/s within their
    memory; the alternatives are listed, one board and the other element type among them.  Boards of a cluster
    file without a profile are estimated, and the plan says so.  Roles and layers of a cluster file are kept.
    No weights are downloaded or loaded: sizes follow from config.json.  A time with a range in brackets rests
    on the memory bandwidth that other engines reach: the profile has no times of an int4 kernel (flowspec
    device profile).

    Examples:

      flowspec plan --model llama-2-7b --devices orin-nano-8gb:5
      flowspec plan --model llama-2-7b --devices orin-nano-8gb:5 --draft ngram
      flowspec plan --model qwen3-8b --devices orin-nano-8gb:5 --dtype int4 --heads --no-predict
      flowspec plan --model llama-2-7b --dtype fp16 --devices agx-orin-64gb --devices orin-nano-8gb:4
      flowspec plan --model llama-13b/ --dtype int4 --devices agx-orin-64gb --devices orin-nano-8gb:3
      flowspec plan --model llama-7b/config.json --devices cluster.toml --context 4096 --no-predict --json
    """
    if not devices:
        raise UsageError("give --devices: a profile (see: flowspec profiles), NAME:5 for five, "
                         "or a cluster file")

    from flowspec_edge.boards.planning.board_spec import parse_devices

    members = parse_devices(devices)  # wrong names are found before torch is imported
    require_name(model)
    from flowspec_edge.cli.bench.options import parse_strategies
    from flowspec_edge.cli.boards.next_commands import next_commands
    from flowspec_edge.cli.boards.plan_cases import choose_dtype, unpredicted
    from flowspec_edge.cli.boards.plan_output import show
    from flowspec_edge.lab.predictions import STRATEGIES
    from flowspec_edge.strategies.registry import require_pipelines

    names = parse_strategies(strategies) if strategies else list(STRATEGIES)
    require_pipelines(names)
    cases = choose_dtype(model, dtype, members, context, at_once, draft,
                         None if lm_head == "auto" else lm_head,
                         None if kv_cache == "auto" else kv_cache)
    report = (_predicted(cases, members, model, names, recording) if predict else
              unpredicted(cases, members))
    report.next = next_commands(report, model, devices)
    if heads and report.plan:
        from flowspec_edge.boards.planning.draft_heads import head_costs

        report.heads = head_costs(model, report.plan.d0.profile)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report)


def _predicted(cases: Cases, members: Sequence[BoardSpec], model: str, names: Sequence[str], recorded: Path | None
               ) -> PlanReport:
    from flowspec_edge.cli.boards.plan_cases import Runs, Tokens
    from flowspec_edge.cli.common.workload import progress, require_runnable
    from flowspec_edge.lab import predictions

    tokens_by_kind: dict[DraftKind, Tokens] = {}

    def tokens(case: Case) -> Tokens:
        planned = case.problem.size.planned
        if planned.kind not in tokens_by_kind:
            source = None if recorded else _own_model(model, planned)
            if source is None:
                tokens_by_kind[planned.kind] = (_tokens_of(recorded, planned.by_ngrams) if recorded else
                                                usual_tokens(planned.by_ngrams))
                return tokens_by_kind[planned.kind]
            requests = prediction_requests(source, planned.kind.name)
            stages = max((len(plan.stages) for plan in case.plans), default=1)
            require_runnable(names if case.plans else predictions.ALONE, source, requests[0].params, "virtual",
                             stages)
            demo = source.name == DEMO
            # The share is the demonstration model's, and look-ups have no head.
            source_name = "the demonstration model" if demo else f"{source.name} itself"
            tokens_by_kind[planned.kind] = Tokens(source.path, source_name, requests, demo and not planned.by_ngrams)
        return tokens_by_kind[planned.kind]

    runs = Runs(cases, names, tokens)
    steps = runs.steps * len(tokens(cases.main).requests)
    with runs.in_processes(), progress(steps, "plan") as advance:
        return runs(members, advance)


def _own_model(model: str, planned: PlannedDraft) -> OpenModel | None:
    """Return the model itself, if it is here with what is planned to draft, and small.

    A prediction then uses its own acceptance.
    """
    try:
        open_model = resolve_model(model)
        if (planned.by_ngrams or planned.origin == "here") and open_model.size < _SMALL:
            return open_model
    except UsageError:
        pass  # a bare checkpoint or config.json cannot be run
    return None


def usual_tokens(by_ngrams: bool) -> Tokens:
    """Return the demonstration's texts, and beside them chats of several kinds."""
    from flowspec_edge.cli.common.workload import shipped_recording

    chats = _tokens_of(shipped_recording(ANSWERING), by_ngrams)
    drafts = "n-grams" if by_ngrams else "its head"
    beside = replace(chats, acceptance=f"chats of {ANSWERING} with {drafts}")
    return replace(_tokens_of(shipped_recording(DEMO), by_ngrams), acceptance="the demonstration model",
                   calibrates=not by_ngrams, kinds=(), beside=beside)


def _tokens_of(path: Path, by_ngrams: bool) -> Tokens:
    """Return the tokens of some of a recording's texts at temperature 0.

    These are the first text of each kind.  If the recording has few kinds, they are its first texts.
    """
    from flowspec_edge.cli.boards.plan_cases import Tokens
    from flowspec_edge.drivers.virtual.recorded import request_of
    from flowspec_edge.drivers.virtual.recording import load_recording
    from flowspec_edge.strategies.params import Params

    recording = load_recording(path)
    greedy = recording.at(0.0)
    texts = [next(text for text in greedy if text.task == task) for task in dict.fromkeys(text.task for text in greedy)]
    kinds = [text.task for text in texts] if len(texts) >= _RECORDED else []
    texts = texts if kinds else greedy[:_RECORDED]
    params = Params(draft=NGRAM.name if by_ngrams else recording.draft)
    requests = [request_of(text, recording, _RECORDED_TOKENS, params=params) for text in texts]
    return Tokens(recording, f"{recording.model} with its {DRAFT_KINDS[recording.draft].title}, recorded"
                             f"{': ' * bool(kinds)}{', '.join(kinds)}", requests, False, kinds)


def prediction_requests(source: OpenModel, kind: str) -> list[Request]:
    """Return the demonstration's prompts as requests.

    All strategies draft with ``source``'s draft model of ``kind``, or all by look-up.
    """
    from flowspec_edge.cli.common.workload import demo_prompts, requests_for
    from flowspec_edge.lab.bench.tasks import load_prompts
    from flowspec_edge.model.text import Tokenizer
    from flowspec_edge.sampling.settings import Sampling
    from flowspec_edge.strategies.params import Params

    prompts = load_prompts(demo_prompts(), _PROMPTS)
    return requests_for(Tokenizer(source), source, prompts, _TOKENS, Sampling(),
                        Params(draft=kind),
                        truncate=max(1, source.max_positions - _TOKENS))

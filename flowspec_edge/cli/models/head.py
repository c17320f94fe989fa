"""``flowspec models head``: what a model can be drafted with, and what training a head for it would cost."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flowspec_edge.cli.common.options import MOST_REPEATS, MOST_STAGES
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, EAGLE2, LM, NGRAM, head_kinds, trained_kinds
from flowspec_edge.model.opened import OpenModel, is_here, require_name, resolve_model

if TYPE_CHECKING:
    from flowspec_edge.lab.training.cost import TrainingCost
    from flowspec_edge.model.catalogue import KnownModel, PublishedHead

if TYPE_CHECKING:
    _Trained = str
else:  # the kinds whose training can be estimated: heads that are unrolled
    _Trained = Literal[tuple(kind.name for kind in trained_kinds() if not kind.is_block)]
_MEGA, _GIGA = 1e6, 1e9


@dataclass(frozen=True)
class DraftChoice:
    """A way to draft.

    way       names it for programs
    ready     whether all that it needs is on this machine
    commands  in their order
    """

    way: str
    ready: bool
    text: str
    commands: list[str]


def head(
    model: Annotated[str, typer.Argument(
        help="A name of flowspec models list, a checkpoint's directory, or OWNER/NAME on Hugging Face's hub.",
        metavar="MODEL")],
    kind: Annotated[_Trained, typer.Option("--kind", help="The head to train.")] = EAGLE2.name,
    steps: Annotated[int | None, typer.Option(
        "--steps", min=1, max=MOST_REPEATS, metavar="N",
        help="Training steps of 4096 tokens.  Default: those of train-head, 900.")] = None,
    stages: Annotated[int, typer.Option(
        "--stages", min=1, max=MOST_STAGES, help="Number of stages in the printed commands.")] = 4,
    measure: Annotated[bool, typer.Option(
        "--measure/--no-measure", help="Time a training step here, to estimate the hours.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Say what to draft with for a model: n-grams, a published head, a small model, or a head of your own.

    The ways are in the order in which to try them, each with its commands.  The hours of a training are
    estimated from one step with random weights that is timed on this machine, up to a minute; a step that
    does not fit is scaled from a smaller one, and the text says so.

    Examples:

      flowspec models head llama-2-7b
      flowspec models head ./my-llama --kind eagle3 --steps 5000
      flowspec models head qwen3-8b --no-measure --json
    """
    require_name(model)  # a wrong name is found before torch is imported
    from flowspec_edge.boards.planning.model_size import model_bytes
    from flowspec_edge.model.catalogue import find_known_model

    size = model_bytes(model, "fp16")  # an error for a model that stages cannot run
    entry = find_known_model(model)
    name = entry[0] if entry else model
    local_model = resolve_model(name) if is_here(name) else None
    catalogue_entry = entry[1] if entry else None
    choices = [_ngram(name, catalogue_entry, local_model), _published(name, catalogue_entry, local_model, stages),
               _small(name, catalogue_entry, local_model, stages)]
    if not as_json:  # before a training step is timed, which may take minutes
        presence = "on this machine" if local_model else "not on this machine"
        print(f"{name}: {size.layers} layers of width {size.hidden_width}, {presence}")
        for number, choice in enumerate(choices, start=1):
            _print_choice(number, choice)
        if measure:
            sys.stdout.flush()
            print("flowspec: timing a training step here, for the hours of choice 4; --no-measure leaves it out",
                  file=sys.stderr)
    cost = _cost(name, kind, steps) if measure else None
    choices.append(_training(name, kind, steps, stages, catalogue_entry, local_model, cost))
    if as_json:
        print(json.dumps({"model": name, "here": local_model is not None, "layers": size.layers,
                          "hidden_width": size.hidden_width, "choices": [asdict(choice) for choice in choices],
                          "training": _figures(cost) if cost else None}, indent=2))
        return
    _print_choice(len(choices), choices[-1])
    print('\nOn boards: model = "DIR" in cluster.toml, with the directory that models shard makes; then: '
          "flowspec deploy up, which resumes, too.")


def _print_choice(number: int, choice: DraftChoice) -> None:
    print(f"\n{number}. {choice.text}")
    for command in choice.commands:
        print(f"     {command}")


def _ngram(name: str, entry: KnownModel | None, local_model: OpenModel | None) -> DraftChoice:
    fetch = [] if local_model or not entry else [f"flowspec models fetch {name} --head none"]
    return DraftChoice(NGRAM.name, local_model is not None, (
        "At once: n-grams, looked up in the prompt and the answer.  No draft model, the same tokens; it "
        "gains where an answer repeats its context (code, summaries, extraction).  On boards: "
        f'draft = "{NGRAM.name}" in cluster.toml.'),
        [*fetch, f'flowspec generate --model {name} --draft {NGRAM.name} "…"'])


def _published(name: str, entry: KnownModel | None, local_model: OpenModel | None, stages: int) -> DraftChoice:
    head_names = [kind.name for kind in head_kinds() if local_model and local_model.draft(kind.name)]
    shard = f"flowspec models shard --model {name} --stages {stages} --out {_short(name)}-{stages}"
    layer = next((kind for kind in local_model.drafts if kind.in_target), None) if local_model else None
    if not head_names and layer:
        return DraftChoice("head", True, f"The model's {layer.title} is here.", [_generate(name, layer), shard])
    if head_names:
        return DraftChoice("head", True, f"A head is here: {', '.join(head_names)}.",
                           [f'flowspec generate --model {name} "…"', shard])
    if entry is None or not entry.heads:
        return DraftChoice("head", False, (
            "A published head: the catalogue knows none for this model.  With one from elsewhere, in the "
            "format of EAGLE-1, 2 or 3, DFlash, DFlash2, DSpark or JetSpec:"), [f"{shard} --draft HEAD-DIR"])
    kinds = [DRAFT_KINDS[kind] for kind in entry.heads]
    if all(kind.in_target for kind in kinds):
        [kind], [comes] = kinds, entry.runnable
        text = f"The model's {kind.title} comes with it ({kind.name}{_facts(comes)})."
        return DraftChoice("head", False, text, [f"flowspec models fetch {name}", _generate(name, kind), shard])
    heads = [f"{head.repository} ({head.kind or head.format + ', cannot be run'}{_facts(head)})"
             for head in (*entry.runnable, *(head for head in entry.published if head.kind is None))]
    others = [f"flowspec models fetch {name} --head {head.repository}" for head in entry.runnable
              if head.repository not in entry.heads.values()]
    text = "\n   - ".join(("A published head (figures: tokens a verification, as published):", *heads))
    return DraftChoice("head", False, text, [f"flowspec models fetch {name}", *others[:1],
                                             f'flowspec generate --model {name} "…"', shard])


def _generate(name: str, kind: DraftKind) -> str:
    return f'flowspec generate --model {name} --draft {kind.name} "…"'


def _facts(head: PublishedHead) -> str:
    facts = f"; licence {head.licence}" if head.licence else ""
    return f"{facts}; {head.acceptance}: {head.source}" if head.acceptance else facts


def _small(name: str, entry: KnownModel | None, local_model: OpenModel | None, stages: int) -> DraftChoice:
    use = [f'flowspec generate --model {name} --strategy {strategy} --draft {LM.name} "…"'
           for strategy in ("pipedec", "pearl")]
    if local_model and local_model.draft(LM.name):
        return DraftChoice("small model", True, "A small model with the same tokenizer is here.", use)
    if entry and entry.small:
        return DraftChoice("small model", False, (
            f"A small model with the same tokenizer, {entry.small}: for PipeDec, PEARL and others."),
            [f"flowspec models fetch {name} --head {LM.name}", *use])
    return DraftChoice("small model", False, (
        "A small model with the same tokenizer, for PipeDec, PEARL and others: the smallest of the model's "
        "family, as a checkpoint's directory."),
        [f"flowspec models shard --model {name} --draft SMALL-DIR --stages {stages} "
         f"--out {_short(name)}-{stages}"])


def _training(name: str, kind: str, steps: int | None, stages: int, entry: KnownModel | None,
              local_model: OpenModel | None, cost: TrainingCost | None) -> DraftChoice:
    out = f"{_short(name)}-{kind}"
    if local_model is None and entry is None:  # train-head reads a directory
        fetch, model_argument = [f"hf download {name} --local-dir {_short(name)}"], _short(name)
    else:
        fetch, model_argument = ([] if local_model else [f"flowspec models fetch {name} --head none"]), name
    count = f" --steps {steps}" if steps else ""
    train = (f"flowspec models train-head --model {model_argument} --kind {kind} --data chats.jsonl{count} "
             f"--out {out} --work {out}-work")
    text = ("A head of your own, from text as the model writes it in its later use (chats.jsonl: a line has "
            '"prompt" and "answer").  After an interruption the same command resumes; a checkpoint is '
            "written every two minutes.")
    if cost:
        text += f"\n   {_cost_text(cost)}"
    shard = (f"flowspec models shard --model {model_argument} --draft {out} --stages {stages} "
             f"--out {_short(name)}-{stages}")
    return DraftChoice("train", False, text, [*fetch, train, shard])


def _cost_text(cost: TrainingCost) -> str:
    per_million = 1e6 / cost.recipe.tokens_per_step * cost.step_s / 3600
    basis = ("timed" if cost.exact else
             f"scaled by counted operations from {cost.timed}, which took {_seconds(cost.timed_s)}")
    needed_text, free = (f"{size / _GIGA:.1f} GB" for size in (cost.memory, cost.free))
    memory = f"It needs about {needed_text} of memory, {free} are free here"
    if not cost.fits:
        memory += ": train on a machine with more, by the same command, and copy the head"
    return (f"Estimated on {cost.device}: {_hours(cost.hours)} for {cost.recipe.steps} steps "
            f"({cost.tokens / _MEGA:.3g} million tokens), {_hours(per_million)} a million tokens; a step "
            f"takes {_seconds(cost.step_s)} ({basis}), less by up to a quarter where torch.compile works.\n"
            f"   {memory}.")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} min"
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:.1f} h"


def _figures(cost: TrainingCost) -> dict[str, Any]:
    return {"device": cost.device, "steps": cost.recipe.steps, "tokens": cost.tokens,
            "hours": round(cost.hours, 4), "step_s": round(cost.step_s, 6), "timed": cost.timed,
            "timed_s": round(cost.timed_s, 6), "scaled": not cost.exact,
            "memory_bytes": cost.memory, "free_bytes": cost.free, "fits": cost.fits}


def _cost(name: str, kind: str, steps: int | None) -> TrainingCost:
    from flowspec_edge.boards.measurement.memory import device_memory, read_gpu
    from flowspec_edge.boards.planning.read_parts import target_config
    from flowspec_edge.boards.probe.board import read_board
    from flowspec_edge.lab.training.cost import training_cost
    from flowspec_edge.lab.training.loop import device
    from flowspec_edge.lab.training.train_head import HeadOptions, recipe_for

    free = device_memory(read_board(), read_gpu(str(device()))).usable_mb
    recipe = recipe_for(kind, HeadOptions(steps=steps))
    return training_cost(target_config(name), kind, recipe, int(free * 1e6))


def _short(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].removesuffix(".gguf")

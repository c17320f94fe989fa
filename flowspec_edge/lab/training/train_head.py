"""``flowspec models train-head``: an EAGLE head for an existing model, from text to card."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from flowspec_edge.errors import UsageError
from flowspec_edge.lab.training.block import rarest_token
from flowspec_edge.lab.training.data_files import data_files
from flowspec_edge.lab.training.eagle import draft_vocabulary
from flowspec_edge.lab.training.heads import DEPTHS, LENGTH, HeadRecipe, HeadTrainer, agreement, train_head, trainer_of
from flowspec_edge.lab.training.loop import QUICK, LoopOptions
from flowspec_edge.lab.training.python_source import QUICK_CHARACTERS, prepare_for
from flowspec_edge.lab.training.target import (
    check_target,
    check_tokens,
    fingerprint,
    load_fast_tokenizer,
    load_target,
    load_tokenizer,
)
from flowspec_edge.lab.training.text_files import (
    TrainingText,
    bind,
    claim,
    digest,
    make_part,
    prepare_files,
    require_user_directory,
)
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, trained_kinds
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.weights.checkpoint import digest as tensors_digest
from flowspec_edge.util.tomlfile import toml_table

_SEED = 0
_QUICK: dict[str, Any] = {"steps": 60, "window": 64, "tokens_per_step": 256, "micro_batch": 128, "chains": 16}


@dataclass(frozen=True)
class HeadOptions:
    """Changes to the recipe of a kind of head.

    data         files and directories; empty: installed Python source
    draft_vocab  number of tokens that an EAGLE-3 head drafts
    start        directory of an EAGLE-2 head to continue from
    """

    data: tuple[Path, ...] = ()
    steps: int | None = None
    draft_vocab: int | None = None
    quick: bool = False
    depth: int | None = None
    start: Path | None = None


def train_head_part(model: OpenModel, kind: str, options: HeadOptions, date: str, out: Path | None = None,
                    work: Path | None = None) -> None:
    """Train a head for ``model``, unless ``out`` (default MODEL/KIND, required for a checkpoint) exists.

    Resumes from checkpoints in ``work`` (default OUT-work).  UsageError for an unsuitable model, data
    or option, or if ``work`` belongs to another model, recipe (with its start head) or data; FlowspecError
    for another target's start head.
    """
    console = Console(soft_wrap=True)
    eos, trainer = check_target(model), trainer_of(kind)
    out = out or _head_directory(model, kind)
    drafted = _drafted(model, kind, options.draft_vocab)
    recipe = recipe_for(kind, options)
    start = _start(model, kind, options.start, out)
    files = data_files(options.data)
    work = claim(console, out, work)
    if work is None:
        return
    bound, others = work / f"{kind}.json", "another model, recipe or data"
    settings = {"recipe": asdict(recipe), "draft_vocabulary": drafted, "target": fingerprint(model),
                "data": digest(files) if files else "python"}
    seed = _SEED
    if start:
        begins = tensors_digest({n: w for n, w in start.state_dict().items() if "embed" not in n})
        settings["start"] = begins
        seed = int(begins[:8], 16)  # so that the text has another order than in the previous training
    if bound.exists():
        bind(bound, settings, others)
    text = _text(model, eos, work, files, recipe, options.quick)  # unusable text must not bind ``work``
    bind(bound, settings, others)

    def part(directory: Path) -> None:
        target = load_target(model)
        torch.manual_seed(_SEED)
        vocabulary = target.config.vocab_size
        student = trainer.new(target, recipe, _Tokens(text.train, vocabulary), drafted or vocabulary, start)
        loop = QUICK if options.quick else LoopOptions()
        train_head(recipe, student, text.train, text.held_out, work, seed, loop, untrained=start is None)
        trainer.save(student.head, directory)
        console.print("measuring on held-out text")
        facts = _facts(directory, kind, target, recipe, text, date, windows=8 if options.quick else 48)
        if options.start:
            facts["goes_on_from"] = options.start.resolve().name
        (directory / "card.toml").write_text(toml_table(facts), encoding="utf-8")
        _print(console, facts)

    make_part(console, out, part)
    for line in _next(model, kind, out):
        console.print(line, markup=False)


def _next(model: OpenModel, kind: str, out: Path) -> list[str]:
    """Return how to draft with the finished head."""
    home, name = model.path / DRAFT_KINDS[kind].directory, shlex.quote(str(model.display_path))
    if out.resolve() == home.resolve():
        return [f'Next: flowspec generate --model {name} "…"']
    shards = shlex.quote(f"{model.name}-shards")
    lines = [f"Next: flowspec models shard --model {name} --draft {shlex.quote(str(out))} --stages 4 --out {shards}"]
    if model.target != model.path:  # flowspec's own layout, which has a place for a head
        lines.append(f"or, to draft with it in {name}: ln -sfn {shlex.quote(str(out.resolve()))} "
                     f"{shlex.quote(str(home))}")
    return lines


def _head_directory(model: OpenModel, kind: str) -> Path:
    if model.target == model.path:
        raise UsageError(f"{model.display_path} is a plain checkpoint, which has no place for a head: say where it "
                         "goes with --out DIR, and bring it to the boards with models shard --draft DIR")
    require_user_directory(model.path)
    return model.path / DRAFT_KINDS[kind].directory


def recipe_for(kind: str, options: HeadOptions) -> HeadRecipe:
    """Raise UsageError for a depth beyond the recipe's window."""
    recipe = replace(trainer_of(kind).recipe, **(_QUICK if options.quick else {}))
    depth = recipe.depth if options.depth is None else options.depth
    if not 1 <= depth <= recipe.window:
        raise UsageError(f"--depth must be 1 to {recipe.window}, the tokens of a window, not {depth}")
    recipe = replace(recipe, steps=options.steps or recipe.steps, depth=depth)
    if DRAFT_KINDS[kind].is_block:  # a window has the same number of slots, however long its blocks are
        recipe = replace(recipe, chains=max(1, recipe.window // depth))
    if options.start:  # a trained head: unroll from the first step, decay early
        recipe = replace(recipe, plain=0.0, decay_from=0.2)
    return recipe


def _start(model: OpenModel, kind: str, directory: Path | None, out: Path) -> Any:
    if directory is None:
        return None
    load = trainer_of(kind).load
    if load is None:
        raise UsageError(f"--start is for {_having(lambda trainer: trainer.load)}: an {kind} head is trained from "
                         "nothing")
    if directory.resolve() == out.resolve():
        raise UsageError(f"{directory} is where the new head would go: say where else with --out DIR")
    config = model.parsed_config
    zero_embedding = torch.zeros(1).expand(config.vocab_size, config.hidden_size)
    head = load(directory, zero_embedding)
    head.embed_tokens.weight = nn.Parameter(zero_embedding, requires_grad=False)
    return head


def _drafted(model: OpenModel, kind: str, requested: int | None) -> int | None:
    vocabulary, most = int(model.config["vocab_size"]), trainer_of(kind).drafts
    if not most:
        if requested is not None:
            raise UsageError(f"--draft-vocab is for {_having(lambda trainer: trainer.drafts)}: {kind} drafts the "
                             "target's whole vocabulary")
        return None
    if requested is not None and not 1 <= requested <= vocabulary:
        raise UsageError(f"--draft-vocab must be 1 to {vocabulary}, the target's vocabulary, not {requested}")
    return requested or min(vocabulary, most)


def _having(feature: Callable[[HeadTrainer], object]) -> str:
    """List the kinds whose trainers have ``feature``."""
    return " and ".join(kind.name for kind in trained_kinds() if feature(trainer_of(kind.name)))


@dataclass(frozen=True)
class _Tokens:
    """The training text's tokens, of a target's ``vocabulary``."""

    text: Tensor
    vocabulary: int

    def most_frequent(self, size: int) -> Tensor:
        return draft_vocabulary(self.text, self.vocabulary, size)

    def rarest(self) -> int:
        return rarest_token(self.text, self.vocabulary)


def _text(model: OpenModel, eos: int, work: Path, files: Sequence[Path], recipe: HeadRecipe, quick: bool
          ) -> TrainingText:
    if files:
        text = prepare_files(work, files, load_tokenizer(model), eos, recipe.window + 1, LENGTH + 1)
    else:
        limit = QUICK_CHARACTERS if quick else None
        corpus = prepare_for(work, load_fast_tokenizer(model), eos, _SEED, limit)
        text = TrainingText(*corpus.tensors(), corpus.sources())
    check_tokens(model, text.train, text.held_out)
    return text


def _facts(directory: Path, kind: str, target: Any, recipe: HeadRecipe, text: TrainingText, date: str,
           windows: int) -> dict[str, Any]:
    student = trainer_of(kind).stored(directory, target)
    head = student.head
    head_kind = "a block drafter" if DRAFT_KINDS[kind].is_block else "an EAGLE head"
    facts: dict[str, Any] = {
        "summary": f"{head_kind} for one target, trained by flowspec",
        "kind": kind,
        "date": date,
        "parameters": sum(p.numel() for name, p in head.named_parameters() if "embed_tokens" not in name),
        "bytes": sum(file.stat().st_size for file in directory.iterdir()),
        "steps": recipe.steps,
        "depth": recipe.depth,
        "training_tokens": recipe.steps * recipe.tokens_per_step,
        "training_text": text.described,
    }
    if trainer_of(kind).drafts:
        ids = student.head.target_ids()
        share = torch.isin(text.held_out.to(ids.device), ids).float().mean().item()
        facts |= {"draft_vocabulary": len(ids), "held_out_tokens_in_it": round(share, 4)}
    for text_kind, greedy in (("greedy", True), ("text", False)):
        shares = agreement(student, text.held_out, greedy, windows)
        facts[f"agreement_{text_kind}"] = [round(share, 4) for share in shares]
    return facts


def _print(console: Console, facts: dict[str, Any]) -> None:
    console.print("how often the head's best token is the target's, by depth (answers are the target's own text)")
    console.print(f"  {'depth':30}" + "".join(f"{depth:>7}" for depth in range(1, DEPTHS + 1)))
    for key, description in (("greedy", "along the target's own text"), ("text", "along the held-out text")):
        console.print(f"  {description:30}" + "".join(f"{share:7.3f}" for share in facts[f"agreement_{key}"]))

"""``flowspec models train-spd``: a speculation module for a model that is there already.

Knows which text it is trained on, what is measured, and how the part is described.  Does not know
how the module is trained (``training.spd``).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers.utils import logging

from flowspec_edge.drafting.spd_checkpoint import load_module, save_module
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.training.corpus import TokenizedCorpus, prepare_for
from flowspec_edge.training.parts import bind, claim_part, make_directory, make_part
from flowspec_edge.training.recipes import DEMO, QUICK, SPD, SPD_QUICK
from flowspec_edge.training.spd import STAGES, SpdRecipe, agreement, train_module
from flowspec_edge.training.targets import check_target, fingerprint, load_fast_tokenizer, load_target

_SEED = 0


def train_spd(model: ModelDir, out: Path | None = None, work: Path | None = None, quick: bool = False
              ) -> None:
    """Train a module for ``model``, unless it is there.

    out    where the module goes; MODEL/spd by default
    work   checkpoints and the tokenized text; MODEL.spd-work beside the model by default.  Resumes
           what it finds there
    quick  a few steps, to try it

    Raises UsageError when stages cannot run the model, or ``work`` belongs to another model or recipe.
    """
    recipe, around = (SPD_QUICK, QUICK) if quick else (SPD, DEMO)
    console = Console(soft_wrap=True)
    logging.disable_progress_bar()  # transformers' own, for files that are read in no time
    out = out or model.path / "spd"
    work = work or model.path.with_name(model.name + ".spd-work")
    eos = check_target(model)
    if out.is_dir():
        console.print(f"{out} is there already; delete it to have it made again")
        return
    claim_part(out)
    _claim(work, recipe, model)
    corpus = prepare_for(work, load_fast_tokenizer(model), eos, _SEED, around.corpus_limit)
    text, held_out = corpus.tensors()

    def part(directory: Path) -> None:
        target = load_target(model)
        module = train_module(recipe, target, text, held_out, work, _SEED, around.pace)
        save_module(module, directory, torch.float16)
        console.print("measuring on held-out text")
        (directory / "card.toml").write_text(_card(directory, recipe, target, corpus, held_out))

    make_part(console, out, part)


def _claim(work: Path, recipe: SpdRecipe, model: ModelDir) -> None:
    """Bind the work directory to the recipe and the target."""
    make_directory(work)
    bind(work / "spd.json", {"recipe": asdict(recipe), "target": fingerprint(model)},
         "another model or recipe")


def _card(directory: Path, recipe: SpdRecipe, target: Any, corpus: TokenizedCorpus, held_out: Tensor) -> str:
    """``card.toml``: what the part is and how good, measured on the weights as they are stored."""
    module = load_module(directory, torch.float32).to(target.device)
    facts: dict[str, Any] = {
        "summary": "SPD's speculation module; a demonstration, trained by flowspec; not for real use",
        "layers": recipe.layers,
        "parameters": sum(p.numel() for p in module.parameters()),
        "bytes": sum(file.stat().st_size for file in directory.iterdir()),
        "training_tokens": recipe.steps * recipe.tokens_per_step,
        "training_text": corpus.described(),
        "stages": list(STAGES),
    }
    for kind, greedy in (("greedy", True), ("text", False)):
        shares = agreement(module, target, held_out, greedy)
        facts[f"agreement_{kind}"] = [round(shares[n], 4) for n in STAGES]
    # JSON's strings, numbers and lists of them are TOML's.
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in facts.items())


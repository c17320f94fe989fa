"""``flowspec models train-demo``: from Python source on this machine to a finished model directory.

Knows the order of the parts and what is finished already.  Does not know how any part is trained.

Finished parts lie in OUT, in the layout of ``modeldir``; everything that a resumed run needs lies in
the work directory.  A part appears in OUT under its name only when it is complete.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging

from flowspec_edge.drafting.eagle_checkpoint import load_head, save_head
from flowspec_edge.errors import UsageError
from flowspec_edge.training.card import write_card
from flowspec_edge.training.corpus import TokenizedCorpus, prepare
from flowspec_edge.training.eagle import Eagle2, new_head
from flowspec_edge.training.heads import agreement, greedy_text, train_head
from flowspec_edge.training.loop import device
from flowspec_edge.training.parts import bind, make_directory, make_part
from flowspec_edge.training.recipes import DEMO, QUICK, DemoRecipe
from flowspec_edge.training.target import bits_per_byte, load_lm, save_lm, train_lm

_SAMPLE_PROMPT = "def read_lines(path"


def train_demo(out: Path, work: Path | None = None, quick: bool = False) -> None:
    """Train whatever of the demonstration model is not in ``out`` yet.

    work   checkpoints and the tokenized text; OUT.work beside OUT by default.  Resumes what it finds there.
    quick  a few steps of tiny models, to try the recipe

    Raises UsageError when ``work`` or ``out`` belongs to another recipe.
    """
    recipe = QUICK if quick else DEMO
    console = Console(soft_wrap=True)
    logging.disable_progress_bar()  # transformers' own, for files that are written in no time
    work = work or out.with_name(out.name + ".work")
    _claim(out, work, recipe)
    if all((out / name).exists() for name in ("target", "eagle2", "draft-lm", "card.toml")):
        console.print(f"{out} is complete; delete a part to have it made again")
        return
    corpus = prepare(work, recipe.vocabulary, recipe.seed, recipe.corpus_limit)

    def target_part(directory: Path) -> None:
        model = train_lm("target", recipe.target, corpus, work, recipe.seed, recipe.pace)
        save_lm(model, corpus, directory)

    def eagle_part(directory: Path) -> None:
        target = load_lm(out / "target").to(device())  # as it is shipped: rounded to float16
        torch.manual_seed(recipe.seed)
        student = Eagle2(new_head(target), target, recipe.eagle.soft_weight)
        train_head(recipe.eagle, student, *corpus.tensors(), work, recipe.seed, recipe.pace)
        save_head(student.head, directory, torch.float16)

    def draft_part(directory: Path) -> None:
        teacher = load_lm(out / "target")
        model = train_lm("draft-lm", recipe.draft_lm, corpus, work, recipe.seed, recipe.pace, teacher)
        save_lm(model, corpus, directory)

    for name, part in (("target", target_part), ("eagle2", eagle_part), ("draft-lm", draft_part)):
        make_part(console, out / name, part)
    console.print("measuring on held-out text")
    write_card(out, recipe, corpus, _figures(out, corpus))
    console.print(f"{out} is complete: {(out / 'README.md')} tells what came out")


def _claim(out: Path, work: Path, recipe: DemoRecipe) -> None:
    """Bind the directories to the recipe, so that no two recipes mix."""
    make_directory(out)
    make_directory(work)
    wanted = asdict(recipe)
    del wanted["pace"]
    bind(work / "recipe.json", wanted, "another recipe")
    card = out / "card.toml"
    if card.exists() and f'recipe = "{recipe.name}"' not in card.read_text(encoding="utf-8").splitlines():
        raise UsageError(f"{out} holds a model of another recipe; give another --out")


def _figures(out: Path, corpus: TokenizedCorpus) -> dict[str, Any]:
    """What the card tells of the finished parts."""
    target, draft = load_lm(out / "target"), load_lm(out / "draft-lm")
    head = load_head(out / "eagle2", None, torch.float32)
    student, (_, held_out) = Eagle2(head, target), corpus.tensors()
    prompt = torch.tensor([corpus.tokenizer.encode(_SAMPLE_PROMPT).ids])
    return {
        "bits_per_byte": bits_per_byte(target, corpus),
        "draft_bits_per_byte": bits_per_byte(draft, corpus),
        "agreement_greedy": agreement(student, held_out, greedy=True),
        "agreement_text": agreement(student, held_out),
        "sample": corpus.tokenizer.decode(greedy_text(target, prompt, 160)[0].tolist()),
        "parameters": {
            "target": sum(p.numel() for p in target.parameters()),
            "eagle2": sum(p.numel() for p in head.parameters()) - head.embed_tokens.weight.numel(),
            "draft-lm": sum(p.numel() for p in draft.parameters()),
        },
    }


"""Trains the demonstration model: tokenizer, target, EAGLE-2 head and draft model.

  python models/recipe/train_demo.py --out DIR [--work DIR] [--quick]

The training text is the Python source of the interpreter and of installed packages.  Takes hours on a CPU,
less on a GPU; an interrupted run resumes.  OUT gets the finished parts, in the layout of
``flowspec_edge.model.opened``; checkpoints are in the work directory.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from demo_card import write_card
from demo_lm import bits_per_byte, load_lm, save_lm, tokenized_corpus, train_lm
from demo_recipe import DEMO, QUICK, DemoRecipe
from demo_unlikelihood import train_against_loops
from rich.console import Console
from transformers.utils import logging

from flowspec_edge.drafting.eagle.eagle2 import load_head, save_head
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.lab.training.eagle import Eagle2, new_head
from flowspec_edge.lab.training.heads import agreement, greedy_text, train_head
from flowspec_edge.lab.training.loop import device
from flowspec_edge.lab.training.python_source import TokenizedCorpus
from flowspec_edge.lab.training.text_files import bind, make_part
from flowspec_edge.util.files import make_directory

_SAMPLE_PROMPT = "def read_lines(path"


def train_demo(out: Path, work: Path | None = None, quick: bool = False) -> None:
    """Train the parts that ``out`` lacks; raise UsageError if ``work`` or ``out`` belongs to another recipe."""
    recipe = QUICK if quick else DEMO
    console = Console(soft_wrap=True)
    logging.disable_progress_bar()  # transformers' own, of files that are written at once
    work = work or out.with_name(out.name + ".work")
    _bind_directories(out, work, recipe)
    if all((out / name).exists() for name in ("target", "eagle2", "draft-lm", "card.toml")):
        console.print(f"{out} is complete; delete a part to have it made again")
        return
    corpus = tokenized_corpus(work, recipe.vocabulary, recipe.seed, recipe.corpus_limit)

    def target_part(directory: Path) -> None:
        model = train_lm("target", recipe.target, corpus, work, recipe.seed, recipe.loop)
        train_against_loops(model, recipe.unlikelihood, corpus, work, recipe.seed + 1, recipe.loop)
        save_lm(model, corpus, directory)

    def eagle_part(directory: Path) -> None:
        target = load_lm(out / "target").to(device())  # as shipped: rounded to float16
        torch.manual_seed(recipe.seed)
        student = Eagle2(new_head(target), target, recipe.eagle.soft_weight)
        train_head(recipe.eagle, student, *corpus.tensors(), work, recipe.seed, recipe.loop)
        save_head(student.head, directory, torch.float16)

    def draft_part(directory: Path) -> None:
        teacher = load_lm(out / "target")
        model = train_lm("draft-lm", recipe.draft_lm, corpus, work, recipe.seed, recipe.loop, teacher)
        save_lm(model, corpus, directory)

    for name, part in (("target", target_part), ("eagle2", eagle_part), ("draft-lm", draft_part)):
        make_part(console, out / name, part)
    console.print("measuring on held-out text")
    write_card(out, recipe, corpus, _figures(out, corpus))
    console.print(f"{out} is complete; its figures are in {out / 'README.md'}")


def _bind_directories(out: Path, work: Path, recipe: DemoRecipe) -> None:
    make_directory(out)
    make_directory(work)
    expected_recipe = asdict(recipe)
    del expected_recipe["loop"]
    bind(work / "recipe.json", expected_recipe, "another recipe")
    card = out / "card.toml"
    if card.exists() and f'recipe = "{recipe.name}"' not in card.read_text(encoding="utf-8").splitlines():
        raise UsageError(f"{out} holds a model of another recipe; give another --out")


def _figures(out: Path, corpus: TokenizedCorpus) -> dict[str, Any]:
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demonstration model.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the finished model")
    parser.add_argument("--work", type=Path, help="directory of checkpoints; default: OUT.work")
    parser.add_argument("--quick", action="store_true", help="a few steps of tiny models, to try the recipe")
    args = parser.parse_args()
    try:
        train_demo(args.out, args.work, args.quick)
    except FlowspecError as error:
        print(f"train_demo: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

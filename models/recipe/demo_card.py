"""The demonstration's model card: ``README.md`` for people, ``card.toml`` for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo_lm import MAX_POSITIONS, LMRecipe
from demo_recipe import DemoRecipe

from flowspec_edge.lab.training.python_source import HELD_OUT_ONE_IN, TokenizedCorpus
from flowspec_edge.util.tomlfile import toml_table

_NAMES = {"stdlib": "Python's standard library"}
_PARTS = ("target", "eagle2", "draft-lm")


def write_card(out: Path, recipe: DemoRecipe, corpus: TokenizedCorpus, figures: dict[str, Any]) -> None:
    """Write the card of a model; ``card.toml`` comes last and marks the model as complete."""
    sizes = {part: _size(out / part) for part in _PARTS}
    (out / "README.md").write_text(_readme(recipe, corpus, figures, sizes), encoding="utf-8")
    (out / "card.toml").write_text(_toml(recipe, corpus, figures, sizes), encoding="utf-8")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _tokens(recipe: DemoRecipe) -> dict[str, int]:
    against_loops = recipe.unlikelihood
    return {"target": (recipe.target.steps * recipe.target.tokens_per_step
                       + against_loops.steps * against_loops.tokens_per_step),
            "eagle2": recipe.eagle.steps * recipe.eagle.tokens_per_step,
            "draft-lm": recipe.draft_lm.steps * recipe.draft_lm.tokens_per_step}


def _toml(recipe: DemoRecipe, corpus: TokenizedCorpus, figures: dict[str, Any], sizes: dict[str, int]) -> str:
    data = corpus.summary
    tables: dict[str, dict[str, Any]] = {
        "": {"name": recipe.name, "recipe": recipe.name, "licence": "Apache-2.0",
             "summary": "a demonstration, trained by us; not for real use",
             "vocabulary": corpus.tokenizer.get_vocab_size(), "bytes": sum(sizes.values())},
        "data": {"train_files": data["train_files"], "train_bytes": data["train_bytes"],
                 "train_tokens": len(corpus.train), "held_out_files": data["held_out_files"],
                 "held_out_bytes": data["held_out_bytes"], "held_out_tokens": len(corpus.held_out),
                 "held_out_groups": data["held_out_groups"]},
        "data.sources": {name: f"{data['licences'][name]}, {data['versions'][name]}, {size} bytes"
                         for name, size in data["train_bytes_by_source"].items()},
    }
    for part in _PARTS:
        tables[part] = {"bytes": sizes[part], "parameters": figures["parameters"][part],
                        "training_tokens": _tokens(recipe)[part]}
    tables["target"]["held_out_bits_per_byte"] = round(figures["bits_per_byte"], 4)
    tables["draft-lm"]["held_out_bits_per_byte"] = round(figures["draft_bits_per_byte"], 4)
    for kind in ("greedy", "text"):
        tables["eagle2"][f"agreement_{kind}"] = [round(a, 4) for a in figures[f"agreement_{kind}"]]
    return "\n".join((f"[{name}]\n" if name else "") + toml_table(table) for name, table in tables.items())


def _shape(recipe: LMRecipe) -> str:
    return (f"Llama, {recipe.layers} layers, width {recipe.width}, {recipe.heads} heads "
            f"({recipe.kv_heads} for keys and values), MLP {recipe.intermediate}")


def _readme(recipe: DemoRecipe, corpus: TokenizedCorpus, figures: dict[str, Any],
            sizes: dict[str, int]) -> str:
    data, tokens, parameters = corpus.summary, _tokens(recipe), figures["parameters"]
    shapes = {
        "target": f"{_shape(recipe.target)}; the last {recipe.unlikelihood.steps} steps also make loops in "
                  "its greedy text less likely (sequence-level unlikelihood, arXiv 1908.04319)",
        "eagle2": f"EAGLE-2 head: fc and one layer of the target's shape, unrolled {recipe.eagle.depth} "
                  "steps in training; a copy of the target's embedding, not counted, comes with it",
        "draft-lm": f"{_shape(recipe.draft_lm)}; trained on the target's distributions",
    }
    parts = [f"| `{part}` | {shapes[part]} | {parameters[part] / 1e6:.2f} M | {sizes[part] / 1e6:.1f} MB | "
             f"{tokens[part] / 1e6:.1f} M |" for part in _PARTS]
    sources = [f"| {_NAMES.get(name, name)} {data['versions'][name]} | {data['licences'][name]} | {size:,} |"
               for name, size in data["train_bytes_by_source"].items()]
    depths = range(1, len(figures["agreement_greedy"]) + 1)
    rows = {kind: " | ".join(f"{a:.3f}" for a in figures[f"agreement_{kind}"]) for kind in ("greedy", "text")}
    return f"""# {recipe.name}: a model to try the pipeline with

**A demonstration, trained by us; not for real use.** Its text looks like Python and \
means nothing. Its purpose is to run, measure and test every strategy on any machine.

Licence: Apache-2.0. In all {sum(sizes.values()) / 1e6:.1f} MB, float16, {corpus.tokenizer.get_vocab_size()} \
byte-level BPE tokens, texts of at most {MAX_POSITIONS} tokens.

| part | architecture | parameters | size | training tokens |
|---|---|---|---|---|
{chr(10).join(parts)}

## Data

Python source, as installed on the machine that trained it:

| source | licence | bytes of training text |
|---|---|---|
{chr(10).join(sources)}

{data['train_files']} files, {len(corpus.train) / 1e6:.1f} M tokens. Exact duplicates are dropped. One in \
{HELD_OUT_ONE_IN} groups is held out, by a hash of the group's name, where a group is a package directory \
(two levels deep) or a single module: {data['held_out_files']} files, {data['held_out_bytes']:,} bytes. The \
held-out groups are listed in `card.toml`.

## Figures, on the held-out text

- Target: **{figures['bits_per_byte']:.3f} bits per byte**, with 512 to 1024 tokens of context. Mind what \
that means: the model files of transformers copy much code from one another, across groups too, so this text \
is easier than unrelated Python would be.
- `draft-lm`: {figures['draft_bits_per_byte']:.3f} bits per byte.
- `eagle2`: how often the head's best token is the target's, with the target's features missing for the last \
depth - 1 tokens:

| depth | {' | '.join(str(d) for d in depths)} |
|---|{'---|' * len(depths)}
| along the target's own greedy text | {rows['greedy']} |
| along the held-out text | {rows['text']} |

What the target writes at temperature 0:

```
{figures['sample']}
```

Made by `python models/recipe/train_demo.py --out DIR` in the source tree.
"""

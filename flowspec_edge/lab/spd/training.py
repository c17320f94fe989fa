"""SPD's speculation module, trained on a frozen target's hidden states (SPD, appendix A).

A training row has every position once at each depth, g^n … g^1, then the newest rows g^0, the only queries;
a query sees one depth of each older position.  Training uses drafting's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig

from flowspec_edge.drafting.eagle.eagle2 import layer_heads
from flowspec_edge.lab.spd.kind import KIND
from flowspec_edge.lab.spd.module import SpdModule, load_module, save_module
from flowspec_edge.lab.training.heads import greedy_text
from flowspec_edge.lab.training.loop import (
    QUICK,
    LoopOptions,
    Optimiser,
    Run,
    backpropagate,
    compiled,
    device,
    train,
    windows,
)
from flowspec_edge.lab.training.python_source import QUICK_CHARACTERS, TokenizedCorpus, prepare_for
from flowspec_edge.lab.training.target import (
    check_target,
    fingerprint,
    layer_shape,
    load_fast_tokenizer,
    load_target,
)
from flowspec_edge.lab.training.text_files import (
    bind,
    claim,
    make_part,
    require_user_directory,
)
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.shard import split_layers
from flowspec_edge.util.tomlfile import toml_table

STAGES = (1, 2, 4, 8)  # the stage counts that agreement is measured for


@dataclass(frozen=True)
class SpdRecipe:
    """Size and schedule of one module; lengths and batches in tokens."""

    steps: int
    layers: int = 2
    window: int = 256
    tokens_per_step: int = 4096
    micro_batch: int = 2048
    stages: tuple[tuple[int, float], ...] = ((4, 0.7), (2, 0.15), (8, 0.15))  # count, share of the steps
    full: float = 0.5  # share of texts with a full pipeline (appendix A.2)
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    decay_from: float = 0.4


def depths(layers: int, stages: int) -> tuple[int, ...]:
    """Layers behind the deepest known state of a row after 1, 2, … ``stages`` stages.

    For an inner stage that ends at the last layer (all later ones are empty) it is the layer before: the
    last state is known only after the final norm, as an output.
    """
    ends = [hi for _, hi in split_layers(layers, stages, allow_empty=True)]
    return (*(min(hi, layers - 1) for hi in ends[:-1]), layers)


def visibility(rows: int, stages: int, fill: Tensor) -> Tensor:
    """Return the attention mask (appendix A.2, A.3): bool [B, 1, rows, (stages + 1) * rows].

    ``fill`` [B] is the number of trailing positions in the pipeline, 1 … stages (full).  Query t sees
    position T <= t in block k = t - T if that is less than the fill, else in block ``stages``.  The order of
    blocks is stages, …, 1, 0; in block 0 a query sees itself.
    """
    at = torch.arange(rows, device=fill.device)
    age = at[:, None] - at[None]  # [t, T]
    depth = torch.where(age < fill[:, None, None], age, stages).masked_fill(age < 0, -1)  # [B, t, T]
    blocks = torch.arange(stages, -1, -1, device=fill.device)
    visible = depth[:, :, None] == blocks[:, None]  # [B, t, block, T]
    return visible.flatten(2)[:, None]


def speculate(module: SpdModule, states: Sequence[Tensor], levels: Sequence[int], fill: Tensor) -> Tensor:
    """Return the module's outputs with every position of the texts as the newest one: [B, N, H].

    states  [B, N, H] each: H^0 … H^L of the target, the last after the final norm, in the target's dtype
    levels  the layers passed at depth 1, 2, … n, from ``depths``
    fill    [B], as for ``visibility``
    """
    batch, rows, _ = states[0].shape
    positions = torch.arange(rows, device=fill.device)[None].expand(batch, -1)
    dtype = module.lm_head.weight.dtype
    level_states = {level: states[level].to(dtype) for level in {0, *levels, *(level // 2 for level in levels)}}
    newest = module.newest(level_states[0])
    blocks = [module.feature(level_states[0], level_states[level // 2], level_states[level]) if level else newest
              for level in reversed(levels)]
    context = module.keys_values(torch.cat(blocks, dim=1), positions.repeat(1, len(levels)))
    out: Tensor = module(newest, positions, context, visibility(rows, len(levels), fill))
    return out


def new_module(target: Any, layers: int) -> SpdModule:
    """Make a module with the shape, lm_head and final norm of ``target``."""
    shape = {**layer_shape(target.config), **layer_heads(target.config)}
    config = LlamaConfig(**shape, num_hidden_layers=layers, tie_word_embeddings=False)
    config.target_layers = target.config.num_hidden_layers
    module = SpdModule(config)
    module.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    module.norm.weight.data.copy_(target.model.norm.weight)
    return module


def train_module(recipe: SpdRecipe, target: Any, text: Tensor, held_out: Tensor, work: Path, seed: int,
                 loop: LoopOptions) -> SpdModule:
    """Train a module for ``target``, a frozen causal LM of transformers; resumes from ``work/spd.pt``."""
    dev = device()
    target = target.to(dev).eval().requires_grad_(False)
    torch.manual_seed(seed)
    module = new_module(target, recipe.layers).to(dev)
    layers = module.target_layers
    counts, shares = zip(*recipe.stages, strict=True)

    def micro_loss(rows: Tensor, fill: Tensor, levels: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            out = target.model(input_ids=rows, use_cache=False, output_hidden_states=True)
            target_log_probs = target.lm_head(out.last_hidden_state).float().log_softmax(-1)
        logits = module.lm_head(speculate(module, out.hidden_states, levels, fill)).float()
        divergence = F.kl_div(logits.log_softmax(-1), target_log_probs, reduction="sum", log_target=True)
        return divergence / rows.numel()

    step_loss = compiled(micro_loss, loop.compile)

    def loss(step: int, total: int) -> float:
        rows = windows(text, recipe.window, step, recipe.tokens_per_step // recipe.window, seed)[:, :-1]
        generator = torch.Generator().manual_seed(seed + step)  # a resumed run draws the same
        stages = counts[int(torch.multinomial(torch.tensor(shares), 1, generator=generator))]
        fill = simulated_fill(len(rows), stages, recipe.full, generator)
        return backpropagate(lambda part, part_fill: step_loss(part, part_fill, depths(layers, stages)),
                             dev, recipe.micro_batch // recipe.window, rows, fill)

    def report() -> str:
        shares = agreement(module, target, held_out, limit=8)
        return "agreement " + ", ".join(f"n={n} {share:.3f}" for n, share in shares.items())

    optimiser = Optimiser(module, recipe.muon_lr, recipe.adam_lr, recipe.decay_from)
    train(Run(KIND.name, module, optimiser, recipe.steps, work / f"{KIND.name}.pt", loss, report,
              loop.checkpoint_every_s))
    return module


def simulated_fill(texts: int, stages: int, full: float, generator: torch.Generator) -> Tensor:
    """Active trailing positions of each text (appendix A.2): int64 [texts].

    ``stages`` with probability ``full``, else uniform over 1 … ``stages`` - 1.
    """
    fill = torch.full((texts,), stages)
    if stages > 1:
        partial = torch.rand(texts, generator=generator) >= full
        fill[partial] = torch.randint(1, stages, (int(partial.sum()),), generator=generator)
    return fill


@torch.no_grad()
def agreement(module: SpdModule, target: Any, held_out: Tensor, greedy: bool = False, limit: int = 48,
              prompt: int = 64, length: int = 192) -> dict[int, float]:
    """Return the share of argmaxes equal to the target's, by number of stages; windows as in ``heads.agreement``."""
    starts = np.linspace(0, len(held_out) - length - 1, limit).astype(int)
    rows = torch.stack([held_out[s : s + length] for s in starts]).long().to(target.device)
    if greedy:
        rows = greedy_text(target, rows[:, :prompt], length)
    shares = dict.fromkeys(STAGES, 0.0)
    for part in rows.split(8):  # the visibility of eight stages is large
        states = target.model(input_ids=part, use_cache=False, output_hidden_states=True).hidden_states
        best = target.lm_head(states[-1][:, prompt:]).argmax(-1)
        for stages in STAGES:
            fill = torch.full((len(part),), stages, device=part.device)
            out = speculate(module, states, depths(module.target_layers, stages), fill)
            hits = module.lm_head(out[:, prompt:]).argmax(-1) == best
            shares[stages] += hits.float().mean().item() * len(part) / len(rows)
    return shares


_SEED = 0
_QUICK_RECIPE = SpdRecipe(steps=60, window=64, tokens_per_step=256, micro_batch=128)


def train_spd(model: OpenModel, out: Path | None = None, work: Path | None = None, quick: bool = False
              ) -> None:
    """Train a module for ``model``, unless ``out`` (default MODEL/spd) exists.

    Resumes from checkpoints in ``work`` (default OUT-work).  UsageError if stages cannot run the model,
    or ``work`` belongs to another model or recipe.
    """
    recipe, loop = (_QUICK_RECIPE, QUICK) if quick else (SpdRecipe(steps=600), LoopOptions())
    console = Console(soft_wrap=True)
    if out is None:
        require_user_directory(model.path)
    out = out or model.path / KIND.directory
    eos = check_target(model)
    work = claim(console, out, work)
    if work is None:
        return
    bind(work / "spd.json", {"recipe": asdict(recipe), "target": fingerprint(model)},
         "another model or recipe")
    corpus = prepare_for(work, load_fast_tokenizer(model), eos, _SEED, QUICK_CHARACTERS if quick else None)
    text, held_out = corpus.tensors()

    def part(directory: Path) -> None:
        target = load_target(model)
        module = train_module(recipe, target, text, held_out, work, _SEED, loop)
        save_module(module, directory, torch.float16)
        console.print("measuring on held-out text")
        (directory / "card.toml").write_text(
            _card(directory, recipe, target, corpus, held_out), encoding="utf-8")

    make_part(console, out, part)


def _card(directory: Path, recipe: SpdRecipe, target: Any, corpus: TokenizedCorpus, held_out: Tensor) -> str:
    module = load_module(directory, torch.float32).to(target.device)
    facts: dict[str, Any] = {
        "summary": "SPD's speculation module; a demonstration, trained by flowspec; not for real use",
        "layers": recipe.layers,
        "parameters": sum(p.numel() for p in module.parameters()),
        "bytes": sum(file.stat().st_size for file in directory.iterdir()),
        "training_tokens": recipe.steps * recipe.tokens_per_step,
        "training_text": corpus.sources(),
        "stages": list(STAGES),
    }
    for kind, greedy in (("greedy", True), ("text", False)):
        shares = agreement(module, target, held_out, greedy)
        facts[f"agreement_{kind}"] = [round(shares[n], 4) for n in STAGES]
    return toml_table(facts)

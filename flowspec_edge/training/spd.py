"""Training SPD's speculation module on a frozen target's hidden states (SPD, appendix A).

Knows the layout of a training row: every position once at each depth, g^n … g^1, behind which the
newest rows g^0 stand as the only queries, and the staircase by which a query sees one depth of
each older position.  Training runs the very forward that drafting runs (``drafting.spd``).  Does
not know trees, strategies, or where the text comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowspec_edge.drafting.spd import SpdModule
from flowspec_edge.stage.shard import split_layers
from flowspec_edge.training.heads import greedy_text
from flowspec_edge.training.loop import Pace, Run, compiled, device, micro_batches, train, windows
from flowspec_edge.training.optim import Optimiser
from flowspec_edge.training.targets import layer_config

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
    full: float = 0.5  # the share of texts whose pipeline is full (appendix A.2)
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    decay_from: float = 0.4


def depths(layers: int, stages: int) -> tuple[int, ...]:
    """Layers behind the deepest state that is known of a row after 1, 2, … ``stages`` stages.

    An inner stage that ends at the last layer (those behind it are empty) shows the layer before:
    the last state is known only after the final norm, as an output.
    """
    passed = [hi for _, hi in split_layers(layers, stages, allow_empty=True)]
    return (*(min(hi, layers - 1) for hi in passed[:-1]), layers)


def visibility(rows: int, stages: int, fill: Tensor) -> Tensor:
    """Who sees whom (appendix A.2, A.3): bool [B, 1, rows, (stages + 1) * rows].

    ``fill`` [B] is the number of trailing positions that are still in the pipeline, 1 … stages;
    with ``stages`` it is full.  Query t sees position T in block k = t - T if that is less than
    the fill, else in block ``stages``: one block of each T <= t.  Blocks stand in the order
    stages, …, 1, 0; in block 0 a query sees itself.
    """
    at = torch.arange(rows, device=fill.device)
    age = at[:, None] - at[None]  # [t, T]
    depth = torch.where(age < fill[:, None, None], age, stages).masked_fill(age < 0, -1)  # [B, t, T]
    blocks = torch.arange(stages, -1, -1, device=fill.device)
    seen = depth[:, :, None] == blocks[:, None]  # [B, t, block, T]
    return seen.flatten(2)[:, None]


def speculate(module: SpdModule, states: Sequence[Tensor], levels: Sequence[int], fill: Tensor) -> Tensor:
    """The module's outputs for every position of texts as the newest one: [B, N, H].

    states  [B, N, H] each: H^0 … H^L of the target, the last after the final norm; in the target's type,
            which on a GPU is the one that it is stored in, while the module trains in float32
    levels  the layers passed at depth 1, 2, … n (:func:`depths`)
    fill    [B], as for :func:`visibility`
    """
    batch, rows, _ = states[0].shape
    positions = torch.arange(rows, device=fill.device)[None].expand(batch, -1)
    dtype = module.lm_head.weight.dtype
    used = {level: states[level].to(dtype) for level in {0, *levels, *(level // 2 for level in levels)}}
    newest = module.newest(used[0])
    blocks = [module.feature(used[0], used[level // 2], used[level]) if level else newest
              for level in reversed(levels)]
    context = module.keys_values(torch.cat(blocks, dim=1), positions.repeat(1, len(levels)))
    out: Tensor = module(newest, positions, context, visibility(rows, len(levels), fill))
    return out


def new_module(target: Any, layers: int) -> SpdModule:
    """An untrained module for ``target``: its shape, its lm_head and final norm to start from."""
    config = layer_config(target.config, num_hidden_layers=layers)
    config.target_layers = target.config.num_hidden_layers
    module = SpdModule(config)
    module.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    module.norm.weight.data.copy_(target.model.norm.weight)
    return module


def train_module(recipe: SpdRecipe, target: Any, text: Tensor, held_out: Tensor, work: Path, seed: int,
                 pace: Pace) -> SpdModule:
    """Train a module for ``target`` on ``text``; resumes from ``work/spd.pt``.

    target          a causal LM of transformers; frozen
    text, held_out  token ids, integer vectors
    """
    dev = device()
    target = target.to(dev).eval().requires_grad_(False)
    torch.manual_seed(seed)
    module = new_module(target, recipe.layers).to(dev)
    layers = module.target_layers
    counts, shares = zip(*recipe.stages, strict=True)

    def micro_loss(rows: Tensor, fill: Tensor, levels: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            out = target.model(input_ids=rows, use_cache=False, output_hidden_states=True)
            wanted = target.lm_head(out.last_hidden_state).float().log_softmax(-1)
        logits = module.lm_head(speculate(module, out.hidden_states, levels, fill)).float()
        divergence = F.kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True)
        return divergence / rows.numel()

    step_loss = compiled(micro_loss, pace.compile)

    def loss(step: int, total: int) -> float:
        rows = windows(text, recipe.window, step, recipe.tokens_per_step // recipe.window, seed)[:, :-1]
        generator = torch.Generator().manual_seed(seed + step)  # so that a resumed run sees the same
        stages = counts[int(torch.multinomial(torch.tensor(shares), 1, generator=generator))]
        fill = simulated_fill(len(rows), stages, recipe.full, generator)
        value = 0.0
        for share, (part, part_fill) in micro_batches(recipe.micro_batch // recipe.window, rows, fill):
            with torch.autocast(dev.type, torch.bfloat16, enabled=dev.type == "cuda"):
                part_loss = step_loss(part.to(dev), part_fill.to(dev), depths(layers, stages)) * share
            part_loss.backward()
            value += part_loss.item()
        return value

    def report() -> str:
        shares = agreement(module, target, held_out, limit=8)
        return "agreement " + ", ".join(f"n={n} {share:.3f}" for n, share in shares.items())

    optimiser = Optimiser(module, recipe.muon_lr, recipe.adam_lr, recipe.decay_from)
    train(Run("spd", module, optimiser, recipe.steps, work / "spd.pt", loss, report, pace.checkpoint_every_s))
    return module


def simulated_fill(texts: int, stages: int, full: float, generator: torch.Generator) -> Tensor:
    """Active trailing positions of each text (appendix A.2): int64 [texts], 1 … stages.

    Full with probability ``full``, else uniform over 1 … stages - 1.
    """
    fill = torch.full((texts,), stages)
    if stages > 1:
        partial = torch.rand(texts, generator=generator) >= full
        fill[partial] = torch.randint(1, stages, (int(partial.sum()),), generator=generator)
    return fill


@torch.no_grad()
def agreement(module: SpdModule, target: Any, held_out: Tensor, greedy: bool = False, limit: int = 48,
              prompt: int = 64, length: int = 192) -> dict[int, float]:
    """How often the module's best token is the target's, the pipeline full: by the number of stages.

    ``limit`` windows of ``length`` held-out tokens, spread evenly; the first ``prompt`` tokens of
    each are context only.  With ``greedy`` the target writes what follows the prompt itself, at
    temperature 0: the text that decoding follows.
    """
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

"""Training an EAGLE-2 head on a frozen target's features, unrolled on its own predictions.

Knows how a row at depth d of a draft tree sees the text: true features up to d - 1 rows back, then
the head's own rows of depth 2 … d.  Training runs the very forward that drafting runs
(``drafting.eagle``), with that visibility as its mask.  Does not know trees or strategies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flowspec_edge.drafting.eagle import EagleHead
from flowspec_edge.training.corpus import TokenizedCorpus
from flowspec_edge.training.loop import Pace, Run, compiled, device, micro_batches, train, windows
from flowspec_edge.training.optim import Optimiser

DEPTHS = 6  # the depths that agreement is measured and the model card tells it for


@dataclass(frozen=True)
class EagleRecipe:
    """Schedule and losses of one head; lengths and batches in tokens."""

    steps: int
    window: int = 256
    tokens_per_step: int = 4096
    micro_batch: int = 2048
    depth: int = 6  # steps unrolled
    chains: int = 64  # places in a window, drawn anew for every batch, that the unrolling starts from
    plain: float = 0.35  # the share of the run, at its start, that is not unrolled
    fade: float = 0.9  # weight of depth d: fade ** (d - 1)
    soft_weight: float = 1.0  # of the cross-entropy to the target's distribution, against SmoothL1
    noise: float = 0.05  # uniform, ±, on the true features that go in
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    decay_from: float = 0.4


class _Unrolled:
    """The cache of one unrolled forward: the rows of every depth so far, side by side."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def visibility(rows: int, anchors: Tensor, depth: int) -> Tensor:
    """What the chains' rows at ``depth`` >= 2 see: bool [A, rows + (depth - 1) * A].

    The first columns are the text's rows: chain a sees those up to its anchor.  Then come the
    chains' rows of depth 2, 3, … ``depth``: a chain sees its own.
    """
    text = torch.arange(rows, device=anchors.device)[None] <= anchors[:, None]
    own = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    return torch.cat((text, own.repeat(1, depth - 1)), dim=1)


def unroll(head: EagleHead, features: Tensor, tokens: Tensor, anchors: Tensor, depth: int
           ) -> Iterator[Tensor]:
    """The head's outputs along a text: at depth 1 for every row, deeper for the anchors' chains.

    features  [B, n, H]  f_0 … f_{n-1}
    tokens    [B, n]     tokens 1 … n
    anchors   [A]        rows, at most n - depth: a chain has true features up to its anchor only
    yields    [B, n, H] at depth 1, where row i approximates f_{i+1};
              [B, A, H] at depth d, where row a approximates f_{anchors[a] + d}
    """
    batch, n = tokens.shape
    cache = _Unrolled()
    at = torch.arange(n, device=tokens.device)
    mask = torch.ones(n, n, dtype=torch.bool, device=tokens.device).tril()
    for d in range(1, depth + 1):
        if d > 1:
            at, mask = anchors + d - 1, visibility(n, anchors, d)
        positions, shown = at[None].expand(batch, -1), mask[None, None].expand(batch, 1, -1, -1)
        out = head(features, tokens[:, at], positions, shown, cache)
        yield out
        features = out[:, anchors] if d == 1 else out


def new_head(target: LlamaForCausalLM) -> EagleHead:
    """An untrained head for ``target``: its width and layer shape, its embedding (not trained)."""
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1, "bias": True})
    head = EagleHead(config)
    head.embed_tokens.weight = torch.nn.Parameter(
        target.get_input_embeddings().weight.detach().clone(), requires_grad=False
    )
    return head


def train_head(recipe: EagleRecipe, target: LlamaForCausalLM, corpus: TokenizedCorpus, work: Path,
               seed: int, pace: Pace) -> EagleHead:
    """Train a head for ``target``; resumes from ``work/eagle2.pt``."""
    dev = device()
    target = target.to(dev).eval().requires_grad_(False)
    torch.manual_seed(seed)
    head = new_head(target).to(dev)
    tokens = torch.from_numpy(np.array(corpus.train))

    def micro_loss(rows: Tensor, noise: Tensor, anchors: Tensor, depth: int) -> Tensor:
        with torch.no_grad():
            features = target.model(input_ids=rows, use_cache=False).last_hidden_state
            wanted = target.lm_head(features[:, 1:]).float().softmax(-1)
        total, weights = torch.zeros((), device=dev), 0.0
        outputs = unroll(head, features[:, :-1] + noise, rows[:, 1:], anchors, depth)
        for d, out in enumerate(outputs):
            at = anchors + d if d else slice(None)
            logits = target.lm_head(out).float()
            soft = (logits.logsumexp(-1) - (wanted[:, at] * logits).sum(-1)).mean()
            smooth = F.smooth_l1_loss(out.float(), features[:, 1:][:, at].float())
            total = total + recipe.fade**d * (smooth + recipe.soft_weight * soft)
            weights += recipe.fade**d
        return total / weights

    step_loss = compiled(micro_loss, pace.compile)

    def loss(step: int, total: int) -> float:
        rows = windows(tokens, recipe.window, step, recipe.tokens_per_step // recipe.window, seed)
        depth = 1 if step < recipe.plain * total else recipe.depth
        generator = torch.Generator().manual_seed(seed + step)  # so that a resumed run sees the same
        width = (len(rows), recipe.window, target.config.hidden_size)
        noise = (torch.rand(width, generator=generator) * 2 - 1) * recipe.noise
        anchors = torch.randperm(recipe.window - recipe.depth + 1, generator=generator)[: recipe.chains]
        anchors = anchors.sort().values.to(dev)
        value = 0.0
        parts = micro_batches(recipe.micro_batch // recipe.window, rows, noise)
        for share, (part, part_noise) in parts:
            with torch.autocast(dev.type, torch.bfloat16, enabled=dev.type == "cuda"):
                part_loss = step_loss(part.to(dev), part_noise.to(dev), anchors, depth) * share
            part_loss.backward()
            value += part_loss.item()
        return value

    def report() -> str:
        return "agreement by depth " + " ".join(f"{a:.3f}" for a in agreement(head, target, corpus, limit=8))

    optimiser = Optimiser(head, recipe.muon_lr, recipe.adam_lr, recipe.decay_from)
    train(Run("eagle2", head, optimiser, recipe.steps, work / "eagle2.pt", loss, report,
              pace.checkpoint_every_s))
    return head


@torch.no_grad()
def agreement(head: EagleHead, target: LlamaForCausalLM, corpus: TokenizedCorpus, greedy: bool = False,
              limit: int = 48, prompt: int = 64, length: int = 192) -> list[float]:
    """How often the head's best token is the target's, at depth 1 … 6: one share per depth.

    At depth d the head knows the target's features up to d - 1 tokens back and its own outputs
    after that, along one text; its argmax is held against the argmax of the target, which has read
    the same text.  The text is held out: ``limit`` windows of ``length`` tokens, spread evenly;
    the first ``prompt`` tokens of each are context only.  With ``greedy`` the target writes what
    follows the prompt itself, at temperature 0: the path that a draft tree is walked along.
    """
    ids = torch.from_numpy(np.array(corpus.held_out)).long()
    starts = np.linspace(0, len(ids) - length - 1, limit).astype(int)
    rows = torch.stack([ids[s : s + length] for s in starts]).to(target.device)
    if greedy:
        rows = greedy_text(target, rows[:, :prompt], length)
    features = target.model(input_ids=rows, use_cache=False).last_hidden_state
    best = target.lm_head(features[:, 1:]).argmax(-1)
    shares = []
    anchors = torch.arange(prompt, length - DEPTHS, device=rows.device)
    for d, out in enumerate(unroll(head, features[:, :-1], rows[:, 1:], anchors, DEPTHS)):
        chosen = target.lm_head(out if d else out[:, anchors]).argmax(-1)
        shares.append((chosen == best[:, anchors + d]).float().mean().item())
    return shares


@torch.no_grad()
def greedy_text(target: LlamaForCausalLM, rows: Tensor, length: int) -> Tensor:
    """Greedy continuation of [B, n] to [B, length], past end-of-text marks too."""
    out = target(input_ids=rows, use_cache=True)
    while rows.shape[1] < length:
        rows = torch.cat((rows, out.logits[:, -1:].argmax(-1)), dim=1)
        out = target(input_ids=rows[:, -1:], past_key_values=out.past_key_values, use_cache=True)
    return rows

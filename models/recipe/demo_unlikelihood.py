"""Training a language model further so that its greedy text falls into fewer loops.

Sequence-level unlikelihood (Welleck et al., "Neural Text Generation with Unlikelihood Training",
arXiv 1908.04319, section 5.2), with loops in place of repeated 4-grams: the model continues texts at
temperature 0, and tokens with which a continuation goes on repeating itself become less likely, beside the
usual cross-entropy to the training text.  The average of the result and the weights from before (Wortsman et
al., "Robust fine-tuning of zero-shot models", arXiv 2109.01903) has about as few loops and is better on
held-out text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_lm import bits_per_byte
from torch import Tensor
from transformers import LlamaForCausalLM

from flowspec_edge.lab.bench.samples import PERIOD
from flowspec_edge.lab.training.heads import greedy_text
from flowspec_edge.lab.training.loop import (
    LoopOptions,
    Optimiser,
    Run,
    backpropagate,
    compiled,
    device,
    train,
    windows,
)
from flowspec_edge.lab.training.python_source import TokenizedCorpus

_SHORTEST = 12  # equal tokens in a row before the next equal one counts, however short the period
_LARGEST = 1 - 1e-4  # probability; keeps the loss finite
_MICRO_TEXTS = 8


@dataclass(frozen=True)
class UnlikelihoodRecipe:
    """The schedule of the further training; lengths and batches in tokens.

    texts   continuations a step
    weight  of their loss
    share   of the trained weights in the average with those from before
    """

    steps: int
    texts: int = 16
    prompt: int = 48
    length: int = 224
    weight: float = 0.2
    share: float = 0.6
    window: int = 512
    tokens_per_step: int = 6144
    micro_batch: int = 3072
    muon_lr: float = 0.012
    adam_lr: float = 2e-3
    decay_from: float = 0.3


def looping(ids: Tensor, prompt: int = 0, eos: int = 0) -> Tensor:
    """Mark what repeats a period twice: bool [B, n] for token ids [B, n].

    A token counts if it and more than ``max(12, period)`` tokens before it equal those one period earlier,
    for a period of at most 32; not in the first ``prompt`` tokens, nor after the end of the text.
    """
    position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    for period in range(1, min(PERIOD, ids.shape[1] - 1) + 1):
        equal = torch.zeros_like(repeated)
        equal[:, period:] = ids[:, period:] == ids[:, :-period]
        last_unequal = torch.where(equal, -1, position).cummax(1).values
        repeated |= position - last_unequal > max(_SHORTEST, period)
    repeated[:, :prompt] = False
    repeated[:, prompt:] &= (ids[:, prompt:] == eos).cumsum(1) <= 1
    return repeated


def unlikelihood(model: LlamaForCausalLM, ids: Tensor, marked: Tensor) -> Tensor:
    """Return the sum of -log(1 - p) over the ``marked`` tokens, bool [B, n], of ``ids`` [B, n]."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    targets = marked[:, 1:]
    logits = model.lm_head(hidden[targets]).float()
    p = logits.softmax(-1).gather(1, ids[:, 1:][targets][:, None])
    return -torch.log1p(-p.clamp(max=_LARGEST)).sum()


def train_against_loops(model: LlamaForCausalLM, recipe: UnlikelihoodRecipe, corpus: TokenizedCorpus,
                        work: Path, seed: int, loop: LoopOptions) -> None:
    """Train ``model`` on; resumes from ``work``."""
    dev = device()
    model.to(dev).requires_grad_(True).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    tokens = torch.from_numpy(np.array(corpus.train))

    def cross_entropy(rows: Tensor) -> Tensor:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    likelihood = compiled(cross_entropy, loop.compile)

    def loss(step: int, _total: int) -> float:
        rows = windows(tokens, recipe.window, step, recipe.tokens_per_step // recipe.window, seed)
        value = backpropagate(likelihood, dev, recipe.micro_batch // recipe.window, rows)
        generator = torch.Generator().manual_seed(seed + step)  # a resumed run draws the same
        starts = torch.randint(0, len(tokens) - recipe.prompt, (recipe.texts,), generator=generator)
        prompts = torch.stack([tokens[s : s + recipe.prompt] for s in starts.tolist()]).long().to(dev)
        ids = greedy_text(model, prompts, recipe.length)
        marked = looping(ids, recipe.prompt)
        for part, where in zip(ids.split(_MICRO_TEXTS), marked.split(_MICRO_TEXTS), strict=True):
            if where.any():
                (recipe.weight / marked.sum() * unlikelihood(model, part, where)).backward()
        return value

    def report() -> str:
        return f"held out {bits_per_byte(model, corpus, limit=60_000):.4f} bits per byte"

    train(Run("unlikelihood", model, Optimiser(model, recipe.muon_lr, recipe.adam_lr, recipe.decay_from),
              recipe.steps, work / "unlikelihood.pt", loss, report, loop.checkpoint_every_s))
    model.load_state_dict({name: torch.lerp(before[name], weight, recipe.share)
                           for name, weight in model.state_dict().items()})

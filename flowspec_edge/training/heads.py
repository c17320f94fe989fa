"""Training a draft head on a frozen target's states, and measuring it: what all kinds share.

Knows batches, the unrolling and how its depths are weighted, and agreement by depth.  Does not know
what a head takes in or which loss teaches it: that is a :class:`Student`'s (``training.eagle``,
``training.eagle3``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flowspec_edge.training.loop import Pace, Run, compiled, micro_batches, train, windows
from flowspec_edge.training.optim import Optimiser
from flowspec_edge.training.unroll import unroll

DEPTHS = 6  # the depths that agreement is measured and the cards tell it for
_ADAM_WIDTH = 192
PROMPT, LENGTH = 64, 192  # tokens of context, and in all, of a window that agreement is measured on


@dataclass(frozen=True)
class HeadRecipe:
    """Schedule of one head; lengths and batches in tokens."""

    steps: int
    window: int = 256
    tokens_per_step: int = 4096
    micro_batch: int = 2048
    depth: int = 6  # steps unrolled
    chains: int = 64  # places in a window, drawn anew for every batch, that the unrolling starts from
    plain: float = 0.35  # the share of the run, at its start, that is not unrolled
    fade: float = 0.9  # weight of depth d: fade ** (d - 1)
    noise: float = 0.0  # uniform, ±, on the true states that go in
    muon_lr: float = 0.02
    adam_lr: float = 2e-3  # up to a width of 192; beyond, it falls as one over the width
    decay_from: float = 0.4


class Reading(NamedTuple):
    """What the target computes over texts of n + 1 tokens.

    states    [B, n + 1, S]  what the head's true rows take in
    features  [B, n + 1, H]  after the final norm: lm_head on them ranks the next tokens
    """

    states: Tensor
    features: Tensor


class Student(ABC):
    """A head and the frozen target that teaches it; the head goes to the target's device."""

    name: ClassVar[str]

    def __init__(self, head: Any, target: Any) -> None:
        self.head: Any = head.to(target.device)
        self.target = target

    @abstractmethod
    def read(self, rows: Tensor) -> Reading:
        """The target over tokens [B, n + 1]."""

    @abstractmethod
    def enter(self, states: Tensor) -> Tensor:
        """States [B, n, S] as the head's first pass takes them: [B, n, H]."""

    @abstractmethod
    def truth(self, features: Tensor) -> tuple[Tensor, ...]:
        """What the rows that approximate ``features`` [B, n, H] are held against: [B, n, …] each."""

    @abstractmethod
    def loss(self, out: Tensor, truth: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of outputs [B, m, H]; ``truth`` has their rows."""

    @abstractmethod
    def best(self, out: Tensor) -> Tensor:
        """The target's id of the head's best token for each of the outputs [..., H]."""

    def ranked(self, features: Tensor) -> Tensor:
        """The target's lm_head: [..., H] to float32 logits [..., V]."""
        lm_head = self.target.lm_head
        logits: Tensor = lm_head(features.to(lm_head.weight.dtype)).float()
        return logits


def train_head(recipe: HeadRecipe, student: Student, text: Tensor, held_out: Tensor, work: Path, seed: int,
               pace: Pace) -> None:
    """Train the student's head on ``text``; resumes from ``work/NAME.pt``.

    text, held_out  token ids, integer vectors of at least ``recipe.window`` + 1 and LENGTH + 1
    """
    dev, head = student.target.device, student.head

    def micro_loss(rows: Tensor, noise: Tensor, anchors: Tensor, depth: int) -> Tensor:
        with torch.no_grad():
            states, features = student.read(rows)
            truth = student.truth(features[:, 1:])
        total, weights = torch.zeros((), device=dev), 0.0
        outputs = unroll(head, student.enter(states[:, :-1] + noise), rows[:, 1:], anchors, depth)
        for d, out in enumerate(outputs):
            at = anchors + d if d else slice(None)
            total = total + recipe.fade**d * student.loss(out, tuple(t[:, at] for t in truth))
            weights += recipe.fade**d
        return total / weights

    step_loss = compiled(micro_loss, pace.compile)

    def loss(step: int, total: int) -> float:
        rows = windows(text, recipe.window, step, recipe.tokens_per_step // recipe.window, seed)
        depth = 1 if step < recipe.plain * total else recipe.depth
        generator = torch.Generator().manual_seed(seed + step)  # so that a resumed run sees the same
        width = student.target.config.hidden_size
        shape = (len(rows), recipe.window, width) if recipe.noise else (len(rows), 1, 1)
        noise = (torch.rand(shape, generator=generator) * 2 - 1) * recipe.noise
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
        shares = agreement(student, held_out, limit=8)
        return "agreement by depth " + " ".join(f"{share:.3f}" for share in shares)

    # An output matrix's entries shrink as the width grows, and so must AdamW's steps; Muon's
    # orthogonal updates are the same size at any width.
    adam_lr = recipe.adam_lr * min(1.0, _ADAM_WIDTH / head.config.hidden_size)
    optimiser = Optimiser(head, recipe.muon_lr, adam_lr, recipe.decay_from)
    train(Run(student.name, head, optimiser, recipe.steps, work / f"{student.name}.pt", loss, report,
              pace.checkpoint_every_s))


@torch.no_grad()
def agreement(student: Student, held_out: Tensor, greedy: bool = False, limit: int = 48,
              prompt: int = PROMPT, length: int = LENGTH) -> list[float]:
    """How often the head's best token is the target's, at depth 1 … 6: one share per depth.

    At depth d the head knows the target's states up to d - 1 tokens back and its own outputs after
    that, along one text; its argmax is held against the argmax of the target, which has read the
    same text.  The text is held out: ``limit`` windows of ``length`` tokens, spread evenly; the
    first ``prompt`` tokens of each are context only.  With ``greedy`` the target writes what
    follows the prompt itself, at temperature 0: the path that a draft tree is walked along.
    """
    starts = np.linspace(0, len(held_out) - length - 1, limit).astype(int)
    texts = torch.stack([held_out[s : s + length] for s in starts]).long().to(student.target.device)
    hits = torch.zeros(DEPTHS)
    anchors = torch.arange(prompt, length - DEPTHS, device=texts.device)
    if greedy:
        texts = greedy_text(student.target, texts[:, :prompt], length)
    for rows in texts.split(8):  # logits over a large vocabulary are large
        states, features = student.read(rows)
        best = student.ranked(features[:, 1:]).argmax(-1)
        outputs = unroll(student.head, student.enter(states[:, :-1]), rows[:, 1:], anchors, DEPTHS)
        for d, out in enumerate(outputs):
            chosen = student.best(out if d else out[:, anchors])
            hits[d] += (chosen == best[:, anchors + d]).sum().item()
    shares: list[float] = (hits / (len(texts) * len(anchors))).tolist()
    return shares


@torch.no_grad()
def greedy_text(target: Any, rows: Tensor, length: int) -> Tensor:
    """Greedy continuation of [B, n] to [B, length], past end-of-text marks too."""
    out = target(input_ids=rows, use_cache=True, logits_to_keep=1)
    while rows.shape[1] < length:
        rows = torch.cat((rows, out.logits.argmax(-1)), dim=1)
        out = target(input_ids=rows[:, -1:], past_key_values=out.past_key_values, use_cache=True)
    return rows


def frozen_embedding(target: Any) -> nn.Parameter:
    """A copy of the target's embedding, not to be trained."""
    return nn.Parameter(target.get_input_embeddings().weight.detach().float().clone(), requires_grad=False)

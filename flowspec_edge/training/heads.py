"""Training a draft head on a frozen target's states, and measuring its agreement.

An EAGLE head is unrolled along a text as drafting unrolls a branch: a row at depth d attends to true states
up to d - 1 rows back, then to the head's own rows of depth 2 … d.  Training uses drafting's forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flowspec_edge.drafting.eagle.head_drafter import KeyValueCache
from flowspec_edge.training.loop import LoopOptions, Optimiser, Run, backpropagate, compiled, train, windows

DEPTHS = 6  # that agreement is measured for
_ADAM_WIDTH = 192
PROMPT, LENGTH = 64, 192  # tokens of an agreement window: context, and in all


@dataclass(frozen=True)
class HeadRecipe:
    """Schedule of one head; lengths and batches in tokens."""

    steps: int
    window: int = 256
    tokens_per_step: int = 4096
    micro_batch: int = 2048
    depth: int = 6  # steps unrolled
    chains: int = 64  # positions of a window, drawn for every batch, at which chains start
    plain: float = 0.35  # initial share of the run without unrolling
    fade: float = 0.9  # weight of depth d: fade ** (d - 1)
    noise: float = 0.0  # uniform, ±, on the true input states
    muon_lr: float = 0.02
    adam_lr: float = 2e-3  # scaled by 192 / width for wider heads
    decay_from: float = 0.4


class Reading(NamedTuple):
    """What the target computes over texts of n + 1 tokens.

    states    [B, n + 1, S]  inputs of the head's true rows
    features  [B, n + 1, H]  after the final norm: inputs of lm_head
    """

    states: Tensor
    features: Tensor


class Student(ABC):
    """A head and the frozen target that teaches it, on the target's device."""

    name: ClassVar[str]

    def __init__(self, head: Any, target: Any) -> None:
        self.head: Any = head.to(target.device)
        self.target = target

    @abstractmethod
    def read(self, rows: Tensor) -> Reading: ...

    @abstractmethod
    def step_loss(self, fade: float, rows: Tensor, noise: Tensor, anchors: Tensor, depth: int) -> Tensor:
        """The loss of a batch of windows, int64 [B, n + 1]; depth d has the weight ``fade`` ** (d - 1)."""

    @abstractmethod
    def drafts(self, states: Tensor, rows: Tensor, anchors: Tensor, depth: int) -> Iterator[Tensor]:
        """The head's best tokens [B, A] at depth 1 … ``depth`` below token anchors[a] + 1 of ``rows``, along
        the text."""

    def target_logits(self, features: Tensor) -> Tensor:
        """The target's lm_head: [..., H] to float32 logits [..., V]."""
        lm_head = self.target.lm_head
        logits: Tensor = lm_head(features.to(lm_head.weight.dtype)).float()
        return logits


class UnrolledStudent(Student):
    """An EAGLE head."""

    def step_loss(self, fade: float, rows: Tensor, noise: Tensor, anchors: Tensor, depth: int) -> Tensor:
        """Over ``depth`` steps unrolled from ``anchors``."""
        with torch.no_grad():
            states, features = self.read(rows)
            targets = self.targets(features[:, 1:])
        total, weights = torch.zeros((), device=self.target.device), 0.0
        outputs = unroll(self.head, self.input_states(states[:, :-1] + noise), rows[:, 1:], anchors, depth)
        for d, out in enumerate(outputs):
            at = anchors + d if d else slice(None)
            total = total + fade**d * self.loss(out, tuple(t[:, at] for t in targets))
            weights += fade**d
        return total / weights

    def drafts(self, states: Tensor, rows: Tensor, anchors: Tensor, depth: int) -> Iterator[Tensor]:
        outputs = unroll(self.head, self.input_states(states[:, :-1]), rows[:, 1:], anchors, depth)
        for d, out in enumerate(outputs):
            yield self.best(out if d else out[:, anchors])

    @abstractmethod
    def input_states(self, states: Tensor) -> Tensor:
        """States [B, n, S] as inputs of the head's first pass: [B, n, H]."""

    @abstractmethod
    def targets(self, features: Tensor) -> tuple[Tensor, ...]:
        """Training targets of the rows that approximate ``features`` [B, n, H]: [B, n, …] each."""

    @abstractmethod
    def loss(self, out: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of outputs [B, m, H] against the same rows of ``targets``."""

    @abstractmethod
    def best(self, out: Tensor) -> Tensor:
        """The head's best token for each output [..., H], as the target's id."""


def train_head(recipe: HeadRecipe, student: Student, text: Tensor, held_out: Tensor, work: Path, seed: int,
               loop: LoopOptions) -> None:
    """Train on token ids, vectors longer than ``recipe.window`` (held out: LENGTH); resumes from ``work``."""
    dev, head = student.target.device, student.head
    step_loss = compiled(partial(student.step_loss, recipe.fade), loop.compile)

    def loss(step: int, total: int) -> float:
        rows = windows(text, recipe.window, step, recipe.tokens_per_step // recipe.window, seed)
        depth = 1 if step < recipe.plain * total else recipe.depth
        generator = torch.Generator().manual_seed(seed + step)  # a resumed run draws the same
        width = student.target.config.hidden_size
        shape = (len(rows), recipe.window, width) if recipe.noise else (len(rows), 1, 1)
        noise = (torch.rand(shape, generator=generator) * 2 - 1) * recipe.noise
        anchors = torch.randperm(recipe.window - recipe.depth + 1, generator=generator)[: recipe.chains]
        anchors = anchors.sort().values.to(dev)
        return backpropagate(lambda part, part_noise: step_loss(part, part_noise, anchors, depth),
                             dev, recipe.micro_batch // recipe.window, rows, noise)

    def report() -> str:
        shares = agreement(student, held_out, limit=8)
        return "agreement by depth " + " ".join(f"{share:.3f}" for share in shares)

    train(Run(student.name, head, optimiser_for(recipe, head), recipe.steps, work / f"{student.name}.pt",
              loss, report, loop.checkpoint_every_s))


def optimiser_for(recipe: HeadRecipe, head: Any) -> Optimiser:
    # Entries of an output matrix shrink as the width grows, so AdamW's steps must shrink, too; Muon's
    # orthogonal updates have the same size at any width.
    adam_lr = recipe.adam_lr * min(1.0, _ADAM_WIDTH / head.config.hidden_size)
    return Optimiser(head, recipe.muon_lr, adam_lr, recipe.decay_from)


@torch.no_grad()
def agreement(student: Student, held_out: Tensor, greedy: bool = False, limit: int = 48,
              prompt: int = PROMPT, length: int = LENGTH) -> list[float]:
    """How often the head's argmax is the target's: one share per depth 1 … 6.

    Measured on ``limit`` evenly spread windows of ``length`` held-out tokens, after ``prompt`` tokens of
    context.  ``greedy``: the target continues the prompt at temperature 0, as in decoding.
    """
    starts = np.linspace(0, len(held_out) - length - 1, limit).astype(int)
    texts = torch.stack([held_out[s : s + length] for s in starts]).long().to(student.target.device)
    hits = torch.zeros(DEPTHS)
    anchors = torch.arange(prompt, length - DEPTHS, device=texts.device)
    if greedy:
        texts = greedy_text(student.target, texts[:, :prompt], length)
    for rows in texts.split(8):  # logits over a large vocabulary are large
        states, features = student.read(rows)
        best = student.target_logits(features[:, 1:]).argmax(-1)
        for d, chosen in enumerate(student.drafts(states, rows, anchors, DEPTHS)):
            hits[d] += (chosen == best[:, anchors + d]).sum().item()
    shares: list[float] = (hits / (len(texts) * len(anchors))).tolist()
    return shares


@torch.no_grad()
def greedy_text(target: Any, rows: Tensor, length: int) -> Tensor:
    """[B, n] to [B, length], past end-of-text marks too."""
    out = target(input_ids=rows, use_cache=True, logits_to_keep=1)
    while rows.shape[1] < length:
        rows = torch.cat((rows, out.logits.argmax(-1)), dim=1)
        out = target(input_ids=rows[:, -1:], past_key_values=out.past_key_values, use_cache=True)
    return rows


def frozen_embedding(target: Any) -> nn.Parameter:
    return nn.Parameter(target.get_input_embeddings().weight.detach().float().clone(), requires_grad=False)


Head = Callable[[Tensor, Tensor, Tensor, Tensor, KeyValueCache], Tensor]


class _Unrolled:
    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def visibility(rows: int, anchors: Tensor, depth: int) -> Tensor:
    """Attention mask of the chains' rows at ``depth`` >= 2: bool [A, rows + (depth - 1) * A].

    Columns: the text's rows, which a chain sees up to its anchor; then the chains' rows of depth 2 …
    ``depth``, of which a chain sees its own.
    """
    text = torch.arange(rows, device=anchors.device)[None] <= anchors[:, None]
    own = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    return torch.cat((text, own.repeat(1, depth - 1)), dim=1)


def unroll(head: Head, hidden: Tensor, tokens: Tensor, anchors: Tensor, depth: int) -> Iterator[Tensor]:
    """The head's outputs along a text: at depth 1 for every row, deeper for the anchors' chains.

    hidden   [B, n, H]  inputs of the text's rows: EAGLE-2's features f_0 … f_{n-1}, or EAGLE-3's fused
                        states h_0 … h_{n-1}
    tokens   [B, n]     tokens 1 … n
    anchors  [A]        rows, at most n - depth; a chain has true states up to its anchor
    yields   [B, n, H]  at depth 1, where row i approximates the state of token i + 1;
             [B, A, H]  at depth d, where row a approximates that of token anchors[a] + d
    """
    batch, n = tokens.shape
    cache = _Unrolled()
    at = torch.arange(n, device=tokens.device)
    mask = torch.ones(n, n, dtype=torch.bool, device=tokens.device).tril()
    for d in range(1, depth + 1):
        if d > 1:
            at, mask = anchors + d - 1, visibility(n, anchors, d)
        positions, shown = at[None].expand(batch, -1), mask[None, None].expand(batch, 1, -1, -1)
        out = head(hidden, tokens[:, at], positions, shown, cache)
        yield out
        hidden = out[:, anchors] if d == 1 else out

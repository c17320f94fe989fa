"""Training a draft head on a frozen target's states, and measuring its agreement.

An EAGLE head is unrolled along a text as drafting unrolls a branch: a row at depth d attends to true states
up to d - 1 rows back, then to the head's own rows of depth 2 … d.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from flowspec_edge.lab.training.differentiable import KeyValueCache
from flowspec_edge.lab.training.loop import (
    LoopOptions,
    Optimiser,
    Run,
    backpropagate,
    compiled,
    cut_windows,
    train,
    window_batch,
)
from flowspec_edge.model.draft_kinds import DRAFT_KINDS
from flowspec_edge.util.files import replacing
from flowspec_edge.util.threads import threads_worth

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


class TextTokens(Protocol):
    """How often the training text has each token."""

    def most_frequent(self, size: int) -> Tensor:
        """Return the ids of the ``size`` most frequent tokens, ascending: int64 [size]; fewer if there are fewer."""

    def rarest(self) -> int:
        """Return the last of those tokens that the text has least often."""


@dataclass(frozen=True)
class HeadTrainer:
    """How a kind of head is trained; the kind's record names its trainer (``DraftKind.trainer``).

    recipe  the settings by default
    new     makes a student from a target, a recipe, the text's tokens, how many of them it drafts, and the head to
            go on from (None: an untrained one)
    stored  makes the student of a finished head's directory and its target
    save    writes a head to a directory in float16, without the embedding, which is the target's
    drafts  the default number of tokens that it drafts, the most frequent ones; 0: always all of the target's
    load    reads a head to go on from, of a directory and an embedding [V, H]; None: every training begins with
            an untrained head
    """

    recipe: HeadRecipe
    new: Callable[[Any, HeadRecipe, TextTokens, int, Any], Student]
    stored: Callable[[Path, Any], Student]
    save: Callable[[Any, Path], None]
    drafts: int = 0
    load: Callable[[Path, Tensor], Any] | None = None


def trainer_of(kind: str) -> HeadTrainer:
    """Import the trainer of a kind of ``draft_kinds.trained_kinds``."""
    module, _, name = DRAFT_KINDS[kind].trainer.partition(":")
    trainer: HeadTrainer = getattr(import_module(module), name)
    return trainer


class Student(ABC):
    """A head and the frozen target that teaches it, on the target's device.

    states_are_features  the head reads the target's features alone, so that a reading holds one tensor
    """

    name: ClassVar[str]
    states_are_features: ClassVar[bool] = False

    def __init__(self, head: Any, target: Any) -> None:
        self.head: Any = head.to(target.device)
        self.target = target

    @abstractmethod
    def read(self, rows: Tensor) -> Reading: ...

    @abstractmethod
    def step_loss(self, fade: float, rows: Tensor, reading: Reading, noise: Tensor, anchors: Tensor,
                  depth: int) -> Tensor:
        """Return the loss of a batch of windows, int64 [B, n + 1], and what the target read in them.

        Depth d has the weight ``fade`` ** (d - 1).
        """

    def first_weights(self, rows: Tensor, reading: Reading) -> None:
        """Set an untrained head's weights from some windows, before the first step; by default keep them."""

    def states_width(self) -> int:
        """Return the width S of the states that :meth:`read` gives."""
        probe = torch.zeros(1, 2, dtype=torch.long, device=self.target.device)
        with torch.no_grad():
            return self.read(probe).states.shape[-1]

    @abstractmethod
    def drafts(self, states: Tensor, rows: Tensor, anchors: Tensor, depth: int) -> Iterator[Tensor]:
        """Yield the head's best tokens [B, A] at depth 1 … ``depth``, along the text.

        They follow token anchors[a] + 1 of ``rows``.
        """

    def target_logits(self, features: Tensor) -> Tensor:
        """Return the target's lm_head: [..., H] to float32 logits [..., V]."""
        lm_head = self.target.lm_head
        logits: Tensor = lm_head(features.to(lm_head.weight.dtype)).float()
        return logits


class UnrolledStudent(Student):
    """An EAGLE head; ``run`` computes a pass of it, through which gradients flow."""

    run: Head

    def step_loss(self, fade: float, rows: Tensor, reading: Reading, noise: Tensor, anchors: Tensor,
                  depth: int) -> Tensor:
        """Return the loss over ``depth`` steps unrolled from ``anchors``."""
        states, features = reading
        with torch.no_grad():
            targets = self.targets(features[:, 1:])
        total, weights = torch.zeros((), device=self.target.device), 0.0
        outputs = unroll(self.run, self.input_states(states[:, :-1] + noise), rows[:, 1:], anchors, depth)
        for d, out in enumerate(outputs):
            at = anchors + d if d else slice(None)
            total = total + fade**d * self.loss(out, tuple(t[:, at] for t in targets))
            weights += fade**d
        return total / weights

    def drafts(self, states: Tensor, rows: Tensor, anchors: Tensor, depth: int) -> Iterator[Tensor]:
        outputs = unroll(self.run, self.input_states(states[:, :-1]), rows[:, 1:], anchors, depth)
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
        """Return the mean loss of outputs [B, m, H] against the same rows of ``targets``."""

    @abstractmethod
    def best(self, out: Tensor) -> Tensor:
        """Return the head's best token for each output [..., H], as the target's id."""


_START_ROWS = 8  # rows for each unknown of a head's first weights


def train_head(recipe: HeadRecipe, student: Student, text: Tensor, held_out: Tensor, work: Path, seed: int,
               loop: LoopOptions, untrained: bool = True) -> None:
    """Train on token ids, vectors longer than ``recipe.window`` (held out: LENGTH); resumes from ``work``.

    The target reads each window of the text once: what it read is kept in ``work`` for later epochs.
    ``untrained``: the head has no weights worth keeping, and gets first ones from the text.
    """
    dev, head = student.target.device, student.head
    step_loss = compiled(partial(student.step_loss, recipe.fade), loop.compile)
    count, batch = (len(text) - 1) // recipe.window, recipe.tokens_per_step // recipe.window
    epochs = recipe.steps * batch / count
    readings = Readings(student, text, recipe.window, work, on_disk=epochs > 1)
    checkpoint = work / f"{student.name}.pt"
    if untrained and not checkpoint.exists():
        windows = -(-_START_ROWS * 2 * student.target.config.hidden_size // recipe.window)
        numbers = window_batch(count, 0, min(count, windows), seed)
        student.first_weights(cut_windows(text, recipe.window, numbers).to(dev), readings.take(numbers))

    def loss(step: int, total: int) -> float:
        numbers = window_batch(count, step, batch, seed)
        rows, reading = cut_windows(text, recipe.window, numbers), readings.take(numbers)
        depth = 1 if step < recipe.plain * total else recipe.depth
        generator = torch.Generator().manual_seed(seed + step)  # a resumed run draws the same
        width = student.target.config.hidden_size
        shape = (len(rows), recipe.window, width) if recipe.noise else (len(rows), 1, 1)
        noise = (torch.rand(shape, generator=generator) * 2 - 1) * recipe.noise
        anchors = torch.randperm(recipe.window - recipe.depth + 1, generator=generator)[: recipe.chains]
        anchors = anchors.sort().values.to(dev)

        def part_loss(rows: Tensor, states: Tensor, features: Tensor, noise: Tensor) -> Tensor:
            return step_loss(rows, Reading(states.float(), features), noise, anchors, depth)

        return backpropagate(part_loss, dev, recipe.micro_batch // recipe.window, rows, *reading, noise)

    def report() -> str:
        shares = agreement(student, held_out, limit=8)
        return "agreement by depth " + " ".join(f"{share:.3f}" for share in shares)

    train(Run(student.name, head, optimiser_for(recipe, head), recipe.steps, checkpoint,
              loss, report, loop.checkpoint_every_s, keep=readings.keep))
    readings.discard()


class Readings:
    """What the target reads in the windows of one text, in 16 bits; computed when it is first asked for.

    A run of several epochs keeps the readings in ``work``: a training step then costs the head alone. Each
    window takes (n + 1) * (S + H) * 2 bytes, or (n + 1) * H * 2 for a head that reads features alone.
    Without room on the disk the target computes them anew in every epoch. A run that is interrupted finds
    the readings of its last checkpoint again.
    """

    def __init__(self, student: Student, text: Tensor, length: int, work: Path, on_disk: bool) -> None:
        self._student, self._text, self._length = student, text, length
        self._count = (len(text) - 1) // length
        hidden = student.target.config.hidden_size
        self._states = 0 if student.states_are_features else student.states_width()
        self._file, self._done_file = work / f"{student.name}-readings.bin", work / f"{student.name}-read.npy"
        shape = (self._count, length + 1, self._states + hidden)
        self._stored = _reserved(self._file, shape) if on_disk else None
        self._is_stored = np.zeros(self._count, dtype=bool)
        if self._stored is not None and self._done_file.exists():
            self._is_stored = np.load(self._done_file)

    def take(self, numbers: Sequence[int]) -> Reading:
        """Return the readings of the windows with these numbers: float16 [B, n + 1, …], on the CPU."""
        missing = [number for number in numbers if not self._is_stored[number]]
        fresh: dict[int, Tensor] = {}
        for at in range(0, len(missing), _READ_AT_ONCE):
            some = missing[at : at + _READ_AT_ONCE]
            fresh.update(zip(some, self._read(some), strict=True))
        if self._stored is not None:
            for number, row in fresh.items():
                self._stored[number] = row.numpy()
                self._is_stored[number] = True
        rows = torch.stack([fresh[number] if number in fresh else self._from_file(number) for number in numbers])
        features = rows[..., self._states :]
        return Reading(rows[..., : self._states] if self._states else features, features)

    def keep(self) -> None:
        """Write the readings so far to the disk, so that a later run may rely on them."""
        if self._stored is not None:
            self._stored.flush()
            with replacing(self._done_file) as file:
                np.save(file, self._is_stored)

    def discard(self) -> None:
        """Delete the readings: the training is over."""
        self._stored = None
        self._done_file.unlink(missing_ok=True)
        self._file.unlink(missing_ok=True)

    def _from_file(self, number: int) -> Tensor:
        assert self._stored is not None
        return torch.from_numpy(np.array(self._stored[number]))

    @torch.no_grad()
    def _read(self, numbers: Sequence[int]) -> Tensor:
        rows = cut_windows(self._text, self._length, numbers).to(self._student.target.device)
        states, features = self._student.read(rows)
        both = torch.cat((states.float(), features.float()), dim=-1) if self._states else features.float()
        return both.clamp(-_MOST_IN_16_BITS, _MOST_IN_16_BITS).half().cpu()


_READ_AT_ONCE = 8  # windows of a pass of the target
_MOST_IN_16_BITS = 65504.0  # of a float16; some models have single activations beyond it


def _reserved(path: Path, shape: tuple[int, ...]) -> Any:
    """Map a float16 array in a file of its full size, or return None if the disk has no room for it."""
    size = 2 * int(np.prod(shape))
    if not path.exists() or path.stat().st_size != size:
        path.unlink(missing_ok=True)
        if size > _DISK_SHARE * shutil.disk_usage(path.parent).free:
            return None
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # writing to a hole on a full disk kills a process
        except OSError:
            path.unlink(missing_ok=True)
            return None
    return np.memmap(path, dtype=np.float16, mode="r+", shape=shape)


_DISK_SHARE = 0.5  # of what is free


def optimiser_for(recipe: HeadRecipe, head: Any) -> Optimiser:
    # Entries of an output matrix shrink as the width grows, so AdamW's steps must shrink, too; Muon's
    # orthogonal updates have the same size at any width.
    adam_lr = recipe.adam_lr * min(1.0, _ADAM_WIDTH / head.config.hidden_size)
    return Optimiser(head, recipe.muon_lr, adam_lr, recipe.decay_from)


def agreement(student: Student, held_out: Tensor, greedy: bool = False, limit: int = 48,
              prompt: int = PROMPT, length: int = LENGTH) -> list[float]:
    """How often the head's argmax is the target's: one share per depth 1 … 6.

    Measured on ``limit`` evenly spread windows of ``length`` held-out tokens, after ``prompt`` tokens of
    context.  ``greedy``: the target continues the prompt at temperature 0, as in decoding.
    """
    size = sum(weight.nbytes for weight in student.target.parameters())
    with torch.no_grad(), threads_worth(size):  # one token of a text at a time is little work
        return _agreement(student, held_out, greedy, limit, prompt, length)


def _agreement(student: Student, held_out: Tensor, greedy: bool, limit: int, prompt: int, length: int
               ) -> list[float]:
    starts = np.linspace(0, len(held_out) - length - 1, limit).astype(int)
    texts = torch.stack([held_out[s : s + length] for s in starts]).long().to(student.target.device)
    hits = torch.zeros(DEPTHS)
    anchors = torch.arange(prompt, length - DEPTHS, device=texts.device)
    if greedy:
        texts = greedy_text(student.target, texts[:, :prompt], length)
    for rows in texts.split(8):  # logits over a large vocabulary are large
        states, features = student.read(rows)
        best = student.target_logits(features[:, 1:]).argmax(-1)
        for d, drafted in enumerate(student.drafts(states, rows, anchors, DEPTHS)):
            hits[d] += (drafted == best[:, anchors + d]).sum().item()
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
    chain_rows = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    return torch.cat((text, chain_rows.repeat(1, depth - 1)), dim=1)


def unroll(head: Head, hidden: Tensor, tokens: Tensor, anchors: Tensor, depth: int) -> Iterator[Tensor]:
    """Yield the head's outputs along a text: at depth 1 for every row, deeper for the anchors' chains.

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
        positions, batch_mask = at[None].expand(batch, -1), mask[None, None].expand(batch, 1, -1, -1)
        out = head(hidden, tokens[:, at], positions, batch_mask, cache)
        yield out
        hidden = out[:, anchors] if d == 1 else out

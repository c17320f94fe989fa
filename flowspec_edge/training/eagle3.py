"""What an EAGLE-3 head learns: the target's distributions over the draft vocabulary, and nothing else.

Knows an untrained head for any target, the draft vocabulary, and the loss.  Does not know batches or
the unrolling ("training-time test" in the paper; ``training.heads``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowspec_edge.drafting.eagle3 import Eagle3Head, captured_layers
from flowspec_edge.training.heads import HeadRecipe, Reading, Student, frozen_embedding
from flowspec_edge.training.targets import layer_config

DRAFT_VOCABULARY = 32_000  # at most; the published heads' size


@dataclass(frozen=True)
class Eagle3Recipe(HeadRecipe):
    """EAGLE-3's: seven steps unrolled, cross-entropy alone, step i weighted 0.8 ** i."""

    depth: int = 7
    fade: float = 0.8


def draft_vocabulary(tokens: Tensor, vocabulary: int, size: int) -> Tensor:
    """The ``size`` most frequent of ``vocabulary`` token ids in a text, ascending: int64 [size].

    Equally frequent ones by their ids, so that tokens that never occur fill up the rest.
    """
    counts = torch.bincount(tokens.long(), minlength=vocabulary)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def new_head3(target: Any, drafted: Tensor) -> Eagle3Head:
    """An untrained head for ``target`` that drafts the tokens ``drafted`` (ascending ids).

    It starts from the target's final norm and from its lm_head's rows for these tokens.
    """
    config = layer_config(target.config)
    config.target_hidden_size, config.draft_vocab_size = config.hidden_size, len(drafted)
    head = Eagle3Head(config)
    head.embed_tokens.weight = frozen_embedding(target)
    ids = drafted.to(target.lm_head.weight.device)
    head.lm_head.weight.data.copy_(target.lm_head.weight[ids])
    head.norm.weight.data.copy_(target.model.norm.weight)
    if len(drafted) < config.vocab_size:
        head.d2t.copy_(drafted - torch.arange(len(drafted)))
        head.t2d.fill_(False)[drafted] = True
    return head


class Eagle3(Student):
    """An EAGLE-3 head with its target."""

    name = "eagle3"

    def __init__(self, head: Eagle3Head, target: Any) -> None:
        super().__init__(head, target)
        self._ids = head.target_ids()
        self._drafted = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=self._ids.device)
        self._drafted[self._ids] = True
        self._layers = captured_layers(target.config.num_hidden_layers)

    def read(self, rows: Tensor) -> Reading:
        out = self.target.model(input_ids=rows, use_cache=False, output_hidden_states=True)
        states = torch.cat([out.hidden_states[layer] for layer in self._layers], dim=-1)
        return Reading(states.float(), out.last_hidden_state)

    def enter(self, states: Tensor) -> Tensor:
        fused: Tensor = self.head.fuse(states)
        return fused

    def truth(self, features: Tensor) -> tuple[Tensor, ...]:
        """The target's distribution over the draft vocabulary alone, and the rows that count: those
        whose best token is in it."""
        logits = self.ranked(features)
        return logits[..., self._ids].softmax(-1), self._drafted[logits.argmax(-1)]

    def loss(self, out: Tensor, truth: tuple[Tensor, ...]) -> Tensor:
        wanted, counted = truth
        logits = self.head.logits(out).float()
        cost = logits.logsumexp(-1) - (wanted * logits).sum(-1)
        return (cost * counted).sum() / counted.sum().clamp(min=1)

    def best(self, out: Tensor) -> Tensor:
        return self._ids[self.head.logits(out).argmax(-1)]

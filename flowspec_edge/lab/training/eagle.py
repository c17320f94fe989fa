"""EAGLE-2 and EAGLE-3 heads: initial weights, inputs and losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowspec_edge.drafting.eagle.eagle2 import EagleConfig, EagleHead, load_head, save_head
from flowspec_edge.drafting.eagle.eagle3 import Eagle3Config, Eagle3Head, captured_layers
from flowspec_edge.drafting.eagle.eagle3_formats import load_head3, save_head3
from flowspec_edge.lab.training.differentiable import Eagle2Pass, Eagle3Pass
from flowspec_edge.lab.training.heads import (
    HeadRecipe,
    HeadTrainer,
    Reading,
    TextTokens,
    UnrolledStudent,
    frozen_embedding,
)
from flowspec_edge.lab.training.target import head_layer
from flowspec_edge.model.draft_kinds import EAGLE2, EAGLE3
from flowspec_edge.model.families import LLAMA, QWEN2


@dataclass(frozen=True)
class EagleRecipe(HeadRecipe):
    """EAGLE-2: SmoothL1 on the features, plus a cross-entropy to the target's distribution."""

    noise: float = 0.05
    soft_weight: float = 1.0  # weight of the cross-entropy relative to SmoothL1
    ranked: int = 8192  # tokens of the cross-entropy, the text's most frequent ones: lm_head's rows cost most


def new_head(target: Any) -> EagleHead:
    """Return an untrained head with the target's shape and (frozen) embedding, and its biases on q, k and v."""
    biased = (any(name.endswith("self_attn.q_proj.bias") for name, _ in target.model.layers.named_parameters())
              and not getattr(target.config, "attention_bias", False))
    config = head_layer(target.config, QWEN2 if biased else LLAMA)
    head = EagleHead(EagleConfig(**vars(config))).requires_grad_(True)
    head.embed_tokens.weight = frozen_embedding(target)
    return head


class Eagle2(UnrolledStudent):
    """The training of an EAGLE-1/2 head.

    ``ranked``: ids of the tokens that the cross-entropy is over; by default the whole vocabulary.
    """

    name = EAGLE2.name
    states_are_features = True

    def __init__(self, head: EagleHead, target: Any, soft_weight: float = 1.0, ranked: Tensor | None = None
                 ) -> None:
        super().__init__(head, target)
        self.run = Eagle2Pass(head)
        self._soft_weight = soft_weight
        lm_head = target.lm_head
        self._ranked: nn.Linear = lm_head
        if ranked is not None and len(ranked) < lm_head.out_features:
            self._ranked = _some_rows(lm_head, ranked)

    def read(self, rows: Tensor) -> Reading:
        features = self.target.model(input_ids=rows, use_cache=False).last_hidden_state
        return Reading(features.float(), features)

    def first_weights(self, rows: Tensor, reading: Reading) -> None:
        """Solve for the ``fc`` that alone predicts the next feature best, and let the layer add nothing yet.

        A ridge regression of f_{i+1} on [embedding of token i + 1; f_i]: better than 150 steps from random
        weights, in seconds (docs/experiments/models.md).
        """
        head = self.head
        wide = 2 * head.config.hidden_size + 1
        gram = torch.zeros(wide, wide, dtype=torch.float64)
        cross = torch.zeros(wide, head.config.hidden_size, dtype=torch.float64)
        with torch.no_grad():
            for tokens, features in zip(rows, reading.features, strict=True):
                inputs = torch.cat((head.embed_tokens(tokens[1:]).cpu().double(), features[:-1].double(),
                                    torch.ones(len(tokens) - 1, 1, dtype=torch.float64)), dim=-1)
                gram += inputs.mT @ inputs
                cross += inputs.mT @ features[1:].double()
            gram += torch.eye(wide, dtype=torch.float64) * (_RIDGE * gram.diagonal().mean())
            solved = torch.linalg.solve(gram, cross)
            head.fc.weight.copy_(solved[:-1].mT)
            if head.fc.bias is not None:
                head.fc.bias.copy_(solved[-1])
            head.layers[0].self_attn.o_proj.weight.zero_()
            head.layers[0].mlp.down_proj.weight.zero_()

    def input_states(self, states: Tensor) -> Tensor:
        return states

    def targets(self, features: Tensor) -> tuple[Tensor, ...]:
        return features.float(), self._logits(features).softmax(-1)

    def loss(self, out: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        features, target_probs = targets
        logits = self._logits(out)
        soft = (logits.logsumexp(-1) - (target_probs * logits).sum(-1)).mean()
        return F.smooth_l1_loss(out.float(), features) + self._soft_weight * soft

    def best(self, out: Tensor) -> Tensor:
        return self.target_logits(out).argmax(-1)

    def _logits(self, features: Tensor) -> Tensor:
        """Float32 logits of the ranked tokens."""
        logits: Tensor = self._ranked(features.to(self._ranked.weight.dtype)).float()
        return logits


_RIDGE = 1e-3  # of the mean square of an input


def _some_rows(lm_head: nn.Linear, ids: Tensor) -> nn.Linear:
    """Copy the rows ``ids`` of an output matrix, frozen as it is."""
    ids = ids.to(lm_head.weight.device)
    rows = nn.Linear(lm_head.in_features, len(ids), bias=lm_head.bias is not None, device="meta")
    rows.weight = nn.Parameter(lm_head.weight[ids], requires_grad=False)
    if lm_head.bias is not None:
        rows.bias = nn.Parameter(lm_head.bias[ids], requires_grad=False)
    return rows


DRAFT_VOCABULARY = 32_000  # at most; the published heads' size


@dataclass(frozen=True)
class Eagle3Recipe(HeadRecipe):
    """EAGLE-3: seven unrolled steps ("training-time test"), cross-entropy alone, step i weighted 0.8 ** i."""

    depth: int = 7
    fade: float = 0.8


def draft_vocabulary(tokens: Tensor, vocabulary: int, size: int) -> Tensor:
    """Return the ``size`` most frequent token ids, ascending, ties broken by the id: int64 [size]."""
    counts = torch.bincount(tokens.long(), minlength=vocabulary)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def new_head3(target: Any, drafted: Tensor) -> Eagle3Head:
    """Return an untrained head that drafts the tokens ``drafted`` (ascending ids).

    Its final norm and its lm_head begin as the target's.
    """
    config = head_layer(target.config)
    head = Eagle3Head(Eagle3Config(**vars(config), target_hidden_size=config.hidden_size,
                                   draft_vocab_size=len(drafted))).requires_grad_(True)
    head.embed_tokens.weight = frozen_embedding(target)
    ids = drafted.to(target.lm_head.weight.device)
    head.lm_head.weight.data.copy_(target.lm_head.weight[ids])
    head.norm.weight.data.copy_(target.model.norm.weight)
    if len(drafted) < config.vocab_size:
        head.d2t.copy_(drafted - torch.arange(len(drafted)))
        head.t2d.fill_(False)[drafted] = True
    return head


class Eagle3(UnrolledStudent):
    name = EAGLE3.name

    def __init__(self, head: Eagle3Head, target: Any) -> None:
        super().__init__(head, target)
        self.run = self._pass = Eagle3Pass(head)
        self._ids = head.target_ids()
        self._drafted = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=self._ids.device)
        self._drafted[self._ids] = True
        self._layers = captured_layers(target.config.num_hidden_layers)

    def read(self, rows: Tensor) -> Reading:
        out = self.target.model(input_ids=rows, use_cache=False, output_hidden_states=True)
        states = torch.cat([out.hidden_states[layer] for layer in self._layers], dim=-1)
        return Reading(states.float(), out.last_hidden_state)

    def input_states(self, states: Tensor) -> Tensor:
        return self._pass.fuse(states)

    def targets(self, features: Tensor) -> tuple[Tensor, ...]:
        """Return the target's distribution over the draft vocabulary, and the rows whose best token is in it."""
        logits = self.target_logits(features)
        return logits[..., self._ids].softmax(-1), self._drafted[logits.argmax(-1)]

    def loss(self, out: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        target_probs, loss_mask = targets
        logits = self._pass.logits(out).float()
        cost = logits.logsumexp(-1) - (target_probs * logits).sum(-1)
        return (cost * loss_mask).sum() / loss_mask.sum().clamp(min=1)

    def best(self, out: Tensor) -> Tensor:
        return self._ids[self._pass.logits(out).argmax(-1)]


def _eagle2(target: Any, recipe: HeadRecipe, text: TextTokens, drafted: int, start: EagleHead | None) -> Eagle2:
    assert isinstance(recipe, EagleRecipe)
    if start is not None:
        start.requires_grad_(True).embed_tokens.weight = frozen_embedding(target)
    head = new_head(target) if start is None else start
    return Eagle2(head, target, recipe.soft_weight, text.most_frequent(recipe.ranked))


def _eagle3(target: Any, recipe: HeadRecipe, text: TextTokens, drafted: int, start: None) -> Eagle3:
    return Eagle3(new_head3(target, text.most_frequent(drafted)), target)


def _embedding(target: Any) -> Tensor:
    weight: Tensor = target.get_input_embeddings().weight
    return weight


# As many steps as the demonstration model's heads; a large target needs more.
EAGLE2_TRAINER = HeadTrainer(
    EagleRecipe(steps=900), _eagle2,
    lambda directory, target: Eagle2(load_head(directory, _embedding(target), torch.float32), target),
    lambda head, directory: save_head(head, directory, torch.float16, with_embedding=False),
    load=lambda directory, embedding: load_head(directory, embedding, torch.float32))
EAGLE3_TRAINER = HeadTrainer(
    Eagle3Recipe(steps=900), _eagle3,
    lambda directory, target: Eagle3(load_head3(directory, _embedding(target), torch.float32), target),
    lambda head, directory: save_head3(head, directory, torch.float16), drafts=DRAFT_VOCABULARY)

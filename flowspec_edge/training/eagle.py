"""What an EAGLE-2 head learns: the target's next feature, and the distribution that it stands for.

Knows an untrained head for any target, and its loss.  Does not know batches or the unrolling
(``training.heads``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flowspec_edge.drafting.eagle import EagleHead
from flowspec_edge.training.heads import HeadRecipe, Reading, Student, frozen_embedding
from flowspec_edge.training.targets import layer_config


@dataclass(frozen=True)
class EagleRecipe(HeadRecipe):
    """EAGLE-2's: SmoothL1 on the features, beside a cross-entropy to the target's distribution."""

    noise: float = 0.05
    soft_weight: float = 1.0  # of the cross-entropy, against SmoothL1


def new_head(target: Any) -> EagleHead:
    """An untrained head for ``target``: its width and layer shape, its embedding (not trained).

    A Qwen2 target's attention has biases on queries, keys and values alone, and so has its head's.
    """
    biased = {"qkv_bias": True} if target.config.model_type == "qwen2" else {}
    head = EagleHead(layer_config(target.config, bias=True, **biased))
    head.embed_tokens.weight = frozen_embedding(target)
    return head


class Eagle2(Student):
    """An EAGLE-2 head with its target."""

    name = "eagle2"

    def __init__(self, head: EagleHead, target: Any, soft_weight: float = 1.0) -> None:
        super().__init__(head, target)
        self._soft_weight = soft_weight

    def read(self, rows: Tensor) -> Reading:
        features = self.target.model(input_ids=rows, use_cache=False).last_hidden_state
        return Reading(features.float(), features)

    def enter(self, states: Tensor) -> Tensor:
        return states

    def truth(self, features: Tensor) -> tuple[Tensor, ...]:
        return features.float(), self.ranked(features).softmax(-1)

    def loss(self, out: Tensor, truth: tuple[Tensor, ...]) -> Tensor:
        features, wanted = truth
        logits = self.ranked(out)
        soft = (logits.logsumexp(-1) - (wanted * logits).sum(-1)).mean()
        return F.smooth_l1_loss(out.float(), features) + self._soft_weight * soft

    def best(self, out: Tensor) -> Tensor:
        return self.ranked(out).argmax(-1)

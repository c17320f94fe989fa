"""The target's lm_head on D0's device; only ids and requested log-probabilities are copied back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.d0.request import Likelihood
from flowspec_edge.messages import Payload
from flowspec_edge.model.output_head import OutputHead, as_output_head
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.sampling.sampler import choose, log_probs, rank_children
from flowspec_edge.util.tensors import first_row_not_finite, to_device, to_torch

_WARM_ROWS, _WARM_CHILDREN = 16, 10


class LmHead:
    """A ``target.Target``."""

    def __init__(self, head: Tensor | OutputHead) -> None:
        """Take the target's output matrix [V, H], or a module of it."""
        self.head = as_output_head(head)

    @property
    def vocabulary(self) -> int:
        return self.head.vocabulary

    @property
    def hidden_size(self) -> int:
        return self.head.hidden_size

    def first_row_not_finite(self, hidden: Payload) -> int | None:
        return first_row_not_finite(hidden)

    def states(self, hidden: Payload) -> Tensor:
        """Copy received post-norm hidden states, [n, H], to the device, in the head's dtype."""
        return to_device(to_torch(hidden), self.head.device).to(self.head.dtype)

    def stacked(self, rows: Sequence[tuple[Tensor, int]]) -> Tensor:
        return torch.stack([states[row] for states, row in rows])

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """[n, H] to [n, V], in the head's dtype, on its device."""
        logits: Tensor = self.head(states)
        return logits

    @torch.inference_mode()
    def choose(self, logits: Tensor, positions: NDArray[np.integer], sampling: Sampling,
               allowed: NDArray[np.uint8] | None = None) -> NDArray[np.int32]:
        return choose(logits, positions, sampling, allowed)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute once all that requests may ask for.

        On CUDA kernels are loaded on first use, which would take a second of the first sampled request.
        """
        values = np.random.default_rng(0).normal(size=(_WARM_ROWS, self.hidden_size))
        states = torch.from_numpy(values).to(self.head.device, self.head.dtype)
        logits, positions = self.logits(states), np.arange(_WARM_ROWS)
        full_mask = np.full((_WARM_ROWS, -(-self.vocabulary // 8)), 0xFF, np.uint8)
        for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=50)):
            for allowed in (None, full_mask):
                self.choose(logits, positions, sampling, allowed)
            rank_children(logits, positions, _WARM_CHILDREN, sampling, "noise")
        self.likelihoods(states, [0] * _WARM_ROWS, 1)

    @torch.inference_mode()
    def likelihoods(self, states: Tensor, tokens: Sequence[int], most: int) -> list[Likelihood]:
        token_values, top, values = log_probs(self.logits(states), np.asarray(tokens), most)
        return [Likelihood(token, float(token_values[row]),
                           tuple(zip(top[row].tolist(), values[row].tolist(), strict=True)))
                for row, token in enumerate(tokens)]

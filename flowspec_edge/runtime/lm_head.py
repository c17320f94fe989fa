"""The target's output matrix on D0's device, and what is read from its logits there.

A hidden state crosses to the device once; what crosses back is token ids and, if they are asked for, log
probabilities.  Does not know drafts or text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.messages import Payload
from flowspec_edge.runtime.request import Likelihood
from flowspec_edge.sampler import choose, log_probs
from flowspec_edge.sampling import Sampling
from flowspec_edge.tensors import to_device, to_torch


class LmHead:
    """``weight`` is the target's output matrix, [V, H]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def vocabulary(self) -> int:
        """V."""
        return len(self.weight)

    def states(self, hidden: Payload) -> Tensor:
        """Post-norm hidden states, as they arrive, on the device in the matrix' dtype: [n, H]."""
        return to_device(to_torch(hidden), self.weight.device).to(self.weight.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """[n, H] to [n, V], in the matrix' dtype, on its device."""
        return states @ self.weight.mT

    @torch.inference_mode()
    def next_tokens(self, states: Tensor, positions: NDArray[np.integer], sampling: Sampling
                    ) -> NDArray[np.int32]:
        """The token after each row: int32 [n]; the rows stand at ``positions`` [n]."""
        return choose(self.logits(states), positions, sampling)

    @torch.inference_mode()
    def likelihoods(self, states: Tensor, tokens: Sequence[int], most: int) -> list[Likelihood]:
        """How likely each row finds its successor in ``tokens`` [n], and the ``most`` likeliest ones."""
        own, top, values = log_probs(self.logits(states), np.asarray(tokens), most)
        return [Likelihood(token, float(own[row]),
                           tuple(zip(top[row].tolist(), values[row].tolist(), strict=True)))
                for row, token in enumerate(tokens)]

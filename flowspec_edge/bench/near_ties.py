"""Whether a text in 16 bits differs from plain decoding's by nothing but near ties.

Segments of other lengths are summed in another order, and in 16 bits that moves a logit by some
thousandths of the logits' spread: two tokens that are nearly as likely may change places, and every token
after them is another one.  So the text is judged token by token, each given those before it.  Knows the
sampling rule.  Does not know strategies or clusters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowspec_edge.runtime.request import Request
from flowspec_edge.sampling import Sampling, gumbel

TOLERANCE = 0.05  # of the logits' standard deviation over the text


class NearTies:
    """Judges by ``model``, transformers' own, in one piece."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def explain(self, request: Request, tokens: list[int], reason: str) -> bool:
        """Whether every token is the one that plain decoding chooses after those before it, or nearly ties
        with it: no other is ahead by more than ``TOLERANCE``.  ``reason`` "stop" is a token, too.

        A text that ends too early or too late is never explained.
        """
        stops = sorted(request.stop_ids)
        ended = reason == "stop"
        if not set(tokens).isdisjoint(stops) or (ended and not stops) \
                or (len(tokens) >= request.max_new_tokens) == ended:
            return False
        logits = self._logits([*request.prompt, *tokens])[len(request.prompt) - 1 :]
        slack = TOLERANCE * float(logits.std())
        chosen = [[token] for token in tokens] + ([stops] if ended else [])
        first = len(request.prompt) - 1
        return all(_nearly_best(row, first + i, wanted, request, slack)
                   for i, (row, wanted) in enumerate(zip(logits, chosen, strict=False)))

    @torch.inference_mode()
    def _logits(self, text: list[int]) -> NDArray[np.float64]:
        """[len(text), V] of one pass over the whole text."""
        ids = torch.tensor([text], device=self._model.device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0]
        return np.asarray(logits.double().cpu().numpy())


def _nearly_best(logits: NDArray[np.float64], position: int, wanted: list[int], request: Request,
                 slack: float) -> bool:
    """Whether one of ``wanted`` is at most ``slack`` (in logits) behind the best of its row, which stands at
    ``position``: whether logits that are all wrong by up to half of that would let it win.

    Top-k and top-p move likewise: what they just cut off may be wanted, and what they just keep need not be
    beaten.
    """
    sampling = request.sampling
    if sampling.greedy:
        return bool(logits.max() - logits[wanted].max() <= slack)
    scaled, off = logits / sampling.temperature, slack / sampling.temperature
    may, must = _kept(scaled, sampling, off)
    noisy = scaled + gumbel(sampling.seed, position + 1, len(logits))
    rivals = noisy[must].max() if must.any() else -np.inf
    return any(may[token] and rivals - noisy[token] <= off for token in wanted)


def _kept(x: NDArray[np.float64], sampling: Sampling, off: float
          ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tokens of ``x`` [V], logits over T, top-k and top-p may keep, and which they must, where any two
    logits may be wrong by ``off`` against each other: bool [V] each."""
    ordered = np.sort(x)[::-1]
    k = min(sampling.top_k or len(x), len(x))
    may, must = np.ones(len(x), bool), np.ones(len(x), bool)
    if k < len(x):
        may, must = x >= ordered[k - 1] - off, x > ordered[k] + off
    if sampling.top_p < 1.0:
        p = np.exp(ordered[:k] - ordered[0])
        mass = np.concatenate([[0.0], np.cumsum(p / p.sum()), np.ones(len(x) - k)])
        # A token is kept where less than top_p lies ahead of it.
        surely = mass[np.searchsorted(-ordered, -(x + off), "left")]
        perhaps = mass[np.searchsorted(-ordered, -(x - off), "right") - 1]
        may &= _shifted(surely, -off) < sampling.top_p
        must &= _shifted(perhaps, off) < sampling.top_p
    return may, must


def _shifted(mass: NDArray[np.float64], off: float) -> NDArray[np.float64]:
    """The mass of tokens whose logits have moved by ``off`` against all others."""
    moved = mass * np.exp(off)
    return np.asarray(moved / (moved + np.maximum(1.0 - mass, 0.0)))

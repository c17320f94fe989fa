"""Judges whether a text in 16 bits differs from plain decoding's by near ties alone.

Segments of different lengths are summed in different orders, which in 16 bits changes a logit by some
thousandths of the logits' spread.  Two nearly equal tokens may then change places, and all tokens after them
differ.  So each token is judged given its predecessors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowspec_edge.d0.request import Request
from flowspec_edge.sampling.rule import Sampling, gumbel

TOLERANCE = 0.05  # of the logits' standard deviation over the text


class NearTies:
    """Decides whether near ties explain a difference; ``model`` is the whole model in transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def explain(self, request: Request, tokens: list[int], reason: str) -> bool:
        """Whether plain decoding chooses every token after its predecessors, up to ``TOLERANCE``.

        ``reason`` "stop" counts as a token.  Near ties never explain a text that ends too early or too late.
        """
        stops = sorted(request.stop_ids)
        ends_with_stop = reason == "stop"
        if not set(tokens).isdisjoint(stops) or (ends_with_stop and not stops) \
                or (len(tokens) >= request.max_new_tokens) == ends_with_stop:
            return False
        logits = self._logits([*request.prompt, *tokens])[len(request.prompt) - 1 :]
        slack = TOLERANCE * float(logits.std())
        expected = [[token] for token in tokens] + ([stops] if ends_with_stop else [])
        first = len(request.prompt) - 1
        return all(_nearly_best(row, first + i, tokens_of_row, request, slack)
                   for i, (row, tokens_of_row) in enumerate(zip(logits, expected, strict=False)))

    @torch.inference_mode()
    def _logits(self, text: list[int]) -> NDArray[np.float64]:
        """[len(text), V] of one pass over the whole text."""
        ids = torch.tensor([text], device=self._model.device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0]
        return np.asarray(logits.double().cpu().numpy())


def _nearly_best(logits: NDArray[np.float64], position: int, candidates: list[int], request: Request,
                 slack: float) -> bool:
    """Whether one of ``candidates`` could win in its row if every logit were off by up to half of ``slack``."""
    sampling = request.sampling
    if sampling.greedy:
        return bool(logits.max() - logits[candidates].max() <= slack)
    scaled, off = logits / sampling.temperature, slack / sampling.temperature
    may, must = _after_filters(scaled, sampling, off)
    noisy = scaled + gumbel(sampling.seed, position + 1, len(logits))
    rivals = noisy[must].max() if must.any() else -np.inf
    return any(may[token] and rivals - noisy[token] <= off for token in candidates)


def _after_filters(x: NDArray[np.float64], sampling: Sampling, off: float
                   ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the tokens that top-k, top-p and min-p may keep, and those that they must keep: bool [V] each.

    The values logits / T are off by up to ``off``.
    """
    descending = np.sort(x)[::-1]
    k = min(sampling.top_k or len(x), len(x))
    may, must = np.ones(len(x), bool), np.ones(len(x), bool)
    if k < len(x):
        may, must = x >= descending[k - 1] - off, x > descending[k] + off
    if sampling.top_p < 1.0:
        p = np.exp(descending[:k] - descending[0])
        mass = np.concatenate([[0.0], np.cumsum(p / p.sum()), np.ones(len(x) - k)])
        # A token is kept if the mass before it is less than top_p.
        surely = mass[np.searchsorted(-descending, -(x + off), "left")]
        perhaps = mass[np.searchsorted(-descending, -(x - off), "right") - 1]
        may &= _shifted(surely, -off) < sampling.top_p
        must &= _shifted(perhaps, off) < sampling.top_p
    may &= x - descending[0] >= sampling.least_log - off
    must &= x - descending[0] >= sampling.least_log + off
    return may, must


def _shifted(mass: NDArray[np.float64], off: float) -> NDArray[np.float64]:
    """Return the mass of tokens whose logits moved by ``off`` against all others."""
    moved = mass * np.exp(off)
    return np.asarray(moved / (moved + np.maximum(1.0 - mass, 0.0)))

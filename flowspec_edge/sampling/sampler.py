"""Sampling and ranking on the logits' device: only token ids and k scores per row leave it.

float32 kernels find candidates, and the host decides in float64.  Where float32 cannot order them, the whole
row is fetched, so :func:`choose` returns the tokens of ``sampling.rule`` on every device.

Top-p needs no sort.  A token is excluded if the tokens ahead of it hold top_p of the mass; if the token with
the best noisy score is excluded, so is every token that is not ahead of it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.sampling import rule as definition
from flowspec_edge.sampling.device_noise import SESSIONS, noise_rows
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling, gumbel_at
from flowspec_edge.sampling.top_values import chunks, fetched, first_largest, largest, packed, wide
from flowspec_edge.util.tensors import indices

_MOST_TOP_K = 256  # beyond that the definition is as fast
_CLOSE_MASS = 1e-4  # sums in float32 are better than that,
_CLOSE_SUM = 1e-9   # and these are sums in float64
_NUCLEUS_ROUNDS = 8  # 1.3 on average
_EXCLUDED = -1e30  # added to a score, or instead of it


def choose(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling,
           allowed: NDArray[np.bool_] | None = None) -> NDArray[np.int32]:
    """The tokens of ``sampling.rule.choose``, for ``logits`` [n, V] on any device: int32 [n]. Only tokens
    that are ``allowed`` [n, V], at least one in each row, are chosen; top-k and top-p count only them."""
    if not len(logits):
        return np.empty(0, np.int32)
    if allowed is not None:
        # Finite: differences of infinite scores are no numbers.
        logits = wide(logits).masked_fill(~torch.from_numpy(allowed).to(logits.device), _EXCLUDED)
    if sampling.greedy:
        return first_largest(logits).to("cpu", torch.int32).numpy()
    logits = wide(logits)
    if 0 < sampling.top_k < logits.shape[-1]:
        chosen = _draw_top_k(logits, positions, sampling)
    elif sampling.top_p < 1.0:
        chosen = np.concatenate([_draw_top_p(logits[rows], positions[rows], sampling)
                                 for rows in chunks(logits)])
    else:
        chosen = _draw_unfiltered(logits, positions, sampling)
    for row in np.flatnonzero(chosen < 0):
        chosen[row] = definition.choose(logits[row : row + 1].cpu().numpy(), positions[row : row + 1],
                                        sampling)[0]
    return chosen.astype(np.int32)


def rank_children(logits: Tensor, positions: NDArray[np.integer], k: int, sampling: Sampling, rank: Rank,
                  tau: float = 0.6, draft_vocabulary: DraftVocabulary | None = None
                  ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The k best children of each row in falling order: ids int32 [n, k], log scores float64 [n, k].

    ``rank="draft"``: by log softmax(logits) (EAGLE-2).  ``rank="noise"``: by log q + g, with the target's own
    noise; scores are log softmax((log q + g) / tau).  Greedy: both are the same.  ``logits`` are [n, V], or
    [n, D] over ``draft_vocabulary`` (q is 0 elsewhere); ids are always the target's.
    """
    logits = wide(logits)
    noisy = rank == "noise" and not sampling.greedy
    found = []
    for rows in chunks(logits):
        x = logits[rows]
        if noisy:
            x = _noisy(x, positions[rows], sampling, draft_vocabulary).div_(tau)
        values, best = largest(torch.log_softmax(x, -1), min(k, x.shape[-1]))
        found.append(packed(best, values))
    block = fetched(found)
    ids, scores = np.split(block, 2, axis=1)
    tokens = ids.astype(np.int64)
    if draft_vocabulary:
        tokens = draft_vocabulary.ids[tokens]
    return tokens.astype(np.int32), np.minimum(scores, 0.0)


def log_probs(logits: Tensor, tokens: NDArray[np.integer], most: int
              ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Log softmax at ``tokens`` [n]: float64 [n]; and ids and values of the ``most`` likeliest, falling: [n,
    most]."""
    x = logits.double()
    x = x - torch.logsumexp(x, -1, keepdim=True)
    own = x.gather(1, indices(tokens, x.device)[:, None])
    values, likeliest = largest(x, min(most, x.shape[-1]))
    return own[:, 0].cpu().numpy(), likeliest.cpu().numpy(), values.cpu().numpy()


@lru_cache(maxsize=SESSIONS)
def _ids_on(draft_vocabulary: DraftVocabulary, device: torch.device) -> Tensor:
    return indices(draft_vocabulary.ids, device)


# ---- choosing ------------------------------------------------------------------------------------
# Each returns drawn tokens, int64 [n]; -1 where the definition has to decide.


def _draw_unfiltered(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int64]:
    """argmax(x / T + g)."""
    found = [largest(_noisy(logits[rows], positions[rows], sampling), min(2, logits.shape[-1]))
             for rows in chunks(logits)]
    block = fetched([packed(ids[:, :1], values[:, :1], values[:, -1:]) for values, ids in found])
    clear = _clearly_ahead(block[:, 1], block[:, 2]) | (logits.shape[-1] == 1)
    return np.where(clear, block[:, 0], -1).astype(np.int64)


def _draw_top_k(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int64]:
    k = sampling.top_k
    if k > _MOST_TOP_K:
        return np.full(len(logits), -1)
    found = [largest(logits[rows], k + 1) for rows in chunks(logits)]
    block = fetched([packed(ids, values) for values, ids in found])
    ids, x = block[:, :k].astype(np.int64), block[:, k + 1 :]
    drawn = _draw_from(x[:, :k], ids, positions, sampling)
    return np.where(x[:, k] < x[:, k - 1], drawn, -1)  # else a further token is as likely as the last


def _draw_top_p(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int64]:
    noisy = _noisy(logits, positions, sampling)
    p = _weights(logits, 1 / sampling.temperature)
    total = p.sum(-1, keepdim=True)
    drawn, left = np.full(len(p), -1, np.int64), np.ones(len(p), bool)
    for _ in range(_NUCLEUS_ROUNDS):
        values, ids = largest(noisy, min(2, p.shape[-1]))
        own = p.gather(1, ids[:, :1])
        # In float32 tokens may be equal that are not, so the mass ahead of one lies between two sums.
        p = _above(p, own.nextafter(torch.zeros_like(own)))
        most = (p.sum(-1, keepdim=True) - own) / total
        block = fetched([packed(ids[:, :1], values[:, :1], values[:, -1:], most)])
        left &= _clearly_ahead(block[:, 1], block[:, 2]) | (p.shape[-1] == 1)
        kept = left & (block[:, 3] < sampling.top_p - _CLOSE_MASS)
        drawn[kept] = block[kept, 0].astype(np.int64)
        left &= ~kept
        if left.any():
            p = _above(p, own)
            left &= fetched([p.sum(-1, keepdim=True) / total])[:, 0] > sampling.top_p + _CLOSE_MASS
        if not left.any():
            break
        # Exclude the token and all that are not ahead of it.  (Comparing tensors is slow on a CPU.)
        behind = own.nextafter(torch.full_like(own, 2.0)) - p
        noisy = noisy.add_(behind.relu_(), alpha=_EXCLUDED)
    return drawn


def _weights(x: Tensor, scale: float) -> Tensor:
    """exp(scale x) of each row over its largest: [n, V], at least e^-80, since denormal float32 are slow."""
    below = x - x.amax(-1, keepdim=True)
    if scale != 1.0:
        below.mul_(scale)
    return below.clamp_(min=-80.0).exp_()


def _above(p: Tensor, floor: Tensor) -> Tensor:
    """``p`` [n, V], 0 where not above ``floor`` [n, 1]; by rows on a CPU, where comparing is 7 times
    slower."""
    if p.device.type != "cpu":
        return torch.where(p > floor, p, 0.0)
    for row, limit in zip(p, floor.flatten().tolist(), strict=True):
        F.threshold(row, limit, 0.0, inplace=True)
    return p


def _noisy(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling,
           draft_vocabulary: DraftVocabulary | None = None) -> Tensor:
    """x / T + g: [n, V], or [n, D] over ``draft_vocabulary``."""
    vocabulary = draft_vocabulary.vocabulary if draft_vocabulary else logits.shape[-1]
    rows = noise_rows(sampling.seed, positions + 1, vocabulary, logits)
    if draft_vocabulary:
        ids = _ids_on(draft_vocabulary, logits.device)
        rows = [row.index_select(0, ids) for row in rows]
    if logits.device.type != "cpu":
        return torch.add(torch.stack(rows), logits, alpha=1 / sampling.temperature)
    noisy = torch.empty_like(logits)  # saves one pass over memory, compared with stacking
    for g, x, out in zip(rows, logits, noisy, strict=True):
        torch.add(g, x, alpha=1 / sampling.temperature, out=out)
    return noisy


def _clearly_ahead(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether float32 can order noisy scores [n]; noise is at most 46, so it and x / T are alike in size."""
    return np.asarray(first - second > 1e-4 + 1e-6 * np.maximum(np.abs(first), np.abs(second)))


def _draw_from(x: NDArray[np.float64], ids: NDArray[np.int64], positions: NDArray[np.integer],
               sampling: Sampling) -> NDArray[np.int64]:
    """The token drawn from ``ids`` [n, c] with logits ``x``, by the definition's arithmetic: [n]."""
    order = np.lexsort((ids, -x))
    ids, scaled = np.take_along_axis(ids, order, -1), np.take_along_axis(x, order, -1) / sampling.temperature
    p = np.exp(scaled - np.logaddexp.reduce(scaled, -1, keepdims=True))
    before = np.cumsum(p, -1) - p
    rows, places = np.nonzero(before < sampling.top_p)
    scores = np.full(x.shape, -np.inf)
    scores[rows, places] = scaled[rows, places] + gumbel_at(
        sampling.seed, positions[rows] + 1, ids[rows, places])
    close = (sampling.top_p < 1.0) & (np.abs(before - sampling.top_p) < _CLOSE_SUM).any(-1)
    # Of equal scores the first, which has the lowest id of equal logits.
    return np.where(close, -1, np.take_along_axis(ids, scores.argmax(-1)[:, None], -1)[:, 0])

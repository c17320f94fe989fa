"""The rule by which every strategy chooses the next token: the Gumbel-max form of sampling.

X = argmax(log p + g), with p after temperature, top-k and top-p, and g Gumbel noise keyed by (seed,
position): a token depends on the logits, the seed and the position, never on the drafting method.  Coupling
drafts to the same noise is Daliri, Musco and Suresh, arXiv 2408.07978.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.sampling.settings import Rank as Rank
from flowspec_edge.sampling.settings import Sampling as Sampling


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """A draft model's share of the target's ``vocabulary`` tokens; ``ids`` [D] are distinct target ids."""

    ids: NDArray[np.int64]
    vocabulary: int


TAG = 0x464C4F57  # second word of every key: "FLOW"
_WORD = 2**64 - 1


@lru_cache(maxsize=16)
def gumbel(seed: int, position: int, vocabulary: int) -> NDArray[np.float64]:
    """Gumbel(0, 1) noise of every token at one absolute position: float64 [vocabulary].

    Philox4x64-10 in counter mode, raw words only, to be independent of library versions: token v takes word v
    % 4 of the block with counter [v // 4 + 1, position, 0, 0], whatever ``vocabulary`` is.
    """
    noise = gumbel_from(philox_words(seed, position, vocabulary))
    noise.setflags(write=False)
    return noise


def philox_words(seed: int, position: int, count: int) -> NDArray[np.uint64]:
    """Raw words of the first ``count`` tokens at a position: uint64 [count]."""
    # The generator increments its counter before the first block.
    return np.random.Philox(key=[seed, TAG], counter=[0, position, 0, 0]).random_raw(count)


@lru_cache(maxsize=4096)
def gumbel_of(seed: int, position: int, token: int) -> float:
    """Element ``token`` of :func:`gumbel` alone, in Python integers."""
    counter, key = [token // 4 + 1, position, 0, 0], [seed, TAG]
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [(b >> 64) ^ counter[1] ^ key[0], b & _WORD, (a >> 64) ^ counter[3] ^ key[1], a & _WORD]
        key = [(key[0] + 0x9E3779B97F4A7C15) & _WORD, (key[1] + 0xBB67AE8584CAA73B) & _WORD]
    return float(gumbel_from(np.array(counter[token % 4 : token % 4 + 1], np.uint64))[0])


def gumbel_from(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Noise of these words: float64, of their shape."""
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(uniform)))


def log_probs(logits: NDArray[np.floating], sampling: Sampling) -> NDArray[np.float64]:
    """log p after temperature, top-k, then top-p (transformers' order): float64 [n, V]; excluded: -inf.
    Top-p keeps the smallest set of likeliest tokens with mass top_p, at least one.  Undefined for greedy."""
    x = logits.astype(np.float64) / sampling.temperature
    if 0 < sampling.top_k < x.shape[-1]:
        kth = np.partition(x, -sampling.top_k, axis=-1)[..., -sampling.top_k, None]
        x = np.where(x < kth, -np.inf, x)
    x = x - _logsumexp(x)
    if sampling.top_p < 1.0:
        order = np.argsort(-x, axis=-1, kind="stable")
        ranked = np.exp(np.take_along_axis(x, order, axis=-1))
        before = np.cumsum(ranked, axis=-1) - ranked
        drop = np.empty_like(x, dtype=bool)
        np.put_along_axis(drop, order, before >= sampling.top_p, axis=-1)
        x = np.where(drop, -np.inf, x)
        x = x - _logsumexp(x)
    return x


def choose(logits: NDArray[np.floating], positions: NDArray[np.integer], sampling: Sampling
           ) -> NDArray[np.int32]:
    """int32 [n] from the target's ``logits`` [n, V]; a successor takes the noise of its row's position +
    1."""
    if sampling.greedy or not len(logits):
        return np.asarray(logits.argmax(axis=-1), dtype=np.int32) if len(logits) else np.empty(0, np.int32)
    scores = log_probs(logits, sampling)
    for i, position in enumerate(positions):
        scores[i] += gumbel(sampling.seed, int(position) + 1, scores.shape[-1])
    return np.asarray(scores.argmax(axis=-1), dtype=np.int32)


def scores_from_probabilities(tokens: NDArray[np.int32], p: NDArray[np.float64], position: int,
                              sampling: Sampling, rank: Rank) -> NDArray[np.float64]:
    """Log scores [k] of children ``tokens`` [k] whose probabilities ``p`` [k] alone are known.

    ``rank="noise"`` while sampling: given its own g, a child beats all others together, of mass 1 - p, with
    probability exp(-(1 - p) / p * exp(-g)), whose mean over g is p.
    """
    if rank == "draft" or sampling.greedy:
        return np.log(p)
    g = np.array([gumbel_of(sampling.seed, position + 1, token) for token in tokens.tolist()])
    return np.asarray(-(1 - p) / p * np.exp(-g))


def _logsumexp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    top = x.max(axis=-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(x - top).sum(axis=-1, keepdims=True)))

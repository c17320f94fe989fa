"""The rule by which every strategy chooses the next token: the Gumbel-max form of sampling.

X = argmax(log p + g), with p after temperature, top-k, top-p and min-p, and g Gumbel noise keyed by (seed,
position): a token depends on the logits, the seed and the position, never on the drafting method.  Coupling
drafts to the same noise is Daliri, Musco and Suresh, arXiv 2408.07978.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.sampling.settings import Rank as Rank
from flowspec_edge.sampling.settings import Sampling as Sampling


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """A draft model's share of the target's ``vocabulary`` tokens; ``ids`` [D] are distinct target ids."""

    ids: NDArray[np.int64]
    vocabulary: int


GAMMA = 0x9E3779B97F4A7C15 - 2**64  # between the states of SplitMix64, as int64


@lru_cache(maxsize=16)
def gumbel(seed: int, position: int, vocabulary: int) -> NDArray[np.float64]:
    """Gumbel(0, 1) noise of every token at one absolute position, whatever ``vocabulary`` is: float64 [vocabulary]."""
    noise = gumbel_at(seed, np.array([position]), np.arange(vocabulary))
    noise.setflags(write=False)
    return noise


def gumbel_at(seed: int, positions: NDArray[np.integer], tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """Noise of ``tokens`` at ``positions``: float64; both broadcast, and one has a dimension at least."""
    return gumbel_from(splitmix64(keys(seed, positions), tokens))


def gumbel_from(words: NDArray[np.int64]) -> NDArray[np.float64]:
    """-log(-log(u)) with u = (word + 1/2) / 2^64, plus 1 if that is negative: float64, of their shape.

    Near 0 and near 1 a word has as many digits as a float holds, in 32 bits, too: the noise is from -3.8 to
    45.1, and no token's chance is rounded to nothing.
    """
    t = words + 0.5
    t *= 2.0**-64
    log_u = np.log(np.where(t > 0.0, t, 1.0))
    log_u += np.log1p(np.minimum(t, 0.0, out=t), out=t)
    for step in (np.negative, np.log, np.negative):
        step(log_u, out=log_u)
    return log_u


def keys(seed: int, positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """Seeds of the words at each position, outputs of ``seed``'s generator: int64, of their shape.

    Token v takes output v of its position's.
    """
    return splitmix64(np.array([seed], np.int64), positions)


def splitmix64(start: NDArray[np.int64], index: NDArray[np.integer]) -> NDArray[np.int64]:
    """Output ``index`` (from 0) of SplitMix64 seeded with ``start``: the bits of uint64 as int64; both broadcast.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the constants
    of Vigna's splitmix64.c: its state only counts, so any output can be had alone.
    """
    state = index.astype(np.int64)
    state += 1
    state *= GAMMA
    return np.asarray(mixed(start + state))


def mixed(x: Any) -> Any:
    """SplitMix64's output for these states, in their place: an int64 array of numpy, or of torch on any device."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        upper = x >> shift
        upper &= (1 << 64 - shift) - 1  # the shift repeats the sign
        x ^= upper
        if factor != 1:
            x *= factor
    return x


def log_probs(logits: NDArray[np.floating], sampling: Sampling) -> NDArray[np.float64]:
    """Return log p after temperature, top-k, top-p, then min-p (transformers' order): float64 [n, V].

    Excluded tokens have -inf.  Top-p keeps the smallest set of likeliest tokens with mass top_p, at least one.
    Undefined for greedy.
    """
    x = scaled = logits.astype(np.float64) / sampling.temperature
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
    if sampling.min_p:
        x = np.where(scaled - scaled.max(axis=-1, keepdims=True) < sampling.least_log, -np.inf, x)
        x = x - _logsumexp(x)
    return x


def choose(logits: NDArray[np.floating], positions: NDArray[np.integer], sampling: Sampling
           ) -> NDArray[np.int32]:
    """int32 [n] from the target's ``logits`` [n, V]; a successor takes the noise of its row's position + 1."""
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
    g = gumbel_at(sampling.seed, np.array([position + 1]), tokens)
    return np.asarray(-(1 - p) / p * np.exp(-g))


def _logsumexp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    top = x.max(axis=-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(x - top).sum(axis=-1, keepdims=True)))

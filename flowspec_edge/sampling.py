"""The one rule by which every strategy chooses the next token.

Knows temperature, top-k, top-p and the shared noise.  Does not know trees or models: what is
drawn at a position depends on the logits, the seed and the position alone, never on the method
that asked.  X = argmax(log p + g), g = Gumbel noise keyed by (seed, position): the Gumbel-max
form of sampling from p; coupling a draft to the same noise is Daliri, Musco and Suresh,
arXiv 2408.07978.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import UsageError

Rank = Literal["draft", "noise"]


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The tokens that a draft model can name, where they are only a part of the target's.

    ids         [D]  int64, distinct: the target's id of each
    vocabulary  V, the target's tokens
    """

    ids: NDArray[np.int64]
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request's sampling parameters; ``temperature`` 0 is greedy, ``top_k`` 0 keeps all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not 0.001 <= self.temperature <= 100.0:
            raise UsageError(f"temperature must be 0 (greedy) or 0.001 to 100, not {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top-k must be 0 (off) or positive, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be between 0 and 2^63 - 1, not {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@lru_cache(maxsize=64)
def gumbel(seed: int, position: int, vocabulary: int) -> NDArray[np.float64]:
    """Gumbel(0, 1) noise for every token at one absolute position: float64 [vocabulary].

    Philox in counter mode, raw words only, so the stream is fixed by its definition and not by
    the version of a library.  Element v does not depend on ``vocabulary``.
    """
    words = np.random.Philox(key=[seed, 0x464C4F57], counter=[0, position, 0, 0]).random_raw(vocabulary)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise = -np.log(-np.log(uniform))
    noise.setflags(write=False)
    return noise


def log_probs(logits: NDArray[np.floating], sampling: Sampling) -> NDArray[np.float64]:
    """log p after temperature, then top-k, then top-p: float64 [n, V]; excluded tokens are -inf.

    As transformers orders its warpers: top-p keeps the smallest set of most likely tokens whose
    mass reaches top_p, the first of them always.  Not defined for greedy.
    """
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
    """The next token after each row: int32 [n].

    logits     [n, V]  the target's, at rows that stand at ``positions``
    positions  [n]     the row's own position; its successor is drawn with the noise of position + 1
    """
    if sampling.greedy or not len(logits):
        return np.asarray(logits.argmax(axis=-1), dtype=np.int32) if len(logits) else np.empty(0, np.int32)
    scores = log_probs(logits, sampling)
    for i, position in enumerate(positions):
        scores[i] += gumbel(sampling.seed, int(position) + 1, scores.shape[-1])
    return np.asarray(scores.argmax(axis=-1), dtype=np.int32)


def rank_children(logits: NDArray[np.floating], positions: NDArray[np.integer], k: int,
                  sampling: Sampling, rank: Rank, tau: float = 0.6, drafted: DraftVocabulary | None = None
                  ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The k best children of each row in falling order: ids int32 [n, k], log scores float64 [n, k].

    ``rank="draft"``: by the draft's confidence, log softmax(logits) (EAGLE-2).
    ``rank="noise"``: by log q + g with the very noise the target will be sampled with; scores are
    log softmax((log q + g) / tau).  Greedy sampling has no noise, so both are the same there.

    ``logits`` are over all tokens, [n, V], or over those of ``drafted`` only, [n, D]: then q is 0
    elsewhere, and g is still the target's.  The ids returned are always the target's.
    """
    noisy = rank == "noise" and not sampling.greedy
    x = logits.astype(np.float64)
    if noisy:
        x = x / sampling.temperature
        x = x - _logsumexp(x)
        for i, position in enumerate(positions):
            if drafted is None:
                x[i] += gumbel(sampling.seed, int(position) + 1, x.shape[-1])
            else:
                x[i] += gumbel(sampling.seed, int(position) + 1, drafted.vocabulary)[drafted.ids]
        x = x / tau
    k = min(k, x.shape[-1])
    best = np.argpartition(x, -k, axis=-1)[:, -k:]
    score = np.take_along_axis(x, best, axis=-1) - _logsumexp(x)
    order = np.argsort(-score, axis=-1, kind="stable")
    tokens = np.take_along_axis(best, order, axis=-1)
    if drafted is not None:
        tokens = drafted.ids[tokens]
    return tokens.astype(np.int32), np.take_along_axis(score, order, axis=-1)


def chance_scores(tokens: NDArray[np.int32], p: NDArray[np.float64], position: int, sampling: Sampling,
                  rank: Rank, vocabulary: int) -> NDArray[np.float64]:
    """Log scores [k] of children ``tokens`` [k] of a row at ``position``, each of which is the next token
    with probability ``p`` [k]; the counterpart of :func:`rank_children` for who knows no distribution.

    ``rank="noise"`` while sampling: of all the noise that decides whether a child wins, its own g is
    the part that concerns it; given g, it wins over everything else together, whose mass is 1 - p,
    with probability exp(-(1 - p) / p * exp(-g)), whose mean over g is p again.
    """
    if rank == "draft" or sampling.greedy:
        return np.log(p)
    g = gumbel(sampling.seed, position + 1, vocabulary)[tokens]
    return np.asarray(-(1 - p) / p * np.exp(-g))


def _logsumexp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    top = x.max(axis=-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(x - top).sum(axis=-1, keepdims=True)))

"""Sampling and ranking where the logits are: only token ids and k scores a row leave the device.

``sampling`` defines the rule in float64.  Here float32 kernels find the few tokens that can win; the
host then decides among them by the definition's own arithmetic.  Where float32 leaves more than one
token in the race, the row is fetched and the definition decides, so :func:`choose` returns the
definition's tokens on every device.

Top-p needs no sort.  A token is excluded if the tokens ahead of it hold top_p of the mass, so the drawn
token is the one with the best noisy score among those that are not: if too much lies ahead of the best
of all, it is excluded, and with it all that is not ahead of it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge import sampling as definition
from flowspec_edge.sampling import DraftVocabulary, Rank, Sampling, philox_words
from flowspec_edge.tensors import indices

_MOST_TOP_K = 256  # beyond that the definition is as fast
_BITS = 6
_BLOCK = 1 << _BITS  # of a row, for the search of its largest values
_SESSIONS = 8  # that draw in turns: what each of them needs on an accelerator stays there
_BLOCK_POSITIONS = 16  # whose noise an accelerator computes together: launches count there, not words
_CLOSE_MASS = 1e-4  # sums in float32 are better than that,
_CLOSE_SUM = 1e-9   # and these are sums in float64
_NUCLEUS_ROUNDS = 8  # 1.3 on average
_EXCLUDED = -1e30  # added to a score
_CPU_VALUES = 200_000  # of a chunk of rows that stays in a core's cache
_WIDE = 1 << 32


def choose(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int32]:
    """The next token after each row: int32 [n], those of :func:`flowspec_edge.sampling.choose`.

    logits     [n, V]  floating point, on any device
    positions  [n]     the rows' own positions
    """
    if not len(logits):
        return np.empty(0, np.int32)
    if sampling.greedy:
        return _first_largest(logits).to("cpu", torch.int32).numpy()
    logits = _wide(logits)
    if 0 < sampling.top_k < logits.shape[-1]:
        chosen = _of_top_k(logits, positions, sampling)
    elif sampling.top_p < 1.0:
        chosen = _of_top_p(logits, positions, sampling)
    else:
        chosen = _of_all(logits, positions, sampling)
    for row in np.flatnonzero(chosen < 0):
        chosen[row] = definition.choose(logits[row : row + 1].cpu().numpy(), positions[row : row + 1],
                                        sampling)[0]
    return chosen.astype(np.int32)


def rank_children(logits: Tensor, positions: NDArray[np.integer], k: int, sampling: Sampling, rank: Rank,
                  tau: float = 0.6, drafted: DraftVocabulary | None = None
                  ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The k best children of each row in falling order: ids int32 [n, k], log scores float64 [n, k].

    ``rank="draft"``: by the draft's confidence, log softmax(logits) (EAGLE-2).
    ``rank="noise"``: by log q + g with the very noise the target will be sampled with; scores are
    log softmax((log q + g) / tau).  Greedy sampling has no noise, so both are the same there.

    ``logits`` are over all tokens, [n, V], or over those of ``drafted`` only, [n, D]: then q is 0
    elsewhere, and g is still the target's.  The ids returned are always the target's.
    """
    logits = _wide(logits)
    noisy = rank == "noise" and not sampling.greedy
    found = []
    for rows in _chunks(logits):
        x = logits[rows]
        if noisy:
            x = _noisy(x, positions[rows], sampling, drafted).div_(tau)
        values, best = _largest(torch.log_softmax(x, -1), min(k, x.shape[-1]))
        found.append(_packed(best, values))
    block = _fetched(found)
    ids, scores = np.split(block, 2, axis=1)
    tokens = ids.astype(np.int64)
    return (drafted.ids[tokens] if drafted else tokens).astype(np.int32), np.minimum(scores, 0.0)


def log_probs(logits: Tensor, tokens: NDArray[np.integer], most: int
              ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Log softmax of ``logits`` [n, V] at ``tokens`` [n]: float64 [n]; and of each row the ``most``
    likeliest tokens, in falling order, with theirs: int64 and float64 [n, most]."""
    x = logits.double()
    x = x - torch.logsumexp(x, -1, keepdim=True)
    own = x.gather(1, indices(tokens, x.device)[:, None])
    values, likeliest = _largest(x, min(most, x.shape[-1]))
    return own[:, 0].cpu().numpy(), likeliest.cpu().numpy(), values.cpu().numpy()


def noise(seed: int, positions: NDArray[np.integer], vocabulary: int, like: Tensor) -> Tensor:
    """Gumbel noise at each of ``positions`` [n]: [n, vocabulary] of the type and on the device of ``like``.

    The words are those of :func:`flowspec_edge.sampling.philox_words`, bit for bit, on every device.
    """
    return torch.stack(_noise_rows(seed, positions, vocabulary, like))


def _noise_rows(seed: int, positions: NDArray[np.integer], vocabulary: int, like: Tensor) -> list[Tensor]:
    key = seed, vocabulary, like.device, like.dtype
    row = _noise_row if like.device.type == "cpu" else _noise_of_block
    return [row(int(position), *key) for position in positions]


@lru_cache(maxsize=_SESSIONS)
def _ids_on(drafted: DraftVocabulary, device: torch.device) -> Tensor:
    return indices(drafted.ids, device)


# ---- the noise -----------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _noise_row(position: int, seed: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _gumbel(torch.from_numpy(philox_words(seed, position, vocabulary).view(np.int64)), dtype)


def _noise_of_block(position: int, seed: int, vocabulary: int, device: torch.device, dtype: torch.dtype
                    ) -> Tensor:
    block, place = divmod(position, _BLOCK_POSITIONS)
    return _noise_block(block, seed, vocabulary, device, dtype)[place]


@lru_cache(maxsize=2 * _SESSIONS)  # a tree may reach into the next block
def _noise_block(block: int, seed: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[_BLOCK_POSITIONS, vocabulary], for as many positions in a row."""
    first = block * _BLOCK_POSITIONS
    positions = torch.arange(first, first + _BLOCK_POSITIONS, device=device)
    return _gumbel(device_words(seed, positions, vocabulary), dtype)


def device_words(seed: int, positions: Tensor, vocabulary: int) -> Tensor:
    """The bits of the Philox words at ``positions`` [p] int64, on their device: int64 [p, vocabulary]."""
    blocks = torch.arange((vocabulary + 3) // 4, device=positions.device)
    return _words_of(seed, positions[:, None], blocks[None]).flatten(1)[:, :vocabulary]


def _words_of(seed: int, positions: Tensor, blocks: Tensor) -> Tensor:
    """The four words of each block, int64 [..., 4], where ``positions`` and ``blocks`` broadcast to [...]."""
    zero = torch.zeros((), dtype=torch.int64, device=positions.device)
    counter, key = [blocks + 1, positions, zero, zero], [seed, definition.TAG]
    for _ in range(10):
        high0, low0 = _multiplied(0xD2E7470EE14C6C93, counter[0])
        high1, low1 = _multiplied(0xCA5A826395121157, counter[2])
        counter = [high1 ^ counter[1] ^ _signed(key[0]), low1, high0 ^ counter[3] ^ _signed(key[1]), low0]
        key = [key[0] + 0x9E3779B97F4A7C15, key[1] + 0xBB67AE8584CAA73B]
    return torch.stack(torch.broadcast_tensors(*counter), -1)


def _multiplied(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of a 128-bit product, both as int64 bits, by products of 32-bit limbs."""
    a_low, a_high = factor % _WIDE, factor // _WIDE
    x_low, x_high = x & (_WIDE - 1), _upper(x)
    low, first, second = x_low * a_low, x_low * a_high, x_high * a_low
    carry = _upper(low) + (first & (_WIDE - 1)) + (second & (_WIDE - 1))
    return x_high * a_high + _upper(first) + _upper(second) + _upper(carry), x * _signed(factor)


def _upper(x: Tensor) -> Tensor:
    return (x >> 32) & (_WIDE - 1)


def _signed(word: int) -> int:
    word %= 1 << 64
    return word - (1 << 64) if word >> 63 else word


def _gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    """-log(-log(u)) of words' bits, in float64 as the definition has it."""
    u = ((words >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53)
    return u.log_().neg_().log_().neg_().to(dtype)


# ---- choosing ------------------------------------------------------------------------------------
# Each returns drawn tokens int64 [n]; -1 where the definition has to decide.


def _of_all(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int64]:
    """argmax(x / T + g)."""
    found = [_largest(_noisy(logits[rows], positions[rows], sampling), min(2, logits.shape[-1]))
             for rows in _chunks(logits)]
    block = _fetched([_packed(ids[:, :1], values[:, :1], values[:, -1:]) for values, ids in found])
    clear = _ahead(block[:, 1], block[:, 2]) | (logits.shape[-1] == 1)
    return np.where(clear, block[:, 0], -1).astype(np.int64)


def _of_top_k(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int64]:
    """From the k likeliest tokens, or those of them that top-p leaves."""
    k = sampling.top_k
    if k > _MOST_TOP_K:
        return np.full(len(logits), -1)
    found = [_largest(logits[rows], k + 1) for rows in _chunks(logits)]
    block = _fetched([_packed(ids, values) for values, ids in found])
    ids, x = block[:, :k].astype(np.int64), block[:, k + 1 :]
    drawn = _among(x[:, :k], ids, positions, sampling)
    return np.where(x[:, k] < x[:, k - 1], drawn, -1)  # else a further token is as likely as the last


def _of_top_p(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int64]:
    """The best noisy score of all; while top_p of the mass lies ahead of its token, the best of those."""
    return np.concatenate([_of_nucleus(logits[rows], positions[rows], sampling) for rows in _chunks(logits)])


def _of_nucleus(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int64]:
    noisy = _noisy(logits, positions, sampling)
    p = _weights(logits, 1 / sampling.temperature)
    total = p.sum(-1, keepdim=True)
    drawn, left = np.full(len(p), -1, np.int64), np.ones(len(p), bool)
    for _ in range(_NUCLEUS_ROUNDS):
        values, ids = _largest(noisy, min(2, p.shape[-1]))
        own = p.gather(1, ids[:, :1])
        # In float32 tokens may be equal that are not, so the mass ahead of one lies between two sums.
        p = _above(p, own.nextafter(torch.zeros_like(own)))
        most = (p.sum(-1, keepdim=True) - own) / total
        block = _fetched([_packed(ids[:, :1], values[:, :1], values[:, -1:], most)])
        left &= _ahead(block[:, 1], block[:, 2]) | (p.shape[-1] == 1)
        kept = left & (block[:, 3] < sampling.top_p - _CLOSE_MASS)
        drawn[kept] = block[kept, 0].astype(np.int64)
        left &= ~kept
        if left.any():
            p = _above(p, own)
            left &= _fetched([p.sum(-1, keepdim=True) / total])[:, 0] > sampling.top_p + _CLOSE_MASS
        if not left.any():
            break
        # What is not ahead of it goes, the token itself included.  (Comparing tensors is slow on a CPU.)
        behind = own.nextafter(torch.full_like(own, 2.0)) - p
        noisy = noisy.add_(behind.relu_(), alpha=_EXCLUDED)
    return drawn


def _weights(x: Tensor, scale: float) -> Tensor:
    """exp(scale x) of each row over its largest: [n, V].

    What is e^80 times smaller counts as that: results that are no normal float32 take many times as long.
    """
    below = x - x.amax(-1, keepdim=True)
    if scale != 1.0:
        below.mul_(scale)
    return below.clamp_(min=-80.0).exp_()


def _above(p: Tensor, floor: Tensor) -> Tensor:
    """``p`` [n, V] with 0 for what is not above ``floor`` [n, 1]; on a CPU in place, and row by row, since
    comparing tensors takes seven times as long there."""
    if p.device.type != "cpu":
        return torch.where(p > floor, p, 0.0)
    for row, limit in zip(p, floor.flatten().tolist(), strict=True):
        F.threshold(row, limit, 0.0, inplace=True)
    return p


def _noisy(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling,
           drafted: DraftVocabulary | None = None) -> Tensor:
    """x / T + g: [n, V], or over the ``drafted`` tokens."""
    vocabulary = drafted.vocabulary if drafted else logits.shape[-1]
    rows = _noise_rows(sampling.seed, positions + 1, vocabulary, logits)
    if drafted:
        rows = [row.index_select(0, _ids_on(drafted, logits.device)) for row in rows]
    if logits.device.type != "cpu":
        return torch.add(torch.stack(rows), logits, alpha=1 / sampling.temperature)
    noisy = torch.empty_like(logits)  # a pass over memory less than stacking the rows first
    for g, x, out in zip(rows, logits, noisy, strict=True):
        torch.add(g, x, alpha=1 / sampling.temperature, out=out)
    return noisy


def _ahead(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether float32 is sure of the order of noisy scores [n]; noise is at most 38, so they and x / T are
    alike in size."""
    return np.asarray(first - second > 1e-4 + 1e-6 * np.maximum(np.abs(first), np.abs(second)))


def _among(x: NDArray[np.float64], ids: NDArray[np.int64], positions: NDArray[np.integer], sampling: Sampling
           ) -> NDArray[np.int64]:
    """Drawn from the tokens ``ids`` [n, c] alone, with logits ``x``, by the definition's arithmetic."""
    order = np.lexsort((ids, -x))
    ids, scaled = np.take_along_axis(ids, order, -1), np.take_along_axis(x, order, -1) / sampling.temperature
    p = np.exp(scaled - np.logaddexp.reduce(scaled, -1, keepdims=True))
    before = np.cumsum(p, -1) - p
    rows, places = np.nonzero(before < sampling.top_p)
    scores = np.full(x.shape, -np.inf)
    scores[rows, places] = scaled[rows, places] + _gumbel_at(
        sampling.seed, positions[rows] + 1, ids[rows, places])
    close = (sampling.top_p < 1.0) & (np.abs(before - sampling.top_p) < _CLOSE_SUM).any(-1)
    # Of equal scores the first, which has the lowest id of equal logits.
    return np.where(close, -1, np.take_along_axis(ids, scores.argmax(-1)[:, None], -1)[:, 0])


def _gumbel_at(seed: int, positions: NDArray[np.integer], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The definition's noise of single tokens [m] at ``positions`` [m]: float64 [m]."""
    at = torch.from_numpy(positions.astype(np.int64))
    words = _words_of(seed, at, torch.from_numpy(tokens // 4)).numpy()
    return definition.gumbel_from(words[np.arange(len(tokens)), tokens % 4].view(np.uint64))


# ---- largest values ------------------------------------------------------------------------------


def _chunks(logits: Tensor) -> list[slice]:
    """Rows that are worked on together: on a CPU as many as stay in its cache."""
    n, vocabulary = logits.shape
    parts = -(-n * vocabulary // _CPU_VALUES) if logits.device.type == "cpu" else 1
    step = max(1, -(-n // max(parts, 1)))
    return [slice(lo, lo + step) for lo in range(0, n, step)]


def _first_largest(x: Tensor) -> Tensor:
    """The first of the largest values' places: int64 [n].

    Block by block, since torch's argmax over a long row is slow on a CPU.
    """
    n, width = x.shape
    whole = width // _BLOCK * _BLOCK
    if whole < 4 * _BLOCK:
        return x.argmax(-1)
    blocks = x[:, :whole].view(n, -1, _BLOCK)
    block = blocks.amax(-1).argmax(-1)
    rows = torch.arange(n, device=x.device)
    best = blocks[rows, block].argmax(-1) + block * _BLOCK
    if whole < width:
        rest = x[:, whole:].argmax(-1) + whole
        best = torch.where(x[rows, rest] > x[rows, best], rest, best)
    return best


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row in falling order and their places: [n, k] and int64 [n, k].

    They lie in the k blocks with the largest maxima: two short searches instead of a long one.
    """
    n, width = x.shape
    whole = width // _BLOCK * _BLOCK
    if whole < 4 * k * _BLOCK:
        top = x.topk(k)
        return top.values, top.indices
    blocks = x[:, :whole].view(n, -1, _BLOCK)
    chosen = blocks.amax(-1).topk(k, sorted=False).indices
    values = blocks.gather(1, chosen[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    if whole < width:
        values = torch.cat((values, x[:, whole:]), 1)
    top = values.topk(k)
    at = top.indices  # in the chosen blocks, one after the other; then in the rest of the row
    if whole == width:
        return top.values, chosen.gather(1, at >> _BITS).mul_(_BLOCK).add_(at & (_BLOCK - 1))
    inside = at.clamp(max=k * _BLOCK - 1)
    places = chosen.gather(1, inside >> _BITS).mul_(_BLOCK).add_(inside & (_BLOCK - 1))
    return top.values, torch.where(at < k * _BLOCK, places, at + (whole - k * _BLOCK))


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _packed(ids: Tensor, *values: Tensor) -> Tensor:
    """One tensor for one transfer; float32 holds ids up to 2^24 exactly."""
    return torch.cat((ids.to(values[0].dtype), *values), 1)


def _fetched(parts: list[Tensor]) -> NDArray[np.float64]:
    return np.concatenate([part.cpu().numpy() for part in parts]).astype(np.float64)

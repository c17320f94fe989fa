"""Sampling and ranking on the logits' device: only token ids and k scores per row leave it.

float32 kernels find candidates, and the host decides in float64.  Where float32 cannot order them, the whole
row is fetched, so :func:`choose` returns the tokens of ``sampling.rule`` on every device.

Top-p needs no sort.  A token is excluded if the tokens ahead of it hold top_p of the mass; if the token with
the best noisy score is excluded, so is every token that is not ahead of it.

The noise is that of ``sampling.rule`` on any device, from the same words, bit for bit, in a model's dtype.
The words stay whole until they are floats, so float32 suffices for their logarithms. The largest values of
a long row take two short searches instead of a long one.

Penalties use the counts of the answer up to a row, which the row's own path in the draft tree determines, so
every strategy chooses the same tokens.  A change depends on a count alone, and on whether the text has the
token, never on how these came to be: rounding is the same, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.sampling import rule as definition
from flowspec_edge.sampling.rule import GAMMA, DraftVocabulary, Rank, Sampling, gumbel_at, keys, mixed
from flowspec_edge.sampling.settings import Penalties
from flowspec_edge.util.tensors import indices, to_device

SESSIONS = 8  # concurrent sessions whose tables are kept
_BLOCK = 8  # positions, computed together on an accelerator: saves launches, delays no draft pass by much


def noise_rows(seed: int, positions: NDArray[np.integer], vocabulary: int, like: Tensor) -> list[Tensor]:
    """Return the noise [vocabulary] for each position, with the dtype (float32 or float64) and device of ``like``."""
    cached_blocks, count = (_rows, 1) if like.device.type == "cpu" else (_blocks, _BLOCK)
    return [cached_blocks(position // count, count, seed, vocabulary, like.device, like.dtype)[position % count]
            for position in positions.tolist()]


def _noise(block: int, count: int, seed: int, vocabulary: int, device: torch.device, dtype: torch.dtype
           ) -> Tensor:
    """[count, vocabulary], for the consecutive positions of a block."""
    positions = np.arange(count) + block * count
    return gumbel_from(device_words(seed, positions, vocabulary, device), dtype)


_rows = lru_cache(maxsize=8 * SESSIONS)(_noise)
_blocks = lru_cache(maxsize=2 * SESSIONS)(_noise)  # a tree may reach into the next block


def gumbel_from(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``rule.gumbel_from`` in ``dtype``, without comparisons, which on a CPU take longer than logarithms."""
    t = torch.add(torch.tensor(2.0**-65, dtype=dtype), words, alpha=2.0**-64)
    log_u = F.threshold(t, 0.0, 1.0).log_().add_(t.clamp_(max=0.0).log1p_())
    return log_u.neg_().log_().neg_()


def device_words(seed: int, positions: NDArray[np.integer], vocabulary: int, device: torch.device) -> Tensor:
    """Return the words of the first ``vocabulary`` tokens at ``positions`` [p]: int64 [p, vocabulary]."""
    token_steps = torch.arange(1, vocabulary + 1, device=device).mul_(GAMMA)
    words = torch.empty(len(positions), vocabulary, dtype=torch.int64, device=device)
    for row, key in zip(words, keys(seed, positions).tolist(), strict=True):
        torch.add(token_steps, key, out=row)  # an upload of all keys would wait for the device
    mixed(words)
    return words


_SPAN = 64  # of a row
_CPU_VALUES = 200_000  # of a chunk of rows that stays in a core's cache


def chunks(logits: Tensor) -> list[slice]:
    """Rows to process together: on a CPU as many as stay in its cache."""
    n, vocabulary = logits.shape
    parts = -(-n * vocabulary // _CPU_VALUES) if logits.device.type == "cpu" else 1
    step = max(1, -(-n // max(parts, 1)))
    return [slice(lo, lo + step) for lo in range(0, n, step)]


def first_largest(x: Tensor) -> Tensor:
    """First index of each maximum: int64 [n]; in blocks, since torch's argmax is slow for long CPU rows."""
    n, width = x.shape
    full_width = width // _SPAN * _SPAN
    if full_width < 4 * _SPAN:
        return x.argmax(-1)
    blocks = x[:, :full_width].view(n, -1, _SPAN)
    block = blocks.amax(-1).argmax(-1)
    rows = torch.arange(n, device=x.device)
    best = blocks[rows, block].argmax(-1) + block * _SPAN
    if full_width < width:
        last_best = x[:, full_width:].argmax(-1) + full_width
        best = torch.where(x[rows, last_best] > x[rows, best], last_best, best)
    return best


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row, falling, and their indices: [n, k] and int64 [n, k]."""
    n, width = x.shape
    full_width = width // _SPAN * _SPAN
    if full_width < 4 * k * _SPAN:
        top = x.topk(k)
        return top.values, top.indices
    spans = x[:, :full_width].view(n, -1, _SPAN).amax(-1).topk(k, sorted=False).indices
    within, beyond = _offsets(full_width, width, x.device)
    ids = torch.add(within, spans[..., None], alpha=_SPAN).flatten(1)  # of the chosen blocks
    if full_width < width:  # and of the rest of the row
        ids = torch.cat((ids, beyond.expand(n, -1)), 1)
    top = x.gather(1, ids).topk(k)
    return top.values, ids.gather(1, top.indices)


@lru_cache(maxsize=8)
def _offsets(full_width: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places in a block, int64 [_SPAN], and in a row after its last block."""
    return torch.arange(_SPAN, device=device), torch.arange(full_width, width, device=device)


def wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def packed(ids: Tensor, *values: Tensor) -> Tensor:
    """One tensor for one transfer; float32 holds ids up to 2^24 exactly."""
    return torch.cat((ids.to(values[0].dtype), *values), 1)


def fetched(parts: list[Tensor]) -> NDArray[np.float64]:
    return np.concatenate([part.cpu().numpy() for part in parts]).astype(np.float64)


class AnswerPenalties:
    """The penalties of one answer, which grows."""

    def __init__(self, penalties: Penalties, prompt: Iterable[int] = ()) -> None:
        self._penalties = penalties
        self._counts = Counter[int]()  # of the answer
        self._state: _PenaltyState | None = None  # after the answer
        self._outdated = {*penalties.logit_bias}  # tokens
        if penalties.repetition != 1.0:
            self._text_tokens = {*prompt}  # of the prompt and the answer
            self._outdated |= self._text_tokens
        else:
            self._text_tokens = set()

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens`` to the answer."""
        for token in tokens:
            self._counts[token] += 1
            self._text_tokens.add(token)
            self._outdated.add(token)

    @torch.inference_mode()
    def applied(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return ``logits`` [n, V] with the changes, at least in float32.

        ``paths`` has, for each row, the tokens between the answer and the row's successor.
        """
        logits = wide(logits)
        if self._state is None:
            width = logits.shape[-1]
            self._state = _PenaltyState(logits.new_zeros(width), logits.new_zeros(width, dtype=torch.bool),
                                        logits.new_zeros(width))
        if self._outdated:
            tokens = sorted(self._outdated)
            new = self._state_of(logits, [(token, self._counts[token], token in self._text_tokens)
                                          for token in tokens])
            at = torch.tensor(tokens, device=logits.device)
            for column, value in zip(self._state, new, strict=True):
                column[at] = value
            self._outdated.clear()
        changed = self._changed(logits, self._state)
        counted_cells = [(row, token, self._counts[token] + more)
                         for row, path in enumerate(paths) for token, more in Counter(path).items()]
        if counted_cells:
            rows, columns, counts = zip(*counted_cells, strict=True)
            cells = torch.tensor(rows, device=logits.device), torch.tensor(columns, device=logits.device)
            state = self._state_of(logits, [(token, count, True)
                                            for token, count in zip(columns, counts, strict=True)])
            changed[cells] = self._changed(logits[cells], state)
        return changed

    def _state_of(self, like: Tensor, token_counts: Sequence[tuple[int, int, bool]]) -> _PenaltyState:
        """Make the changes of ``token_counts``: tokens, their counts in an answer, and whether the text has them.

        Without a repetition penalty the changes are one sum.
        """
        bias = [self._penalties.logit_bias.get(token, 0.0) for token, _, _ in token_counts]
        costs = [self._penalties.cost(count) for _, count, _ in token_counts]
        if self._penalties.repetition == 1.0:
            bias, costs = [0.0] * len(bias), [cost - add for add, cost in zip(bias, costs, strict=True)]
        return _PenaltyState(like.new_tensor(bias), like.new_tensor([in_text for _, _, in_text in token_counts]).bool(),
                             like.new_tensor(costs))

    def _changed(self, logits: Tensor, state: _PenaltyState) -> Tensor:
        factor = self._penalties.repetition
        if factor != 1.0:
            logits = logits + state.bias
            logits = torch.where(state.in_text, torch.where(logits < 0, logits * factor, logits / factor),
                                 logits)
        return logits - state.cost


class _PenaltyState(NamedTuple):
    """For each token: what is added to its logit first, whether the text has it, and what is subtracted last."""

    bias: Tensor
    in_text: Tensor
    cost: Tensor


_MOST_TOP_K = 256  # beyond that the definition is as fast
_CLOSE_MASS = 1e-4  # sums in float32 are better than that,
_CLOSE_SUM = 1e-9   # and these are sums in float64
_NUCLEUS_ROUNDS = 8  # 1.3 on average
_EXCLUDED = -1e30  # added to a score, or instead of it


def choose(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling,
           allowed: NDArray[np.uint8] | None = None) -> NDArray[np.int32]:
    """Return the tokens of ``sampling.rule.choose``, for ``logits`` [n, V] on any device: int32 [n].

    Only tokens whose bits are set in ``allowed`` [n, ceil(V / 8)], the lowest bit first, at least one in each row,
    are chosen; top-k and top-p count only them.
    """
    if not len(logits):
        return np.empty(0, np.int32)
    if allowed is not None:
        # Finite: differences of infinite scores are no numbers.
        logits = torch.where(_unpacked(allowed, logits.shape[-1], logits.device), wide(logits), _EXCLUDED)
    if sampling.greedy:
        return first_largest(logits).to("cpu", torch.int32).numpy()
    logits = wide(logits)
    if 0 < sampling.top_k < logits.shape[-1]:
        tokens = _draw_top_k(logits, positions, sampling)
    elif sampling.top_p < 1.0:
        tokens = np.concatenate([_draw_top_p(logits[rows], positions[rows], sampling)
                                 for rows in chunks(logits)])
    else:
        tokens = _draw_unfiltered(logits, positions, sampling)
    for row in np.flatnonzero(tokens < 0):
        tokens[row] = definition.choose(logits[row : row + 1].cpu().numpy(), positions[row : row + 1],
                                        sampling)[0]
    return tokens.astype(np.int32)


def rank_children(logits: Tensor, positions: NDArray[np.integer], k: int, sampling: Sampling, rank: Rank,
                  tau: float = 0.6, draft_vocabulary: DraftVocabulary | None = None
                  ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return the k best children of each row in falling order: ids int32 [n, k], log scores float64 [n, k].

    ``rank="draft"``: by log softmax(logits) (EAGLE-2).  ``rank="noise"``: by log q + g, with the target's own
    noise; scores are log softmax((log q + g) / tau).  Greedy: both are the same.  ``logits`` are [n, V], or
    [n, D] over ``draft_vocabulary`` (q is 0 elsewhere); ids are always the target's.
    """
    logits = wide(logits)
    noisy = rank == "noise" and not sampling.greedy
    children = []
    for rows in chunks(logits):
        x = logits[rows]
        if noisy:
            x = _noisy(x, positions[rows], sampling, draft_vocabulary).div_(tau)
        children.append(likeliest(x, k))
    return fetched_children(children, draft_vocabulary)


def likeliest(logits: Tensor, k: int) -> Tensor:
    """Return the first step of :func:`rank_children`, on the device, for as many rows as there are: packed."""
    values, best = largest(torch.log_softmax(wide(logits), -1), min(k, logits.shape[-1]))
    return packed(best, values)


def fetched_children(children: list[Tensor], draft_vocabulary: DraftVocabulary | None
                     ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Fetch the children that :func:`likeliest` ranked, as :func:`rank_children` returns them.

    This second step waits for the device.
    """
    ids, scores = np.split(fetched(children), 2, axis=1)
    tokens = ids.astype(np.int64)
    if draft_vocabulary:
        tokens = draft_vocabulary.ids[tokens]
    return tokens.astype(np.int32), np.minimum(scores, 0.0)


def log_probs(logits: Tensor, tokens: NDArray[np.integer], most: int
              ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the log softmax at ``tokens`` [n], and the ``most`` likeliest tokens.

    The first is float64 [n]; the likeliest are ids and values in falling order, [n, most].
    """
    x = logits.double()
    x = x - torch.logsumexp(x, -1, keepdim=True)
    token_values = x.gather(1, indices(tokens, x.device)[:, None])
    values, top = largest(x, min(most, x.shape[-1]))
    return token_values[:, 0].cpu().numpy(), top.cpu().numpy(), values.cpu().numpy()


@lru_cache(maxsize=SESSIONS)
def _ids_on(draft_vocabulary: DraftVocabulary, device: torch.device) -> Tensor:
    return indices(draft_vocabulary.ids, device)


def _unpacked(bits: NDArray[np.uint8], width: int, device: torch.device) -> Tensor:
    """Unpack bits [n, ceil(width / 8)] to bool [n, width].

    On an accelerator this happens there, since a byte for each token would take long to upload.
    """
    if device.type == "cpu":  # numpy is faster
        return torch.from_numpy(np.unpackbits(bits, 1, width, "little").view(np.bool_))
    packed = to_device(torch.from_numpy(bits), device)
    return (packed[..., None] & _bit_values(device)).bool().flatten(1)[:, :width]


@lru_cache
def _bit_values(device: torch.device) -> Tensor:
    return to_device(torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8), device)


# ---- choosing ------------------------------------------------------------------------------------
# Each returns drawn tokens, int64 [n]; -1 where the definition has to decide.


def _draw_unfiltered(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int64]:
    """argmax(x / T + g), among the tokens that min-p keeps."""
    best_two = [largest(_likely(_noisy(logits[rows], positions[rows], sampling), logits[rows], sampling),
                        min(2, logits.shape[-1])) for rows in chunks(logits)]
    block = fetched([packed(ids[:, :1], values[:, :1], values[:, -1:]) for values, ids in best_two])
    clear = _clearly_ahead(block[:, 1], block[:, 2]) | (logits.shape[-1] == 1)
    return np.where(clear, block[:, 0], -1).astype(np.int64)


def _draw_top_k(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int64]:
    k = sampling.top_k
    if k > _MOST_TOP_K:
        return np.full(len(logits), -1)
    best = [largest(logits[rows], k + 1) for rows in chunks(logits)]
    block = fetched([packed(ids, values) for values, ids in best])
    ids, x = block[:, :k].astype(np.int64), block[:, k + 1 :]
    drawn = _draw_from(x[:, :k], ids, positions, sampling)
    return np.where(x[:, k] < x[:, k - 1], drawn, -1)  # else a further token is as likely as the last


def _draw_top_p(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling) -> NDArray[np.int64]:
    noisy = _likely(_noisy(logits, positions, sampling), logits, sampling)
    p = _weights(logits, 1 / sampling.temperature)
    total = p.sum(-1, keepdim=True)
    drawn, undecided = np.full(len(p), -1, np.int64), np.ones(len(p), bool)
    for _ in range(_NUCLEUS_ROUNDS):
        values, ids = largest(noisy, min(2, p.shape[-1]))
        drawn_p = p.gather(1, ids[:, :1])
        # In float32 tokens may be equal that are not, so the mass ahead of one lies between two sums.
        p = _above(p, drawn_p.nextafter(torch.zeros_like(drawn_p)))
        most = (p.sum(-1, keepdim=True) - drawn_p) / total
        block = fetched([packed(ids[:, :1], values[:, :1], values[:, -1:], most)])
        undecided &= _clearly_ahead(block[:, 1], block[:, 2]) | (p.shape[-1] == 1)
        accepted = undecided & (block[:, 3] < sampling.top_p - _CLOSE_MASS)
        drawn[accepted] = block[accepted, 0].astype(np.int64)
        undecided &= ~accepted
        if undecided.any():
            p = _above(p, drawn_p)
            undecided &= fetched([p.sum(-1, keepdim=True) / total])[:, 0] > sampling.top_p + _CLOSE_MASS
        if not undecided.any():
            break
        # Exclude the token and all that are not ahead of it.  (Comparing tensors is slow on a CPU.)
        behind = drawn_p.nextafter(torch.full_like(drawn_p, 2.0)) - p
        noisy = noisy.add_(behind.relu_(), alpha=_EXCLUDED)
    return drawn


def _weights(x: Tensor, scale: float) -> Tensor:
    """exp(scale x) of each row over its largest: [n, V], at least e^-80, since denormal float32 are slow."""
    below = x - x.amax(-1, keepdim=True)
    if scale != 1.0:
        below.mul_(scale)
    return below.clamp_(min=-80.0).exp_()


def _above(p: Tensor, floor: Tensor) -> Tensor:
    """Return ``p`` [n, V] with 0 where it is not above ``floor`` [n, 1].

    By rows on a CPU, where comparing is 7 times slower.
    """
    if p.device.type != "cpu":
        return torch.where(p > floor, p, 0.0)
    for row, limit in zip(p, floor.flatten().tolist(), strict=True):
        F.threshold(row, limit, 0.0, inplace=True)
    return p


def _noisy(logits: Tensor, positions: NDArray[np.integer], sampling: Sampling,
           draft_vocabulary: DraftVocabulary | None = None) -> Tensor:
    """Return x / T + g: [n, V], or [n, D] over ``draft_vocabulary``."""
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


def _likely(noisy: Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """Return ``noisy`` [n, V] without the tokens that min-p excludes, by the definition's arithmetic."""
    if not sampling.min_p:
        return noisy
    scaled = logits.double() / sampling.temperature
    return torch.where(scaled - scaled.amax(-1, keepdim=True) < sampling.least_log, _EXCLUDED, noisy)


def _clearly_ahead(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether float32 can order noisy scores [n]; noise is at most 46, so it and x / T are alike in size."""
    return np.asarray(first - second > 1e-4 + 1e-6 * np.maximum(np.abs(first), np.abs(second)))


def _draw_from(x: NDArray[np.float64], ids: NDArray[np.int64], positions: NDArray[np.integer],
               sampling: Sampling) -> NDArray[np.int64]:
    """Return the token drawn from ``ids`` [n, c] with logits ``x``, by the definition's arithmetic: [n]."""
    order = np.lexsort((ids, -x))
    ids, scaled = np.take_along_axis(ids, order, -1), np.take_along_axis(x, order, -1) / sampling.temperature
    p = np.exp(scaled - np.logaddexp.reduce(scaled, -1, keepdims=True))
    before = np.cumsum(p, -1) - p
    likely = scaled - scaled[:, :1] >= sampling.least_log
    rows, columns = np.nonzero((before < sampling.top_p) & likely)
    scores = np.full(x.shape, -np.inf)
    scores[rows, columns] = scaled[rows, columns] + gumbel_at(
        sampling.seed, positions[rows] + 1, ids[rows, columns])
    close = (sampling.top_p < 1.0) & (np.abs(before - sampling.top_p) < _CLOSE_SUM).any(-1)
    # Of equal scores the first, which has the lowest id of equal logits.
    return np.where(close, -1, np.take_along_axis(ids, scores.argmax(-1)[:, None], -1)[:, 0])

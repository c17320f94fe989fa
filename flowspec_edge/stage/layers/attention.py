"""Attention of a pass's rows over a cache: which kernel calls it takes, and how their results are put together.

Query heads of a group read their key and value head in place: the cache is never copied for them.  In float32 all
rows of a request share one call (:class:`SharedMask`).  In 16 bits each row is computed along its own path alone
(:class:`PathMask`), so that its bits are those of plain decoding whatever else is in the tree.

A batch has rows of several sessions in one pass.  The linear layers see all rows at once; attention runs
session by session, each over its own cache: a call over one pool of all sessions' rows would read every
cache for every row (docs/experiments/serving.md has both times).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend

from flowspec_edge.util.tensors import indices, to_device

Bool = NDArray[np.bool_]


class Mask(Protocol):
    """What the rows of a pass see."""

    def attend(self, queries: Tensor, kv: Any, scaling: float, sinks: Tensor | None) -> Tensor:
        """Return [n, heads, d] for queries [n + padding, heads, d]; the others as for :func:`attend`."""


def attend(queries: Tensor, kv: Any, mask: Mask, scaling: float, sinks: Tensor | None = None) -> Tensor:
    """Return [N, heads, d] for queries [N, heads, d], the last of which may be padding.

    kv     keys and values [2, m, kv heads, d] as the cache's ``write`` returns them, or those of a batch's parts
    sinks  [heads]: scores of columns whose value is 0
    """
    outputs = mask.attend(queries, kv, scaling, sinks)
    if len(outputs) == len(queries):
        return outputs
    padded = queries.new_zeros(queries.shape)
    padded[: len(outputs)] = outputs
    return padded


class BatchMask:
    """The masks of a batch's parts, whose rows follow one another."""

    def __init__(self, masks: Sequence[Mask], lengths: Sequence[int]) -> None:
        """Join the parts' masks; ``lengths``: rows of each part, at least one."""
        self._masks, self._lengths = masks, lengths

    def attend(self, queries: Tensor, kv: Sequence[Tensor | None], scaling: float, sinks: Tensor | None) -> Tensor:
        """Attend as :meth:`Mask.attend`; rows of parts that have ended, of which nothing is held, become 0."""
        outputs, start = queries.new_zeros(sum(self._lengths), *queries.shape[1:]), 0
        for mask, n, part in zip(self._masks, self._lengths, kv, strict=True):
            at = slice(start, start := start + n)
            if part is not None:
                outputs[at] = mask.attend(queries[at], part, scaling, sinks)
        return outputs


class BatchCache:
    """The caches of a batch's parts, in a pass with a :class:`BatchMask`."""

    def __init__(self, caches: Sequence[Any], lengths: Sequence[int],
                 ended: Callable[[int], bool] = lambda number: False) -> None:
        """Take a pass' caches.

        ``ended``: whether the part at a place has ended, whose cache must not be touched any more.
        """
        self._caches, self._lengths, self._ended = caches, list(lengths), ended

    def write(self, rows: Tensor, layer_idx: int) -> list[Tensor | None]:
        """Write rows as ``KVCache.write``, by part; None for parts that have ended."""
        return [None if self._ended(number) else cache.write(part_rows, layer_idx) for number, (cache, part_rows) in
                enumerate(zip(self._caches, rows.split(self._lengths), strict=True))]


_ALIGNED = 8  # elements: the mask stride that the memory-efficient kernel requires


class SharedMask:
    """All rows in one call over all columns.  The order of sums depends on the other rows and their columns."""

    def __init__(self, visible: Bool, groups: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take ``visible`` [n, m], what each row sees; ``groups``: query heads per key/value head."""
        self._rows = len(visible)
        self._hidden = additive(np.tile(visible, (groups, 1)), dtype, device)[None, None]

    def attend(self, queries: Tensor, kv: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        return _together([_call(queries[: self._rows], kv[:, None], self._hidden, scaling, self._rows)], sinks)


def additive(visible: Bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [n, m]: 0 where ``visible`` [n, m], minus infinity elsewhere.

    Kernels take the layers' dtype without a conversion.  The row stride is a multiple of 8 elements, or fused CUDA
    kernels would copy the mask in every layer.
    """
    n, m = visible.shape
    hidden = np.zeros((n, -(-m // _ALIGNED) * _ALIGNED), dtype=bool)
    np.logical_not(visible, out=hidden[:, :m])
    values = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return values.masked_fill_(to_device(torch.from_numpy(hidden), device), float("-inf"))[:, :m]


BLOCK = 16  # rows of a path: as many, from a multiple of it on, are computed together for all rows of a pass
_NEWEST = 16  # rows of a path, at least, that are computed for each row by itself
TAIL = BLOCK + _NEWEST  # columns of a row's own call
_AT_ONCE = 64  # rows whose own columns are in memory at once
_START = 64  # rows: a window's first call begins at a multiple of them, where CUDA's kernels begin a tile


def tail_start(path: int) -> int:
    """Return the index in a row's path from which on the row reads columns of its own.

    ``path``: the number of rows on the path, this one included.
    """
    return max(0, (path - _NEWEST) // BLOCK * BLOCK)


@dataclass(frozen=True)
class Prefix:
    """Rows of a pass over the same first columns of their paths.

    rows     their indexes in the pass
    columns  of what is held
    hidden   additive, what a window hides of them; None: nothing
    """

    rows: slice | Tensor
    columns: slice | Tensor
    hidden: Tensor | None


class PathMask:
    """Each row along its own path, in the order of the text: its bits depend on its path alone.

    The end of a path, where branches differ, is gathered for each row; from the text's beginning up to a place that
    the length of the path alone decides, rows share the columns.  Both calls have shapes that the length alone
    decides, too: kernels that are chosen by shape add in another order for another one.  Two results are put together
    by their sums.  (Rows over the same columns in another order, or among other columns that they do not see, differ
    in the last bits, which is enough to change tokens in 16 bits: docs/experiments/costs.md.)
    """

    def __init__(self, visible: Bool, first: int, window: int | None, dtype: torch.dtype, device: torch.device,
                 step: int) -> None:
        """Prepare the mask of a pass.

        visible  [n, m]: the rows' paths among the session's rows and the pass's
        first    of the m columns, those that the cache does not hold
        window   rows of its path that a row sees, its own included; None: all
        step     rows of a shared call, which is padded to it
        """
        self._step, n = step, len(visible)
        text = np.where(visible.all(1), visible.shape[1], visible.argmin(1))  # columns that a row sees without a gap
        slots = np.zeros((n, TAIL), dtype=np.int64)
        shown = np.zeros((n, TAIL), dtype=bool)
        shared: dict[tuple[int, int, bool, int], list[int]] = {}  # rows by start, stop, …, and with gaps by row
        lowest = np.zeros(n, dtype=np.int64)
        for row in range(n):
            gap = int(text[row])
            path = gap + np.count_nonzero(visible[row, gap:])
            begin = tail_start(path)
            lowest[row] = lo = 0 if window is None else max(0, path - window)
            tail_columns = (np.flatnonzero(visible[row, begin:]) + begin if begin <= gap
                            else np.flatnonzero(visible[row])[begin:])
            slots[row, : len(tail_columns)] = tail_columns
            shown[row, max(0, lo - begin) : len(tail_columns)] = True
            if lo < begin:
                key = (lo // _START * _START, begin, lo > 0, -1 if begin <= gap else row)
                shared.setdefault(key, []).append(row)
        self._slots = indices(np.maximum(slots - first, 0), device)
        self._hidden = additive(shown, dtype, device)[:, None, None]
        self._shared = [self._prefix(visible, first, lowest, key, rows, dtype, device)
                        for key, rows in shared.items()]

    def _prefix(self, visible: Bool, first: int, lowest: NDArray[np.int64], key: tuple[int, int, bool, int],
                rows: list[int], dtype: torch.dtype, device: torch.device) -> Prefix:
        start, stop, hides, with_gaps = key
        columns: slice | Tensor = slice(start - first, stop - first)
        if with_gaps >= 0 or start < first:  # rows before the first one are hidden: any may stand in their place
            path = np.arange(start, stop) if with_gaps < 0 else np.flatnonzero(visible[with_gaps])[start:stop]
            columns = indices(np.maximum(path - first, 0), device)
        hidden = additive(np.arange(start, stop) >= lowest[rows][:, None], dtype, device) if hides else None
        neighbours = rows[-1] - rows[0] + 1 == len(rows)
        return Prefix(slice(rows[0], rows[-1] + 1) if neighbours else indices(rows, device), columns, hidden)

    def attend(self, queries: Tensor, kv: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        n = len(self._hidden)
        queries = queries[:n]
        pieces = [self._attend_tail(slice(lo, lo + _AT_ONCE), queries, kv, scaling) for lo in range(0, n, _AT_ONCE)]
        tail = pieces[0] if len(pieces) == 1 else Attended(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))
        if not self._shared:
            return _together([tail], sinks)
        first = self._shared[0]
        if isinstance(first.rows, slice) and first.rows == slice(0, n):
            return _together([self._attend_prefix(first, queries, kv, scaling), tail], sinks)
        prefixes = Attended(torch.zeros_like(tail.outputs), torch.full_like(tail.log_sums, float("-inf")))
        for prefix in self._shared:  # a row without one keeps a share of 0
            parts = self._attend_prefix(prefix, queries[prefix.rows], kv, scaling)
            for output, part in zip(prefixes, parts, strict=True):
                output[prefix.rows] = part
        return _together([prefixes, tail], sinks)

    def _attend_tail(self, rows: slice, queries: Tensor, kv: Tensor, scaling: float) -> Attended:
        """Return what ``rows`` make of the columns that each has of its own."""
        hidden, (_, _, kv_heads, width) = self._hidden[rows], kv.shape
        columns = kv.index_select(1, self._slots[rows].flatten()).view(2, len(hidden), TAIL, kv_heads, width)
        return _call(queries[rows], columns, hidden.expand(-1, -1, queries.shape[1] // kv_heads, -1), scaling, 1)

    def _attend_prefix(self, prefix: Prefix, queries: Tensor, kv: Tensor, scaling: float) -> Attended:
        """Return what ``prefix.rows`` make of its columns."""
        n, step = len(queries), self._step
        more = -n % step
        calls = (n + more) // step
        columns = kv[:, prefix.columns] if isinstance(prefix.columns, slice) else kv.index_select(1, prefix.columns)
        hidden = prefix.hidden
        if more:
            queries = F.pad(queries, (0, 0, 0, 0, 0, more))
            hidden = None if hidden is None else F.pad(hidden, (0, 0, 0, more))
        if hidden is not None:
            groups = queries.shape[1] // kv.shape[2]
            hidden = hidden.view(calls, 1, 1, step, -1).expand(-1, -1, groups, -1, -1).flatten(2, 3)
        attended = _call(queries, columns[:, None].expand(-1, calls, -1, -1, -1), hidden, scaling, step)
        return Attended(attended.outputs[:n], attended.log_sums[:n])


class Attended(NamedTuple):
    """What a kernel gives n rows, by which results over several sets of columns are put together.

    It gives outputs [n, heads, d], and the logarithms of the sums of their exponentiated scores [n, heads] in
    float32.
    """

    outputs: Tensor
    log_sums: Tensor


def _together(parts: Sequence[Attended], sinks: Tensor | None) -> Tensor:
    """Return the outputs of one softmax over the columns of all parts.

    ``sinks`` [heads] are a further column with value 0 for each head.
    ``softmax`` of a CPU computes every row alike; an exponential of its own would not: elements behind the last whole
    vector have another last bit.
    """
    if len(parts) == 1 and sinks is None:
        return parts[0].outputs
    sums = [part.log_sums for part in parts]
    shares = torch.stack(sums if sinks is None else [*sums, sinks.float().expand_as(sums[0])], -1).softmax(-1)
    outputs = parts[0].outputs * shares[..., 0, None]
    for index, part in enumerate(parts[1:], 1):
        outputs = outputs + part.outputs * shares[..., index, None]
    return outputs.to(parts[0].outputs.dtype)


def _call(queries: Tensor, columns: Tensor, hidden: Tensor | None, scaling: float, rows: int) -> Attended:
    """One call of a kernel for ``queries`` [calls * rows, heads, d], in which it attends ``calls`` times.

    columns  [2, calls, m, kv heads, d]
    hidden   [calls or 1, 1, groups * rows, m], added to the scores
    """
    calls, kv_heads = columns.shape[1], columns.shape[3]
    keys, values = columns.transpose(2, 3)
    # Query head h becomes row block h % groups of key head h // groups.
    folded = queries.unflatten(0, (calls, rows)).unflatten(2, (kv_heads, -1))  # [calls, rows, kv heads, groups, d]
    folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)
    outputs, log_sums = (part[:calls] for part in _kernel(folded, keys, values, hidden, scaling))
    outputs = outputs.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4)
    log_sums = log_sums.unflatten(2, (-1, rows)).permute(0, 3, 1, 2)
    return Attended(outputs.reshape(queries.shape), log_sums.reshape(queries.shape[:2]))


def _kernel(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scaling: float
            ) -> tuple[Tensor, Tensor]:
    """PyTorch's fused attention, with the sums that ``scaled_dot_product_attention`` does not return.

    queries [b, heads, n, d], keys and values [b, heads, m, d]; returns outputs like the queries, and [b, heads, n].
    """
    if queries.device.type == "cpu":
        if len(queries) * queries.shape[1] == 1:  # a lone head would be split over threads, and sum in another order
            queries, keys, values = (tensor.expand(2, -1, -1, -1) for tensor in (queries, keys, values))
        outputs, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=hidden, scale=scaling)
        return outputs, log_sums
    if kernel_of(queries.device, queries.dtype, queries.shape[-1]) != SDPBackend.EFFICIENT_ATTENTION:
        return _unfused(queries, keys, values, hidden, scaling)
    if hidden is not None:
        hidden = hidden.expand(*queries.shape[:3], -1)
    outputs, log_sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        queries, keys, values, hidden, True, 0.0, False, scale=scaling)
    return outputs, log_sums[..., : queries.shape[2]]  # which the kernel pads


@cache
def kernel_of(device: torch.device, dtype: torch.dtype, width: int) -> SDPBackend:
    """Return the kernel that PyTorch has for masks over heads of ``width``."""
    rows = torch.zeros(1, 1, 16, width, dtype=dtype, device=device)
    return SDPBackend(torch._fused_sdp_choice(rows, rows, rows, additive(np.eye(16, dtype=bool), dtype, device)))


def _unfused(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scaling: float
             ) -> tuple[Tensor, Tensor]:
    """Attend as :func:`_kernel`, where PyTorch was built without it or it does not take heads of this width."""
    masks = [None] * len(queries) if hidden is None else hidden.expand(len(queries), -1, -1, -1)
    attended = []
    for query, key, value, mask in zip(queries, keys, values, masks, strict=True):  # a product would copy shared keys
        scores = ((query * scaling) @ key.mT).float()
        if mask is not None:
            scores += mask
        log_sums = scores.logsumexp(-1)
        attended.append(((scores - log_sums[..., None]).exp_().to(value.dtype) @ value, log_sums))
    outputs, sums = zip(*attended, strict=True)
    return torch.stack(outputs), torch.stack(sums)

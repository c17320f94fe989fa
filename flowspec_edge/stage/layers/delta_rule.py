"""The gated delta rule over a draft tree (Qwen3-Next and its successors), as pure functions of tensors.

A layer's state S [k, v] after the committed text replaces keys and values.  A row t that is not committed is
a cached entry (k, u, log G) under the ancestor mask that attention uses; no branch has a state of its own.
With path(t) its uncommitted ancestors and G(t) the product of the decays over path(t) and t:

    u(t) = beta(t) (v(t) - G(t) S^T k(t) - sum over j in path(t) of G(t)/G(j) (k(t) k(j)) u(j))
    o(t) = G(t) S^T q(t) + sum over j in path(t) and t of G(t)/G(j) (q(t) k(j)) u(j)

u(t) depends on t's path alone.  So a commit folds entries into S and only shifts the others' log G, whether
it comes late, early or in batches, and a prune drops entries.  On a chain this is the recurrence itself:
https://arxiv.org/abs/2412.06464, whose chunked form is the case of a causal mask.

Shapes: queries and keys [n, key heads, k]; values and u [n, heads, v], where each key head serves
``heads / key heads`` neighbouring heads; betas, log decays and log G [n, heads]; S [heads, k, v].
Everything is in one dtype: float32, unless a test wants more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # rows of a text that are computed at once, as in transformers


class DeltaRows(NamedTuple):
    """What n rows bring; queries divided by sqrt(k), queries and keys normalised."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    log_decays: Tensor  # at most 0
    betas: Tensor

    def part(self, rows: slice) -> DeltaRows:
        return DeltaRows(*(tensor[rows] for tensor in self))


class Entries(NamedTuple):
    """Of rows that are not folded into the state, parents first."""

    keys: Tensor
    updates: Tensor  # u
    log_gates: Tensor  # log G


def segment(rows: DeltaRows, state: Tensor, cached: Entries, visible: Tensor) -> tuple[Tensor, Entries]:
    """Outputs [n, heads, v] and entries of ``rows``.

    visible  [n, m + n] bool: the cached entries, then the rows; every row sees itself and no later one
    """
    n, m = len(rows.keys), len(cached.keys)
    own = visible[:, m:]
    gates = own.to(rows.log_decays) @ rows.log_decays
    if m:
        # Along a path log G falls: that of the last cached ancestor is the least.
        above = torch.where(visible[:, :m, None], cached.log_gates, 0.0).amin(1)
        gates = gates + above
    both = torch.cat((rows.keys, rows.queries)).transpose(0, 1)  # [key heads, 2n, k]
    grouped = state.unflatten(0, (both.shape[0], -1))  # [key heads, group, k, v]
    # [heads, 2n, v]
    remembered = (both[:, None] @ grouped).flatten(0, 1) * gates.T.exp().repeat(1, 2)[..., None]
    updates = rows.values.transpose(0, 1) - remembered[:, :n]
    betas = rows.betas.T[..., None]
    outputs = remembered[:, n:]
    if m:
        weights = _weights(both, cached.keys, gates, cached.log_gates, visible[:, :m])
        passed = weights @ cached.updates.transpose(0, 1)
        updates, outputs = updates - passed[:, :n], outputs + passed[:, n:]
    weights = _weights(both, rows.keys, gates, gates, own)
    updates = updates * betas
    if n > 1:  # the diagonal is not read
        updates = torch.linalg.solve_triangular(betas * weights[:, :n], updates, upper=False,
                                                unitriangular=True)
    outputs = outputs + weights[:, n:] @ updates
    return outputs.transpose(0, 1), Entries(rows.keys, updates.transpose(0, 1), gates)


def _weights(both: Tensor, keys: Tensor, gates: Tensor, others: Tensor, visible: Tensor) -> Tensor:
    """G(t)/G(j) times the products of keys and queries [key heads, 2n, k] with ``keys`` of m others: [heads,
    2n, m]; 0 where ``visible`` [n, m] is false."""
    products = both @ keys.permute(1, 2, 0)  # [key heads, 2n, m]
    ratios = gates.T[..., None] - others.T[:, None]  # [heads, n, m]
    ratios = ratios.masked_fill(~visible, float("-inf")).exp()
    group = ratios.shape[0] // products.shape[0]
    ratios = ratios.unflatten(0, (-1, group))[:, :, None]  # [key heads, group, 1, n, m]
    return (products.unflatten(1, (2, -1))[:, None] * ratios).flatten(2, 3).flatten(0, 1)


def fold(state: Tensor, entries: Entries) -> Tensor:
    """The state after the path of ``entries``, oldest first, at least one; the others' log G then falls by
    that of the last one (:func:`shifted`)."""
    last = entries.log_gates[-1]
    weighted = entries.updates * (last - entries.log_gates).exp()[..., None]
    heads, group = state.shape[0], state.shape[0] // entries.keys.shape[1]
    keys = entries.keys.permute(1, 2, 0)  # [key heads, k, n]
    keys = keys[:, None].expand(-1, group, -1, -1).reshape(heads, *keys.shape[1:])
    return torch.baddbmm(state * last.exp()[:, None, None], keys, weighted.transpose(0, 1))


def shifted(entries: Entries, folded: Entries) -> Entries:
    """Entries that saw all of ``folded``, once these are in the state."""
    return entries._replace(log_gates=entries.log_gates - folded.log_gates[-1])


def text(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, v] of a chain without entries above it, and the state behind it."""
    outputs = []
    for start in range(0, len(rows.keys), CHUNK):
        part = rows.part(slice(start, start + CHUNK))
        n = len(part.keys)
        causal = torch.ones(n, n, dtype=torch.bool, device=state.device).tril()
        none = Entries(*(tensor[:0] for tensor in (part.keys, part.values, part.betas)))
        output, entries = segment(part, state, none, causal)
        state = fold(state, entries)
        outputs.append(output)
    return torch.cat(outputs), state


def normalised(vectors: Tensor) -> Tensor:
    """Of length 1, except for a term that keeps zeros finite, transformers' own: [..., k]."""
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + 1e-6)


def convolved(inputs: Tensor, weight: Tensor) -> Tensor:
    """The causal convolution and its activation of n rows.

    inputs  [n, width, channels]: of a row's last ``width - 1`` ancestors, oldest first, then its own; zeros
            before the text
    weight  [channels, width]
    """
    return F.silu((inputs * weight.T).sum(1))

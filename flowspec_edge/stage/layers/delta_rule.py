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

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


class DeltaRows(NamedTuple):
    """What n rows bring; queries divided by sqrt(k), queries and keys normalised."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    log_decays: Tensor  # at most 0
    betas: Tensor


class Entries(NamedTuple):
    """Of rows that are not folded into the state, parents first."""

    keys: Tensor
    updates: Tensor  # u
    log_gates: Tensor  # log G


class Sight(NamedTuple):
    """What n rows see of m cached entries and of themselves, as :func:`sight` makes it: [n, m + n] each.

    sums    1 for the last cached entry that a row sees and for the rows that it does, 0 elsewhere: makes
            log G from the entry's log G and the rows' log decays
    hidden  0 where a row sees, minus infinity elsewhere
    """

    sums: Tensor
    hidden: Tensor


def sight(visible: NDArray[np.bool_], n: int) -> Sight:
    """float32, in host memory.

    visible  [n, m + n]: the cached entries, then the rows; every row sees itself and no later one
    """
    cached = visible[:, : visible.shape[1] - n]
    last = cached & (cached[:, ::-1].cumsum(1)[:, ::-1] == 1)
    sums = np.concatenate((last, visible[:, cached.shape[1] :]), axis=1, dtype=np.float32)
    hidden = np.where(visible, np.float32(0), np.float32(-np.inf))
    return Sight(torch.from_numpy(sums), torch.from_numpy(hidden))


def segment(rows: DeltaRows, state: Tensor, entries: Entries, seen: Sight) -> Tensor:
    """Outputs [n, heads, v] of ``rows``, which become the last n of ``entries`` [m + n].

    Along a path log G falls, so what precedes a row counts by its last entry alone.
    """
    n = len(rows.keys)
    m = len(entries.keys) - n
    entries.keys[m:] = rows.keys
    entries.log_gates[m:] = rows.log_decays
    gates = seen.sums @ entries.log_gates
    entries.log_gates[m:] = gates
    both = torch.cat((rows.keys, rows.queries)).transpose(0, 1)  # [key heads, 2n, k]
    grouped = state.unflatten(0, (both.shape[0], -1))  # [key heads, group, k, v]
    remembered = (both[:, None] @ grouped).flatten(0, 1).unflatten(1, (2, n))  # [heads, 2, n, v]
    remembered = remembered * gates.T.exp()[:, None, :, None]
    weights = _weights(both, entries, gates, seen.hidden)
    updates, betas = rows.values.transpose(0, 1) - remembered[:, 0], rows.betas.T[..., None]
    if m:
        updates = torch.baddbmm(updates, weights[:, 0, :, :m], entries.updates[:m].transpose(0, 1), alpha=-1)
    updates = updates * betas
    if n > 1:  # the diagonal is not read
        updates = torch.linalg.solve_triangular(betas * weights[:, 0, :, m:], updates, upper=False,
                                                unitriangular=True)
    entries.updates[m:] = updates.transpose(0, 1)
    return torch.baddbmm(remembered[:, 1], weights[:, 1], entries.updates.transpose(0, 1)).transpose(0, 1)


def _weights(both: Tensor, entries: Entries, gates: Tensor, hidden: Tensor) -> Tensor:
    """G(t)/G(j) times the products of keys and queries [key heads, 2n, k] with the entries' keys: [heads, 2,
    n, m + n]; 0 where a row does not see."""
    products = (both @ entries.keys.permute(1, 2, 0)).unflatten(1, (2, -1))
    ratios = (gates.T[..., None] - entries.log_gates.T[:, None]).add_(hidden).exp_()  # [heads, n, m + n]
    return (products[:, None] * ratios.unflatten(0, (len(products), -1))[:, :, None]).flatten(0, 1)


def fold(state: Tensor, entries: Entries) -> Tensor:
    """The state after the path of ``entries``, oldest first, at least one; from the log G of entries that
    saw all of them, subtract that of the last one."""
    last = entries.log_gates[-1]
    weighted = entries.updates * (last - entries.log_gates).exp()[..., None]
    heads, group = state.shape[0], state.shape[0] // entries.keys.shape[1]
    keys = entries.keys.permute(1, 2, 0)  # [key heads, k, n]
    keys = keys[:, None].expand(-1, group, -1, -1).reshape(heads, *keys.shape[1:])
    return torch.baddbmm(state * last.exp()[:, None, None], keys, weighted.transpose(0, 1))


def convolved(inputs: Tensor, weight: Tensor) -> Tensor:
    """The causal convolution and its activation of n rows.

    inputs  [n, width, channels]: of a row's last ``width - 1`` ancestors, oldest first, then its own; zeros
            before the text
    weight  [channels, width]
    """
    return F.silu((inputs * weight.T).sum(1))

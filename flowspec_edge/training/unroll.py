"""A draft head unrolled along a text, as a draft tree's branch sees it.

Knows how a row at depth d of a draft tree sees the text: true states up to d - 1 rows back, then the
head's own rows of depth 2 … d.  Calls the very forward that drafting runs (``drafting.eagle``,
``drafting.eagle3``), with that visibility as its mask.  Does not know losses or what the states are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flowspec_edge.drafting.eagle import KeyValues

Head = Callable[[Tensor, Tensor, Tensor, Tensor, KeyValues], Tensor]


class _Unrolled:
    """The cache of one unrolled forward: the rows of every depth so far, side by side."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def visibility(rows: int, anchors: Tensor, depth: int) -> Tensor:
    """What the chains' rows at ``depth`` >= 2 see: bool [A, rows + (depth - 1) * A].

    The first columns are the text's rows: chain a sees those up to its anchor.  Then come the
    chains' rows of depth 2, 3, … ``depth``: a chain sees its own.
    """
    text = torch.arange(rows, device=anchors.device)[None] <= anchors[:, None]
    own = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    return torch.cat((text, own.repeat(1, depth - 1)), dim=1)


def unroll(head: Head, hidden: Tensor, tokens: Tensor, anchors: Tensor, depth: int) -> Iterator[Tensor]:
    """The head's outputs along a text: at depth 1 for every row, deeper for the anchors' chains.

    hidden   [B, n, H]  what the text's rows take in: EAGLE-2's features f_0 … f_{n-1}, or EAGLE-3's
                        fused states h_0 … h_{n-1}
    tokens   [B, n]     tokens 1 … n
    anchors  [A]        rows, at most n - depth: a chain has true states up to its anchor only
    yields   [B, n, H]  at depth 1, where row i approximates the state of token i + 1;
             [B, A, H]  at depth d, where row a approximates that of token anchors[a] + d
    """
    batch, n = tokens.shape
    cache = _Unrolled()
    at = torch.arange(n, device=tokens.device)
    mask = torch.ones(n, n, dtype=torch.bool, device=tokens.device).tril()
    for d in range(1, depth + 1):
        if d > 1:
            at, mask = anchors + d - 1, visibility(n, anchors, d)
        positions, shown = at[None].expand(batch, -1), mask[None, None].expand(batch, 1, -1, -1)
        out = head(hidden, tokens[:, at], positions, shown, cache)
        yield out
        hidden = out[:, anchors] if d == 1 else out

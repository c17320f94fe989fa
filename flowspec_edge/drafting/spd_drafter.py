"""SPD's drafter: the speculation module on whatever has arrived at the moment it is asked.

Knows when keys and values are computed and where they lie.  Does not know what was sent, verified
or pruned, nor when it is asked: that it works on the states at the *start* of a pipeline step
(SPD, section 3.4) is the strategy's doing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowspec_edge.drafting.spd import KeyValues, SpdModule
from flowspec_edge.drafting.spd_rows import Row, RowStore
from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Tap
from flowspec_edge.sampler import rank_children
from flowspec_edge.sampling import Rank, Sampling
from flowspec_edge.tensors import indices, to_device
from flowspec_edge.tree.requests import DraftNode, DraftRequest, Expansion

_NO_ROOT = -2  # no node has this id (-1 is the root's parent)
_FIRST_CAPACITY = 256


class SpdDrafter:
    """Implements :class:`flowspec_edge.drafting.base.Drafter` with an :class:`SpdModule`.

    ``embedding`` is the target's, [V, H], of the module's dtype and on its device.

    A row's feature is made from its deepest state that has arrived with the state half way to it;
    taps that are late or lost make the drafts worse and nothing else.
    """

    taps: tuple[int, ...] = ()  # none that it must have: its strategy asks for what it can use

    def __init__(self, module: SpdModule, embedding: Tensor) -> None:
        self._module = module.eval().requires_grad_(False)
        self._embedding = embedding
        self._rows = RowStore(module.target_layers, embedding.dtype, embedding.device)
        self._cache: list[KeyValues] = []  # by layer: 2 x [1, kv_heads, capacity, head_dim]
        self._grow(_FIRST_CAPACITY)
        self.reset(Sampling(), "draft", 1.0)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._ranking = (sampling, rank, tau)
        self._rows.reset()
        self._root = _NO_ROOT
        self._nodes: dict[int, Row] = {}

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        """Never: rows that are still to become better are known by the numbers of their session."""
        return False

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        started = bool(self._rows.text)
        if features is None:
            if started or len(tokens) != 1:
                raise ProtocolError("only the first token of a text comes without its feature")
            self._rows.first(tokens[0])
        elif not started or not len(features) == len(rows) == len(tokens):
            raise ProtocolError(
                f"{len(tokens)} committed tokens need as many features and row numbers after the text's "
                f"first token, not {len(features)} and {len(rows)} after {len(self._rows.text)}"
            )
        elif len(tokens):
            self._rows.commit(tokens, features, rows)

    def tap(self, message: Tap) -> None:
        self._rows.tap(message)

    @torch.inference_mode()
    def expand(self, request: DraftRequest) -> Expansion:
        if request.root != self._root:
            self._root = request.root
            self._nodes = {i: row for i, row in self._nodes.items() if row.slot >= 0 and not row.is_text}
        if not request.nodes:
            return Expansion(np.empty((0, 0), np.int32), np.empty((0, 0), np.float64))
        queries = [self._row(node) for node in request.nodes]
        self._grow(self._rows.slots)
        self._look_back(queries)
        logits = self._module.lm_head(self._speculate(queries))
        positions = np.fromiter((row.position for row in queries), np.int64)
        sampling, rank, tau = self._ranking
        return Expansion(*rank_children(logits, positions, request.children, sampling, rank, tau))

    def _row(self, node: DraftNode) -> Row:
        text = self._rows.text
        if node.id == self._root:
            if not text or node.position != text[-1].position:
                raise ProtocolError(
                    f"the root stands at position {node.position}, but the drafter was given a text "
                    f"of {len(text)} tokens: tokens must be committed before they are drafted on"
                )
            row = text[-1]
        else:
            parent = text[-1] if node.parent == self._root and text else self._nodes.get(node.parent)
            if parent is None:
                raise ProtocolError(f"draft node {node.id} was asked for before its parent {node.parent}")
            row = self._nodes[node.id] = self._rows.child(parent, node.token)
        self._rows.number(row, node.number)
        return row

    def _look_back(self, queries: Sequence[Row]) -> None:
        """Bring the keys and values of all rows that the queries see up to date."""
        stale = self._rows.stale(queries)
        if not stale:
            return
        embeddings = self._embed([row for row, _ in stale])
        features = torch.empty_like(embeddings)
        # By places, not by a mask: how many rows a mask selects, only the device would know.
        bare = [i for i, (_, depth) in enumerate(stale) if depth == 0]
        if bare:
            at = indices(bare, embeddings.device)
            features[at] = self._module.newest(embeddings[at])
        if len(bare) < len(stale):
            known = [(i, row, depth) for i, (row, depth) in enumerate(stale) if depth]
            at = indices([i for i, _, _ in known], embeddings.device)
            deepest = torch.stack([self._rows.state(row, depth) for _, row, depth in known])
            middle = torch.stack([self._rows.state(row, depth // 2) if depth // 2 else embeddings[i]
                                  for i, row, depth in known])
            features[at] = self._module.feature(embeddings[at], middle, deepest)
        rows = [row for row, _ in stale]
        self._write(rows, self._module.keys_values(features[None], self._positions(rows)))
        self._rows.computed(stale)

    def _speculate(self, queries: Sequence[Row]) -> Tensor:
        """The module's outputs [n, H] for ``queries`` as the newest rows."""
        slots = self._rows.slots
        context = [(keys[:, :, :slots], values[:, :, :slots]) for keys, values in self._cache]
        own = torch.eye(len(queries), dtype=torch.bool, device=self._embedding.device)
        mask = torch.cat((to_device(self._rows.visible(queries), own.device), own), dim=1)
        features = self._module.newest(self._embed(queries))
        out: Tensor = self._module(features[None], self._positions(queries), context, mask[None, None])
        return out[0]

    def _write(self, rows: Sequence[Row], computed: Sequence[KeyValues]) -> None:
        at = indices([row.slot for row in rows], self._embedding.device)
        for held, new in zip(self._cache, computed, strict=True):
            for buffer, values in zip(held, new, strict=True):
                buffer.index_copy_(2, at, values)

    def _embed(self, rows: Sequence[Row]) -> Tensor:
        return F.embedding(indices([row.token for row in rows], self._embedding.device), self._embedding)

    def _positions(self, rows: Sequence[Row]) -> Tensor:
        return indices([[row.position for row in rows]], self._embedding.device)

    def _grow(self, needed: int) -> None:
        held = self._cache[0][0].shape[2] if self._cache else 0
        if needed <= held:
            return
        config = self._module.config
        shape = (1, config.num_key_value_heads, max(needed, 2 * held), config.head_dim)
        grown = []
        for layer in range(len(self._module.layers)):
            keys, values = (self._embedding.new_zeros(shape) for _ in range(2))
            if held:
                keys[:, :, :held], values[:, :, :held] = self._cache[layer]
            grown.append((keys, values))
        self._cache = grown

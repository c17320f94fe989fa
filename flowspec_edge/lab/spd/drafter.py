"""SPD's drafter: the speculation module on the states that have arrived.

The strategy times requests so that these are the states at the *start* of a step (SPD, section 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.drafting.base import NO_ROOT, Drafter, parent_missing_error, root_misplaced_error
from flowspec_edge.drafting.format import DraftFormat, Loaded, Surroundings
from flowspec_edge.drafting.tree_cache import FIRST_CAPACITY
from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.lab.spd.module import RowStore, SpdModule, SpdRow, load_module, module_config
from flowspec_edge.messages import Tap
from flowspec_edge.model.draft_kind import Shapes
from flowspec_edge.sampling.rule import Rank, Sampling
from flowspec_edge.sampling.sampler import rank_children
from flowspec_edge.stage.layers.attention import additive
from flowspec_edge.stage.layers.kinds import KeysValues
from flowspec_edge.stage.layers.kv_cache import KVPass
from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest
from flowspec_edge.util.tensors import indices
from flowspec_edge.util.weight_file import Embedding, as_embedding, tokens_device


class SpdDrafter(Drafter):
    """A session's drafter by SPD's module.

    ``embedding`` [V, H] is the target's; its rows have the module's dtype and device.
    A row's feature uses its deepest state so far and the one at half that depth; late or lost taps only worsen the
    drafts.
    """

    taps: tuple[int, ...] = ()  # none are required; the strategy requests what it can use

    def __init__(self, module: SpdModule, embedding: Tensor | Embedding) -> None:
        self._module = module.eval().requires_grad_(False)
        self._embedding = as_embedding(embedding)
        weight = module.fuse.weight
        self._dtype, self._device = weight.dtype, weight.device
        self._tokens_device = tokens_device(self._embedding, self._device)
        self._rows = RowStore(module.target_layers, self._dtype, self._device)
        config = module.config
        kind = KeysValues(config.num_key_value_heads, 1, config.head_dim)
        self._arena = kind.arena(range(len(module.layers)), self._dtype, self._device, 0)
        self._cache = self._arena.take(0)
        self.reset(Sampling(), "draft", 1.0)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._ranking = (sampling, rank, tau)
        self._rows.reset()
        self._root = NO_ROOT
        self._nodes: dict[int, SpdRow] = {}

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        """Return False: rows that still improve are keyed by the numbers of their session."""
        return False

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        started = bool(self._rows.text)
        if features is None:
            if started or len(tokens) != 1:
                raise ProtocolError("only the first token of a text comes without its feature")
            self._rows.begin(tokens[0])
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
    def expand(self, request: DraftRequest) -> DraftOutput:
        if request.root != self._root:
            self._root = request.root
            self._nodes = {i: row for i, row in self._nodes.items() if row.slot >= 0 and not row.is_text}
        if not request.nodes:
            return DraftOutput.empty(0, 0)
        queries = [self._row(node) for node in request.nodes]
        self._arena.reach(self._cache, max(FIRST_CAPACITY, self._rows.slots))
        self._look_back(queries)
        logits = self._module.lm_head(self._speculate(queries))
        positions = np.fromiter((row.position for row in queries), np.int64)
        sampling, rank, tau = self._ranking
        return DraftOutput(*rank_children(logits, positions, request.children, sampling, rank, tau))

    def _row(self, node: DraftNode) -> SpdRow:
        text = self._rows.text
        if node.id == self._root:
            if not text or node.position != text[-1].position:
                raise root_misplaced_error(node, len(text))
            row = text[-1]
        else:
            parent = text[-1] if node.parent == self._root and text else self._nodes.get(node.parent)
            if parent is None:
                raise parent_missing_error(node)
            row = self._nodes[node.id] = self._rows.child(parent, node.token)
        self._rows.number(row, node.number)
        return row

    def _look_back(self, queries: Sequence[SpdRow]) -> None:
        """Update the outdated keys and values that the queries see."""
        stale = self._rows.stale_rows(queries)
        if not stale:
            return
        embeddings = self._embed([row for row, _ in stale])
        features = torch.empty_like(embeddings)
        # Indices, since the size of a mask's result would need a wait for the device.
        bare = [i for i, (_, depth) in enumerate(stale) if depth == 0]
        if bare:
            at = indices(bare, embeddings.device)
            features[at] = self._module.newest(embeddings[at])
        if len(bare) < len(stale):
            with_states = [(i, row, depth) for i, (row, depth) in enumerate(stale) if depth]
            at = indices([i for i, _, _ in with_states], embeddings.device)
            deepest = torch.stack([self._rows.state(row, depth) for _, row, depth in with_states])
            middle = torch.stack([self._rows.state(row, depth // 2) if depth // 2 else embeddings[i]
                                  for i, row, depth in with_states])
            features[at] = self._module.feature(embeddings[at], middle, deepest)
        rows = [row for row, _ in stale]
        cache = KVPass(self._cache, indices([row.slot for row in rows], self._device), self._rows.slots)
        computed = self._module.keys_values(features[None], self._positions(rows))
        for layer, (keys, values) in enumerate(computed):
            cache.write(torch.stack((keys[0], values[0])).permute(2, 0, 1, 3), layer)
        self._rows.mark_computed(stale)

    def _speculate(self, queries: Sequence[SpdRow]) -> Tensor:
        """Return the module's outputs [n, H] for ``queries`` as the newest rows."""
        cached = [self._cache.read(layer, self._rows.slots).transpose(1, 2)[:, None]
                  for layer in range(len(self._module.layers))]
        context = [(keys, values) for keys, values in cached]
        visible = np.concatenate((self._rows.visible(queries), np.eye(len(queries), dtype=bool)), axis=1)
        mask = additive(visible, self._dtype, self._device)[None, None]
        features = self._module.newest(self._embed(queries))
        out: Tensor = self._module(features[None], self._positions(queries), context, mask)
        return out[0]

    def _embed(self, rows: Sequence[SpdRow]) -> Tensor:
        embedded: Tensor = self._embedding(indices([row.token for row in rows], self._tokens_device))
        return embedded

    def _positions(self, rows: Sequence[SpdRow]) -> Tensor:
        return indices([[row.position for row in rows]], self._device)


class SpdFormat(DraftFormat):
    """Reads SPD's modules."""

    def load(self, directory: Path, beside: Surroundings) -> Loaded:
        assert beside.embedding is not None
        device = beside.lm_head.device
        module = load_module(directory, beside.dtype).to(device)
        if module.config.hidden_size != beside.embedding.embedding_dim:
            raise FlowspecError(
                f"{directory}: the module's width is {module.config.hidden_size}, the target's "
                f"{beside.embedding.embedding_dim}; a module works with the target that it was trained for "
                "only")
        return Loaded(partial(SpdDrafter, module, beside.embedding.to(device, beside.dtype)),
                      module.config.vocab_size)

    def config(self, directory: Path) -> Any:
        return module_config(directory)

    def fields(self, config: Any) -> dict[str, Any]:
        return dict(config.to_dict())

    def widths(self, directory: Path, config: Any, shapes: Shapes, layers: int) -> list[int]:
        fc = shapes.get("fc.weight")
        return [config.hidden_size, *([fc[0]] if fc else [])]


FORMAT = SpdFormat()

"""Attention of a decoder layer: projections, norms of heads, rotation, and the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.stage.families.norm import Norm, head_norms
from flowspec_edge.stage.families.rotary import Rotation
from flowspec_edge.stage.layers.attention import BatchCache, Mask, attend
from flowspec_edge.stage.layers.kv_cache import KVCache
from flowspec_edge.util.elementwise import sigmoid
from flowspec_edge.util.kernels import HeadNorms, rotate_in_place
from flowspec_edge.util.linears import detach_and_join


class Projected(NamedTuple):
    """The queries, keys, values and gates of N rows.  They are views of one product.

    queries  [N, heads, d]
    cached   keys, then values, [N, 2 * kv_heads, d]
    gates    of the outputs, in the shape of the queries; None: the family has no gates
    """

    queries: Tensor
    cached: Tensor
    gates: Tensor | None


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, index: int, inputs: int = 0) -> None:
        """Make the projections; ``inputs``: width of the rows that are projected; 0: the model's."""
        super().__init__()
        form, self._index, self._width = config.family.form, index, config.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._gated, self._scaling = form.output_gates, config.score_width**-0.5
        self._head_norms: HeadNorms | None = None
        hidden, d = inputs or config.hidden_size, self._width
        biases = form.query_biases or config.attention_bias
        queries = self._heads * d * (2 if form.output_gates else 1)
        if form.one_matrix:
            self.qkv_proj: nn.Module = nn.Linear(hidden, queries + 2 * self._kv_heads * d, bias=biases)
        else:
            self.q_proj = nn.Linear(hidden, queries, bias=biases)
            self.k_proj = nn.Linear(hidden, self._kv_heads * d, bias=biases)
            self.v_proj = nn.Linear(hidden, self._kv_heads * d, bias=biases)
        self.o_proj: nn.Module = nn.Linear(self._heads * d, config.hidden_size,
                                           bias=biases and not form.query_biases)
        if form.head_norms:
            self.q_norm = Norm(d, config.rms_norm_eps, form.centred_norms)
            self.k_norm = Norm(d, config.rms_norm_eps, form.centred_norms)
        self.sinks = nn.Parameter(torch.empty(self._heads), requires_grad=False) if form.sinks else None

    def prepare(self) -> None:
        """Join what is loaded."""
        if hasattr(self, "q_proj"):
            self.qkv_proj = detach_and_join(self, "q_proj", "k_proj", "v_proj")
        if hasattr(self, "q_norm"):
            self._head_norms = head_norms((self.q_norm, self._heads), (self.k_norm, self._kv_heads))

    def room(self, rows: int, like: Tensor) -> Tensor:
        """Memory for what ``attend`` returns."""
        return like.new_zeros(rows, self._heads * self._width)

    def before(self, x: Tensor, rotation: Rotation) -> Projected:
        """Compute what attention needs of normed rows [N, H]."""
        split = self.qkv_proj(x).view(len(x), -1, self._width)
        if not self._gated:
            self._turn(split[:, : self._heads + self._kv_heads], rotation)
            if rotation.scale is not None:
                split[:, : self._heads] *= rotation.scale
            return Projected(split[:, : self._heads], split[:, self._heads :], None)
        pairs = 2 * self._heads  # each head's query, then its gate
        queries_keys = torch.cat((split[:, :pairs:2], split[:, pairs : pairs + self._kv_heads]), 1)
        self._turn(queries_keys, rotation)
        cached = torch.cat((queries_keys[:, self._heads :], split[:, pairs + self._kv_heads :]), 1)
        return Projected(queries_keys[:, : self._heads], cached, split[:, 1:pairs:2])

    def _turn(self, queries_keys: Tensor, rotation: Rotation) -> None:
        if self._head_norms is not None:
            self._head_norms.in_place(queries_keys)
        rotate_in_place(queries_keys[..., : rotation.cos.shape[-1]], (rotation.cos, rotation.sin))

    def attend(self, projected: Projected, mask: Mask, cache: KVCache | BatchCache, new: int) -> Tensor:
        """Add the keys and values of the first ``new`` rows to the cache; [N, heads * d]."""
        queries, cached, _ = projected
        keys_values = cache.write(cached[:new].unflatten(1, (2, self._kv_heads)), self._index)
        return attend(queries, keys_values, mask, self._scaling, self.sinks).flatten(1)

    @property
    def projection(self) -> nn.Module:
        """Makes [N, H] of what ``finish`` returns."""
        return self.o_proj

    def finish(self, projected: Projected, attended: Tensor) -> Tensor:
        """Apply the gates to what ``attend`` returned: [N, heads * d]."""
        return attended if projected.gates is None else attended * sigmoid(projected.gates.flatten(1))

"""A rank's slice of a decoder layer; called like a layer of transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flowspec_edge.stage.layers.attention import attend
from flowspec_edge.stage.layers.kv_cache import KVCache
from flowspec_edge.stage.tensor_parallel.layout import ParallelLayout

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Heads:
    """A rank's run of query heads, possibly empty, and the key/value heads they read.

    query     [lo, hi) of the model's query heads
    keys      [lo, hi) of its key/value heads
    groups    query heads per key/value head as the attention sees them
    expanded  the local key/value head of each local query head, if the run splits groups into unequal
              sizes; otherwise None, and the cache is read in place
    """

    query: tuple[int, int]
    keys: tuple[int, int]
    groups: int
    expanded: tuple[int, ...] | None

    @classmethod
    def of_run(cls, lo: int, hi: int, group: int) -> Heads:
        """For query heads [lo, hi) of a model with ``group`` query heads per key/value head."""
        if lo == hi:
            return cls((lo, hi), (0, 0), 1, None)
        first, end = lo // group, (hi - 1) // group + 1
        reads = tuple(head // group - first for head in range(lo, hi))
        sizes = {reads.count(i) for i in range(end - first)}
        if len(sizes) == 1:
            return cls((lo, hi), (first, end), sizes.pop(), None)
        return cls((lo, hi), (first, end), 1, reads)

    @property
    def count(self) -> int:
        return self.query[1] - self.query[0]

    @property
    def key_count(self) -> int:
        return self.keys[1] - self.keys[0]


class Projection(nn.Module):
    """A slice of a linear layer, or of several that read the same rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in], bias [out]; either width may be 0."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TensorLayer(nn.Module):
    """A rank's slice of one layer; reuses the loaded norms of ``original``."""

    def __init__(self, original: Any, heads: Heads, layout: ParallelLayout, qkv: Projection,
                 o: Projection, gate_up: Projection, down: Projection) -> None:
        """qkv [(heads + 2 key heads) * head_dim, H] and gate_up [2 * width, H] are fused; only the first rank
        has the biases of o and down.
        """
        super().__init__()
        attention = original.self_attn
        self.input_layernorm = original.input_layernorm
        self.post_attention_layernorm = original.post_attention_layernorm
        self.q_norm = getattr(attention, "q_norm", None)  # qwen3
        self.k_norm = getattr(attention, "k_norm", None)
        self.qkv, self.o, self.gate_up, self.down = qkv, o, gate_up, down
        self._layout = layout
        self._heads = heads
        self._activation = original.mlp.act_fn
        self._index = int(attention.layer_idx)
        self._head_dim = int(attention.head_dim)
        self._scaling = float(attention.scaling)
        # Each family defines its own in the module of its attention.
        self._rotate: Callable[..., Rotation] = vars(sys.modules[type(attention).__module__]
                                                     )["apply_rotary_pos_emb"]

    def forward(self, x: Tensor, attention_mask: Tensor, past_key_values: KVCache,
                position_embeddings: Rotation, **_: Any) -> Tensor:
        """[1, m, H] to [1, m, H] for the local rows; mask and rotation are those of all rows."""
        rows = x[0]
        attention = partial(self._attention, mask=attention_mask, cache=past_key_values,
                            rotation=position_embeddings)
        rows = rows + self._layout.block(self.input_layernorm(rows), self.qkv, attention, self.o)
        rows = rows + self._layout.block(self.post_attention_layernorm(rows), self.gate_up, self._mlp,
                                             self.down)
        return rows[None]

    def _attention(self, qkv: Tensor, mask: Tensor, cache: KVCache, rotation: Rotation) -> Tensor:
        """[n, (heads + 2 key heads) * head_dim] to [n, heads * head_dim]."""
        heads, n = self._heads, len(qkv)
        if not heads.count:
            return qkv
        split = qkv.view(1, n, -1, self._head_dim).split((heads.count, heads.key_count, heads.key_count), 2)
        query, key = split[0], split[1]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self._rotate(query.transpose(1, 2), key.transpose(1, 2), *rotation)
        keys, values = cache.update(key, split[2].transpose(1, 2), self._index)
        if heads.expanded is not None:
            keys, values = keys[:, heads.expanded], values[:, heads.expanded]
        out, _ = attend(self, query, keys, values, mask, self._scaling)
        return out.reshape(n, -1)

    def _mlp(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * width] to [n, width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        activated: Tensor = self._activation(gate) * up
        return activated

"""A decoder layer in few kernel launches, for CUDA, called like a layer of transformers.

In float32 the arithmetic is that of transformers; in 16 bits some intermediate results are rounded once less.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from flowspec_edge.model.experts import Experts
from flowspec_edge.stage.layers.attention import BatchCache, BatchMask, attend
from flowspec_edge.stage.layers.kv_cache import KVCache
from flowspec_edge.util.kernels import HeadNorms, RmsNorm, rotate_in_place
from flowspec_edge.util.linears import add_product, detach_and_join

ROW_STEP = 16  # rows are padded to a multiple, so that any number of them runs the same kernels


class Routed(NamedTuple):
    """rows [N, H], the experts that each has chosen and their weights [N, k]."""

    rows: Tensor
    chosen: Tensor
    weights: Tensor


class FusedLayer(nn.Module):
    """Made from a loaded layer of transformers, whose q, k, v, gate and up projections it frees.

    A pass is ``before``, ``attend``, ``after`` and, with experts, ``mix``.  What depends on the text's length
    is in ``attend``, what depends on the rows' values in ``mix``.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._heads = int(attention.config.num_attention_heads)
        self._kv_heads = int(attention.config.num_key_value_heads)
        self._head_dim = int(attention.head_dim)
        self._index = int(attention.layer_idx)
        self._scaling = float(attention.scaling)
        self.input_layernorm = layer.input_layernorm  # keeps the weights among the layer's parameters
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.q_norm = getattr(attention, "q_norm", None)  # qwen3
        self.k_norm = getattr(attention, "k_norm", None)
        self._norm, self._mlp_norm = map(RmsNorm.of, (layer.input_layernorm, layer.post_attention_layernorm))
        self._head_norms = None if self.q_norm is None else HeadNorms.of(
            (self.q_norm, self._heads), (self.k_norm, self._kv_heads))
        self.qkv = detach_and_join(attention, "q_proj", "k_proj", "v_proj")
        self.o_proj = attention.o_proj
        self.sparse = isinstance(getattr(mlp, "experts", None), Experts)
        if self.sparse:
            self.mlp = mlp
            return
        self.gate_up = detach_and_join(mlp, "gate_proj", "up_proj")
        self.down_proj = mlp.down_proj
        self._activation = mlp.act_fn

    def forward(self, x: Tensor, attention_mask: Tensor | BatchMask, past_key_values: KVCache | BatchCache,
                position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """[1, N, H] to [1, N, H], which takes the memory of ``x``; the first n rows enter the cache, the
        others are padding.

        attention_mask       from ``attention.folded_mask``: N rows per group, len(cache) + n columns; or a
                             batch's
        position_embeddings  from ``kernels.rotation``
        """
        split = self.before(x[0], position_embeddings)
        routed = self.after(x[0], self.attend(split, attention_mask, past_key_values))
        if routed is not None:
            self.mix(x[0], routed, new_rows(attention_mask, past_key_values))
        return x

    def before(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """[N, H] to queries, keys and values [N, heads + 2 kv_heads, head_dim]."""
        turned = self._heads + self._kv_heads
        split = self.qkv(self._norm(rows)).view(len(rows), turned + self._kv_heads, self._head_dim)
        if self._head_norms is not None:
            self._head_norms.in_place(split[:, :turned])
        rotate_in_place(split[:, :turned], rotation)
        return split

    def attend(self, split: Tensor, mask: Tensor | BatchMask, cache: KVCache | BatchCache) -> Tensor:
        """Add the keys and values of ``before`` to the cache; [N, heads * head_dim]."""
        new = new_rows(mask, cache)
        keys, values = cache.write(split[:new, self._heads :].unflatten(1, (2, self._kv_heads)), self._index)
        query = split[None, :, : self._heads].transpose(1, 2)
        out, _ = attend(self, query, keys, values, mask, self._scaling)
        return out.reshape(len(split), -1)

    def after(self, rows: Tensor, attended: Tensor) -> Routed | None:
        """Replace ``rows`` [N, H] with the layer's output; with experts, with what ``mix`` completes."""
        add_product(rows, self.o_proj, attended)
        normed = self._mlp_norm(rows)
        if self.sparse:
            _, weights, chosen = self.mlp.gate(normed)
            return Routed(normed, chosen, weights)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        add_product(rows, self.down_proj, self._activation(gate) * up)
        return None

    def mix(self, rows: Tensor, routed: Routed, new: int) -> None:
        """Add what the experts make of the first ``new`` rows: padding touches none."""
        rows[:new] += self.mlp.experts(*(part[:new] for part in routed))


def new_rows(mask: Tensor | BatchMask, cache: KVCache | BatchCache) -> int:
    """Rows of a pass without padding."""
    return mask.rows if isinstance(mask, BatchMask) else mask.shape[-1] - len(cast(KVCache, cache))

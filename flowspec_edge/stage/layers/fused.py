"""A decoder layer in few kernel launches, for CUDA; called like a layer of transformers.

A launch costs tens of microseconds on a slow CPU core, and transformers' layer makes more than 40.  In
float32 the arithmetic is the same; in 16 bits a few intermediate results are rounded once less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowspec_edge.stage.layers.attention import BatchCache, BatchMask, attend
from flowspec_edge.stage.layers.kv_cache import KVCache
from flowspec_edge.stage.quant.base import QuantLinear
from flowspec_edge.stage.weights.load import fast_layout

ROW_STEP = 16  # rows are padded to a multiple, so that any number of them runs the same kernels


class FusedLayer(nn.Module):
    """Made from a loaded layer of transformers, whose q, k, v, gate and up projections it frees."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.q_norm = getattr(attention, "q_norm", None)  # qwen3
        self.k_norm = getattr(attention, "k_norm", None)
        self.qkv = _detach_and_join(attention, "q_proj", "k_proj", "v_proj")
        self.o_proj = attention.o_proj
        self.gate_up = _detach_and_join(mlp, "gate_proj", "up_proj")
        self.down_proj = mlp.down_proj
        self._down_is_plain = type(mlp.down_proj) is nn.Linear and mlp.down_proj.bias is None
        self._activation = mlp.act_fn
        self._index = int(attention.layer_idx)
        self._head_dim = int(attention.head_dim)
        self._heads = int(attention.config.num_attention_heads)
        self._kv_heads = int(attention.config.num_key_value_heads)
        self._scaling = float(attention.scaling)

    def forward(self, x: Tensor, attention_mask: Tensor | BatchMask, past_key_values: KVCache | BatchCache,
                position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """[1, N, H] to [1, N, H]; the first n rows enter the cache, the others are padding.

        attention_mask       from ``attention.folded_mask``: N rows per group, len(cache) + n columns; or a
                             batch's
        position_embeddings  from ``rotation``
        """
        rows = x[0]
        attended = self._attend(_norm(self.input_layernorm, rows), attention_mask, past_key_values,
                                position_embeddings)
        rows = rows + self.o_proj(attended)
        gate, up = self.gate_up(_norm(self.post_attention_layernorm, rows)).chunk(2, dim=-1)
        activated = self._activation(gate) * up
        if self._down_is_plain:
            return rows.addmm_(activated, self.down_proj.weight.t())[None]  # product and sum in one kernel
        return (rows + self.down_proj(activated))[None]

    def _attend(self, rows: Tensor, mask: Tensor | BatchMask, cache: KVCache | BatchCache,
                rotation: tuple[Tensor, Tensor]) -> Tensor:
        """[N, H] to [N, heads * head_dim]."""
        turned, total = self._heads + self._kv_heads, len(rows)
        split = self.qkv(rows).view(total, turned + self._kv_heads, self._head_dim)
        if self.q_norm is not None:
            _norm_in_place(self.q_norm, split[:, : self._heads])
            _norm_in_place(self.k_norm, split[:, self._heads : turned])
        _rotate_in_place(split[:, :turned], rotation)
        new = mask.rows if isinstance(mask, BatchMask) else mask.shape[-1] - len(cast(KVCache, cache))
        keys, values = cache.write(split[:new, self._heads :].unflatten(1, (2, self._kv_heads)), self._index)
        query = split[None, :, : self._heads].transpose(1, 2)
        out, _ = attend(self, query, keys, values, mask, self._scaling)
        return out.reshape(total, -1)


def rotation(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines [1, N, d] as [N, 1, d] each, the sines of the first half negated."""
    low, high = sin[0].chunk(2, dim=-1)
    return cos[0, :, None], torch.cat([-low, high], dim=-1)[:, None]


def _rotate_in_place(x: Tensor, by: tuple[Tensor, Tensor]) -> None:
    """x [N, heads, d]: its halves (a, b) become (a cos - b sin, b cos + a sin)."""
    cos, signed_sin = by
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).addcmul_(swapped, signed_sin)


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _norm_in_place(norm: Any, x: Tensor) -> None:
    x.copy_(_norm(norm, x))


def _detach_and_join(parent: nn.Module, *names: str) -> nn.Module:
    parts = [parent.get_submodule(name) for name in names]
    for name in names:
        delattr(parent, name)
    return join(parts)


def join(parts: Sequence[nn.Module]) -> nn.Module:
    """A module that concatenates the linears' outputs; one product if all have the same storage format."""
    if all(type(part) is nn.Linear for part in parts):
        return _joined(cast("Sequence[nn.Linear]", parts))
    if all(isinstance(part, QuantLinear) for part in parts):
        first, *others = cast("Sequence[QuantLinear]", parts)
        whole = first.joined(others)
        if whole is not None:
            return whole
    return _Concatenated(parts)


def _joined(parts: Sequence[nn.Linear]) -> nn.Linear:
    weight = fast_layout(torch.cat([part.weight for part in parts]))
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        whole.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return whole


class _Concatenated(nn.Module):
    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

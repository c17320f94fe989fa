"""Layers of draft models in few kernel launches, for CUDA.

A launch costs tens of microseconds on a board's CPU, and D0 waits for each pass: nothing hides them.  In
float32 the arithmetic is that of transformers' layers; in 16 bits a few intermediate results are rounded
once less.  Stages have layers of their own (``stage.families``): their caches differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowspec_edge.model.families import family_of
from flowspec_edge.util.kernels import HeadNorms, RmsNorm, rotate_in_place, rotation
from flowspec_edge.util.linears import add_product, detach_and_join

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [n, 1, head_dim] each

_FIRST_POSITIONS = 4096


class RowCache(Protocol):
    def write(self, rows: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store a pass's keys, then values, [n, 2 * kv_heads, head_dim]; return all that are in use, [1,
        kv_heads, m, head_dim] each."""


class PassMask(Protocol):
    """In place of a mask: that of each request's rows, with its own cache."""

    def parts(self) -> Iterator[tuple[slice, RowCache, Tensor]]: ...


class RotaryTable(nn.Module):
    """In place of transformers' rotary embedding: looks cosines and sines up, where that computes them."""

    _table: Tensor

    def __init__(self, rotary: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """``rotary``: of a kind whose angles depend on the position alone (:func:`is_fixed`)."""
        super().__init__()
        self.rotary = rotary.to(device)
        self._dtype = dtype
        self.register_buffer("_table", torch.empty(0, device=device), persistent=False)
        self.reach(_FIRST_POSITIONS - 1)

    @torch.inference_mode()
    def reach(self, position: int) -> None:
        """Make room for positions up to this one."""
        if position < len(self._table):
            return
        positions = torch.arange(max(position + 1, 2 * len(self._table)), device=self._table.device)
        like = self._table.new_empty(0, dtype=self._dtype)
        cos, sin = self.rotary(like, position_ids=positions[None])
        self._table = torch.cat(rotation(cos, sin), 1)  # [positions, 2, head_dim]

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """``position_ids`` [1, n] that have been reached; ``x`` is ignored."""
        cos, sin = self._table.index_select(0, position_ids[0])[:, :, None].unbind(1)
        return cos, sin


def is_fixed(rotary: nn.Module) -> bool:
    """Whether transformers' rotary embedding gives a position the same angles in every pass."""
    return getattr(rotary, "rope_type", "default") not in ("dynamic", "longrope")


class DraftLayer(nn.Module):
    """Attention and MLP of one of transformers' Llama-like layers, whose projections it joins and takes."""

    def __init__(self, attention: Any, mlp: Any, norm: Any) -> None:
        """``norm``: between the two.  All are where, and in the dtype in which, they will be used."""
        super().__init__()
        self.qkv = detach_and_join(attention, "q_proj", "k_proj", "v_proj")
        self.o_proj = attention.o_proj
        self.gate_up = detach_and_join(mlp, "gate_proj", "up_proj")
        self.down_proj = mlp.down_proj
        self._activation = mlp.act_fn
        self._index = int(attention.layer_idx)
        self._head_dim = int(attention.head_dim)
        self._heads = int(attention.config.num_attention_heads)
        self._kv_heads = int(attention.config.num_key_value_heads)
        self._scaling = float(attention.scaling)
        self._norm = RmsNorm.of(norm)
        self._head_norms: HeadNorms | None = None
        if hasattr(attention, "q_norm"):  # qwen3
            self._head_norms = HeadNorms.of((attention.q_norm, self._heads),
                                            (attention.k_norm, self._kv_heads))

    def forward(self, inputs: Tensor, residual: Tensor, angles: Rotation, mask: Tensor | PassMask,
                cache: RowCache) -> Tensor:
        """``inputs`` [n, width] to outputs [n, H], in the place of ``residual``; ``mask`` [1, 1, n, m]."""
        rows = add_product(residual, self.o_proj, self._attend(inputs, angles, mask, cache))
        gate, up = self.gate_up(self._norm(rows)).chunk(2, dim=-1)
        return add_product(rows, self.down_proj, self._activation(gate) * up)

    def _attend(self, inputs: Tensor, angles: Rotation, mask: Tensor | PassMask, cache: RowCache) -> Tensor:
        turned = self._heads + self._kv_heads
        split = self.qkv(inputs).view(len(inputs), turned + self._kv_heads, self._head_dim)
        if self._head_norms is not None:
            self._head_norms.in_place(split[:, :turned])
        rotate_in_place(split[:, :turned], angles)
        query, new = split[:, : self._heads], split[:, self._heads :]
        if isinstance(mask, Tensor):
            return attend(query, *cache.write(new, self._index), mask, self._scaling)
        return torch.cat([attend(query[at], *own.write(new[at], self._index), seen, self._scaling)
                          for at, own, seen in mask.parts()])


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """query [n, heads, d], keys and values [1, kv_heads, m, d], mask [1, 1, n, m]; returns [n, heads * d].

    Groups of query heads share keys and values through strides of 0, where transformers copies them.
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    query = query.transpose(0, 1)[None]
    if heads != kv_heads:  # a key head is one of the batch
        groups = heads // kv_heads
        query = query[0].unflatten(0, (kv_heads, groups))
        keys, values = (states[0, :, None].expand(-1, groups, -1, -1) for states in (keys, values))
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return out.permute(2, 0, 1, 3).flatten(1)


class _ModelLayer(nn.Module):
    """Called as transformers' models call their layers."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._norm = RmsNorm.of(layer.input_layernorm)
        self.rest = DraftLayer(layer.self_attn, layer.mlp, layer.post_attention_layernorm)

    def forward(self, x: Tensor, attention_mask: Tensor, past_key_values: RowCache,
                position_embeddings: Rotation, **_: Any) -> Tensor:
        out: Tensor = self.rest(self._norm(x[0]), x[0], position_embeddings, attention_mask, past_key_values)
        return out[None]


class _ModelNorm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self._norm = RmsNorm.of(norm)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x)


def fuse_model(model: PreTrainedModel) -> bool:
    """Replace a model's layers; returns whether that was possible.  It then takes passes with a mask and a
    :class:`RowCache` alone, and positions that its ``rotary_emb`` has been told of (``reach``)."""
    base: Any = model.base_model
    if not family_of(model.config).llama_like or not is_fixed(base.rotary_emb):
        return False
    base.rotary_emb = RotaryTable(base.rotary_emb, model.dtype, model.device)
    for index, layer in enumerate(base.layers):
        base.layers[index] = _ModelLayer(layer)
    base.norm = _ModelNorm(base.norm)
    return True

"""Draft heads as differentiable functions over batches of texts.

Drafting computes row by row, in place and on joined matrices, which gradients cannot flow through.  The functions here
compute with the same modules, before those are prepared for drafting, and gradients flow through them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowspec_edge.drafting.block.head import BlockHead, ConvolvedLayer, convolved
from flowspec_edge.drafting.eagle.eagle2 import EagleHead
from flowspec_edge.drafting.eagle.eagle3 import Eagle3Head
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.stage.families.decoder import DecoderLayer
from flowspec_edge.stage.families.norm import Norm
from flowspec_edge.stage.families.rotary import Rotary


class KeyValueCache(Protocol):
    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Take a layer's keys and values of some rows.

        Return those of the mask's columns: [B, kv_heads, m, head_dim].
        """


class ContextCache:
    """Older rows' keys and values, by layer, before a pass's own, which are not kept."""

    def __init__(self, context: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._context = context

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        older_keys, older_values = self._context[layer]
        return torch.cat((older_keys, keys), dim=2), torch.cat((older_values, values), dim=2)


def norm(norm_module: nn.Module, x: Tensor) -> Tensor:
    """[..., width] to the same shape."""
    module, wide = cast(Norm, norm_module), x.float()
    # Not F.rms_norm, whose fused kernel on CUDA has a gradient from PyTorch 2.9 on.
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.eps)).to(x.dtype) * module.weight


class Attention:
    """Attention of a head's layers."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        self._config, self._rotary = config, Rotary(config, device)

    def angles(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [B, 1, n, head_dim] of ``positions`` [B, n]."""
        rotation = self._rotary(positions.flatten(), self._config.turns[0], like.dtype)
        cos, sin = (part.view(*positions.shape, -1)[:, None] for part in (rotation.cos, rotation.sin))
        return cos, sin

    def __call__(self, attention: Any, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: KeyValueCache,
                 layer: int = 0) -> Tensor:
        """Map x [B, n, width] to [B, n, H]; the mask is bool, [B or 1, 1, n, m]."""
        queries = self._turned(attention, "q", x, angles)
        keys, values = cache.update(*self.keys_values(attention, x, angles), layer)
        groups = queries.shape[1] // keys.shape[1]
        out = F.scaled_dot_product_attention(queries, keys.repeat_interleave(groups, 1),
                                             values.repeat_interleave(groups, 1), attn_mask=mask)
        attended: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return attended

    def keys_values(self, attention: Any, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, kv_heads, n, head_dim] each."""
        return self._turned(attention, "k", x, angles), self._heads(attention.v_proj(x)).transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._config.head_dim))

    def _turned(self, attention: Any, name: str, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        heads = self._heads(getattr(attention, f"{name}_proj")(x))
        if hasattr(attention, f"{name}_norm"):
            heads = norm(getattr(attention, f"{name}_norm"), heads)
        heads, (cos, signed_sin) = heads.transpose(1, 2), angles
        low, high = heads.chunk(2, -1)
        return heads * cos + torch.cat((high, low), -1) * signed_sin


def mlp(block: Any, x: Tensor) -> Tensor:
    """[..., H] to [..., H]."""
    out: Tensor = block.down_proj(block.activation(block.gate_proj(x)) * block.up_proj(x))
    return out


class Eagle2Pass:
    """Computes what ``EagleHead.forward`` does, over n rows of each of B texts."""

    def __init__(self, head: EagleHead) -> None:
        self._head, self._attention = head, Attention(head.config, head.weight.device)

    def __call__(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: KeyValueCache
                 ) -> Tensor:
        """Run the head's layers over states [B, n, H].

        tokens, positions  [B, n]
        mask               bool [B or 1, 1, n, m] over the cache's rows
        """
        layer: Any = self._head.layer
        x = self._head.fc(torch.cat((self._head.embed_tokens(tokens), states), dim=-1))
        x = x + self._attention(layer.self_attn, x, self._attention.angles(positions, x), mask, cache)
        out: Tensor = x + mlp(layer.mlp, norm(layer.post_attention_layernorm, x))
        return out


class Eagle3Pass:
    """Computes as ``Eagle3Head.fuse``, ``forward`` and ``logits`` do, but over n rows of each of B texts."""

    def __init__(self, head: Eagle3Head) -> None:
        self._head, self._attention = head, Attention(head.config, head.weight.device)

    def fuse(self, states: Tensor) -> Tensor:
        head = self._head
        if head.input_norm is not None:
            states = norm(head.input_norm, states)
        if head.fc_norm is not None:
            parts = states.chunk(len(head.fc_norm), dim=-1)
            states = torch.cat([norm(fc_norm, part) for fc_norm, part in zip(head.fc_norm, parts, strict=True)], -1)
        fused: Tensor = head.fc(states)
        return fused

    def __call__(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: KeyValueCache
                 ) -> Tensor:
        head, layer = self._head, cast(Any, self._head.midlayer)
        normed = norm(layer.hidden_norm, states)
        x = torch.cat((norm(layer.input_layernorm, head.embed_tokens(tokens)), normed), dim=-1)
        attended = self._attention(layer.self_attn, x, self._attention.angles(positions, x), mask, cache)
        x = (normed if head.config.norm_before_residual else states) + attended
        out = x + mlp(layer.mlp, norm(layer.post_attention_layernorm, x))
        return norm(head.norm, out) if head.config.norm_output else out

    def logits(self, outputs: Tensor) -> Tensor:
        """Compute the logits of a head with an lm_head of its own."""
        head = self._head
        logits: Tensor = head.lm_head(outputs if head.config.norm_output else norm(head.norm, outputs))
        return logits


class BlockPass:
    """Computes as ``BlockHead.keys_values`` and ``forward`` do, but over B texts."""

    def __init__(self, head: BlockHead) -> None:
        self._head, self._attention = head, Attention(head.config, head.norm.weight.device)

    def keys_values(self, states: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's keys and values, [B, kv_heads, n, head_dim] each.

        states     [B, n, captured * H]
        positions  [B, n]
        """
        rows = norm(self._head.hidden_norm, self._head.fc(states))
        angles = self._attention.angles(positions, rows)
        for layer in self._head.layers:
            yield self._attention.keys_values(layer.self_attn, rows, angles)

    def __call__(self, embedded: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: KeyValueCache) -> Tensor:
        """Run the head's layers over embedded slots [B, m, H].

        positions  [B, m]
        masks      bool [B or 1, 1, m, columns] each

        Convolutions are over one block a text.
        """
        x, angles = embedded, self._attention.angles(positions, embedded)
        for index, (layer, mask) in enumerate(zip(self._head.layers, masks, strict=True)):
            x = self._layer(cast(DecoderLayer, layer), x, angles, mask, cache, index)
        return norm(self._head.norm, x)

    def _layer(self, layer: Any, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: KeyValueCache,
               index: int) -> Tensor:
        normed = norm(layer.input_layernorm, x)
        if not isinstance(layer, ConvolvedLayer):
            x = x + self._attention(layer.self_attn, normed, angles, mask, cache, index)
            return x + mlp(layer.mlp, norm(layer.post_attention_layernorm, x))
        before, after = layer.attention_conv.kernels(normed)
        attended = self._attention(layer.self_attn, convolved(normed, before), angles, mask, cache, index)
        x = x + convolved(attended, after)
        normed = norm(layer.post_attention_layernorm, x)
        before, after = layer.mlp_conv.kernels(normed)
        return x + convolved(mlp(layer.mlp, convolved(normed, before)), after)

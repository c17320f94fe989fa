"""The gated delta net of Qwen3-Next and its successors over a tree's rows, in the place of transformers' own.

Weights and projections are transformers'; the convolution and the recurrence, in float32, are those of a
``RecurrentLayer``.  For CUDA, layers of these families, recurrent or with attention, run in fewer kernel
launches: their norms, projections and MLPs are exchanged once they are loaded.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowspec_edge.stage.layers.recurrent import RecurrentPass
from flowspec_edge.util.kernels import RmsNorm
from flowspec_edge.util.linears import detach_and_join


class TreeDeltaNet(nn.Module):
    """The modules and tensors of ``net``, under their names."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self._key_heads, self._heads = int(net.num_k_heads), int(net.num_v_heads)
        self._key_width, self._value_width = int(net.head_k_dim), int(net.head_v_dim)
        self._layer = int(net.layer_idx)
        self._by_key_head, self._joined = hasattr(net, "in_proj_qkvz"), False
        for name, module in net.named_children():
            self.add_module(name, module)
        self.dt_bias: Tensor = net.dt_bias
        self.A_log: Tensor = net.A_log

    def __getattr__(self, name: str) -> Any:  # of modules, which may be packed ones
        return super().__getattr__(name)

    def join(self) -> None:
        """Projections of the same rows as one product each; once they are loaded."""
        if hasattr(self, "in_proj_qkv"):
            self.in_proj_qkvz = detach_and_join(self, "in_proj_qkv", "in_proj_z")
            self.in_proj_ba = detach_and_join(self, "in_proj_b", "in_proj_a")
        self._joined = True
        _ = self._constants  # now, and not in a request

    @cached_property
    def _constants(self) -> tuple[Tensor, Tensor, Tensor, RmsNorm]:
        """Of loaded weights, float32: rates of the decay, dt_bias, the convolution's weight [channels,
        kernel], and the norm of the outputs."""
        norm = RmsNorm(self.norm.weight.float(), self.norm.variance_epsilon)
        return -self.A_log.float().exp(), self.dt_bias.float(), self.conv1d.weight[:, 0].float(), norm

    def forward(self, hidden_states: Tensor, cache_params: RecurrentPass, **_: Any) -> Tensor:
        """[1, n, H] to [1, n, H]."""
        x = hidden_states[0]
        inputs, z, b, a = self._projected(x)
        rates, bias, weight, norm = self._constants
        log_decays, betas = rates * F.softplus(a + bias), b.float().sigmoid()
        outputs = [log_decays.new_zeros(rows.stop - rows.start, self._heads, self._value_width)
                   if layer is None else layer.update(inputs[rows], weight, log_decays[rows], betas[rows])
                   for rows, layer in cache_params.recurrent(self._layer)]
        mixed = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        gates = F.silu(z.float()).view(mixed.shape)
        out: Tensor = self.out_proj((norm(mixed) * gates).flatten(1).to(x.dtype))
        return out[None]

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The convolution's inputs [n, channels], z [n, heads * v], b and a [n, heads]."""
        if self._by_key_head:
            return self._interleaved(x)
        if not self._joined:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        values = self._heads * self._value_width
        both = self.in_proj_qkvz(x)
        return both[:, :-values], both[:, -values:], *self.in_proj_ba(x).chunk(2, -1)

    def _interleaved(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Qwen3-Next's projections, which are ordered by key head."""
        group = self._heads // self._key_heads
        values = group * self._value_width
        mixed = self.in_proj_qkvz(x).unflatten(-1, (self._key_heads, -1))
        *inputs, z = mixed.split([self._key_width, self._key_width, values, values], -1)
        b, a = self.in_proj_ba(x).unflatten(-1, (self._key_heads, -1)).split(group, -1)
        return torch.cat([part.flatten(1) for part in inputs], -1), z.flatten(1), b.flatten(1), a.flatten(1)


def recur_over_trees(core: Any) -> None:
    """Replace the recurrent layers' nets of a decoder on the meta device."""
    for layer in core.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn = TreeDeltaNet(layer.linear_attn)


class ZeroCentredNorm(nn.Module):
    """As transformers' RMS norm of these families: it multiplies by 1 + w in float32, whatever the dtype of
    the rows."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._norm = RmsNorm(1.0 + norm.weight.detach().float(), norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).to(x.dtype)


class GatedMlp(nn.Module):
    """Takes the projections of transformers' MLP, gate and up as one product."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up = detach_and_join(mlp, "gate_proj", "up_proj")
        self.down_proj = mlp.down_proj
        self._activation = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(self._activation(gate) * up)
        return out


@torch.inference_mode()
def in_fewer_launches(layer: Any) -> Any:
    """Exchange parts of a loaded layer, recurrent or with attention, and return it.

    The recurrence itself is the same on every device; attention and routers stay transformers'.
    """
    for module in (layer, getattr(layer, "self_attn", None)):
        for name in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"):
            if hasattr(module, name):
                setattr(module, name, ZeroCentredNorm(getattr(module, name)))
    if isinstance(getattr(layer, "linear_attn", None), TreeDeltaNet):
        layer.linear_attn.join()
    if hasattr(layer.mlp, "gate_proj"):
        layer.mlp = GatedMlp(layer.mlp)
    elif hasattr(layer.mlp, "shared_expert"):
        layer.mlp.shared_expert = GatedMlp(layer.mlp.shared_expert)
    return layer

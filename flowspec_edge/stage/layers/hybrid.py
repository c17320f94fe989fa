"""Layers of families with recurrent ones in fewer kernel launches, for CUDA: transformers' layers, with their
norms, projections and MLPs exchanged once they are loaded.

Their norms multiply by 1 + w in float32; so does this, whatever the dtype of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flowspec_edge.stage.layers.delta_net import TreeDeltaNet
from flowspec_edge.util.kernels import RmsNorm
from flowspec_edge.util.linears import detach_and_join


class ZeroCentredNorm(nn.Module):
    """As transformers' RMS norm of these families."""

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
def in_fewer_launches(layer: Any) -> None:
    """Exchange parts of a loaded layer, recurrent or with attention.

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

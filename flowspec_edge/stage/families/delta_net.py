"""The gated delta net of Qwen3-Next and its successors over a tree's rows.

The convolution and the recurrence, in float32, are those of a ``RecurrentLayer``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.stage.families.norm import Norm
from flowspec_edge.stage.families.rotary import Rotation
from flowspec_edge.stage.layers.recurrent import RecurrentPass
from flowspec_edge.stage.layers.recurrent_layer import DeltaShape
from flowspec_edge.util.elementwise import sigmoid, silu, softplus
from flowspec_edge.util.kernels import RmsNorm
from flowspec_edge.util.linears import detach_and_join


class Inputs(NamedTuple):
    """What a layer's projections give N rows.

    They are the convolution's inputs [N, channels], gates of the outputs [N, heads * v], the logarithms of the
    decays and
    the betas [N, heads] in float32.
    """

    convolved: Tensor
    gates: Tensor
    log_decays: Tensor
    betas: Tensor


class DeltaNet(nn.Module):
    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self._index, self._by_key_head = index, config.family.form.delta_by_key_head
        self._shape = shape = DeltaShape.from_config(config)
        hidden, values = config.hidden_size, shape.heads * shape.value_width
        if self._by_key_head:
            self.in_proj_qkvz: nn.Module = nn.Linear(hidden, shape.channels + values, bias=False)
            self.in_proj_ba: nn.Module = nn.Linear(hidden, 2 * shape.heads, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(hidden, shape.channels, bias=False)
            self.in_proj_z = nn.Linear(hidden, values, bias=False)
            self.in_proj_b = nn.Linear(hidden, shape.heads, bias=False)
            self.in_proj_a = nn.Linear(hidden, shape.heads, bias=False)
        self.conv1d = nn.Conv1d(shape.channels, shape.channels, shape.kernel, groups=shape.channels, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(shape.heads), requires_grad=False)
        self.A_log = nn.Parameter(torch.empty(shape.heads), requires_grad=False)
        self.norm = Norm(shape.value_width, config.rms_norm_eps)
        self.out_proj: nn.Module = nn.Linear(values, hidden, bias=False)

    def prepare(self) -> None:
        """Join what is loaded, and convert what is small to float32."""
        if not self._by_key_head:
            self.in_proj_qkvz = detach_and_join(self, "in_proj_qkv", "in_proj_z")
            self.in_proj_ba = detach_and_join(self, "in_proj_b", "in_proj_a")
        self._rates, self._bias = -self.A_log.detach().float().exp(), self.dt_bias.detach().float()
        self._kernel = self.conv1d.weight.detach()[:, 0].float()
        self._out_norm = RmsNorm(self.norm.weight.detach().float(), self.norm.eps)

    def room(self, rows: int, like: Tensor) -> Tensor:
        """Memory for what ``attend`` returns."""
        return like.new_zeros(rows, self._shape.heads, self._shape.value_width, dtype=torch.float32)

    def before(self, x: Tensor, rotation: Rotation | None = None) -> Inputs:
        """Compute what the recurrence needs of normed rows [N, H]; it knows no positions."""
        convolved, gates, b, a = self._interleaved(x) if self._by_key_head else self._projected(x)
        return Inputs(convolved, gates, self._rates * softplus(a + self._bias), sigmoid(b.float()))

    def attend(self, inputs: Inputs, mask: None, cache: RecurrentPass, new: int) -> Tensor:
        """Add the first ``new`` rows to what the layer keeps; [N, heads, v] in float32."""
        parts = [(rows, layer.update(inputs.convolved[rows], self._kernel, inputs.log_decays[rows], inputs.betas[rows]))
                 for rows, layer in cache.recurrent(self._index) if layer is not None]
        if len(parts) == 1 and len(parts[0][1]) == len(inputs.gates):
            return parts[0][1]
        outputs = self.room(len(inputs.gates), inputs.log_decays)
        for rows, output in parts:
            outputs[rows] = output
        return outputs

    @property
    def projection(self) -> nn.Module:
        """Makes [N, H] of what ``finish`` returns."""
        return self.out_proj

    def finish(self, inputs: Inputs, mixed: Tensor) -> Tensor:
        """Norm and gate what ``attend`` returned: [N, heads * v]."""
        gates = silu(inputs.gates.float()).view(mixed.shape)
        return (self._out_norm(mixed) * gates).flatten(1).to(inputs.gates.dtype)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the convolution's inputs, gates, b and a."""
        values = self._shape.heads * self._shape.value_width
        both = self.in_proj_qkvz(x)
        return both[:, :-values], both[:, -values:], *self.in_proj_ba(x).chunk(2, -1)

    def _interleaved(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project as ``_projected``, where projections are ordered by key head."""
        shape = self._shape
        group = shape.heads // shape.key_heads
        values = group * shape.value_width
        mixed = self.in_proj_qkvz(x).unflatten(-1, (shape.key_heads, -1))
        *inputs, z = mixed.split([shape.key_width, shape.key_width, values, values], -1)
        b, a = self.in_proj_ba(x).unflatten(-1, (shape.key_heads, -1)).split(group, -1)
        return torch.cat([part.flatten(1) for part in inputs], -1), z.flatten(1), b.flatten(1), a.flatten(1)

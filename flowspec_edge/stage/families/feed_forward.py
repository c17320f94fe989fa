"""The second half of a decoder layer: an MLP, or a router and experts, perhaps with a shared expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowspec_edge.model.decoder_config import ACTIVATIONS, DecoderConfig
from flowspec_edge.model.experts import ClampedGate, Experts, Gated
from flowspec_edge.model.families import ExpertNames
from flowspec_edge.util.elementwise import gelu_tanh, sigmoid, silu
from flowspec_edge.util.linears import add_product, detach_and_join, product


def _silu(x: Tensor) -> Tensor:
    """Compute SiLU by PyTorch's own kernel: for float32, where no bits are promised."""
    return F.silu(x) if x.dtype == torch.float32 else silu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh") if x.dtype == torch.float32 else gelu_tanh(x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = dict(zip(
    ACTIVATIONS, (_silu, _silu, F.relu, F.gelu, _gelu_tanh, _gelu_tanh), strict=True))


class Routed(NamedTuple):
    """rows [N, H], the experts that each has chosen and their weights [N, k]."""

    rows: Tensor
    expert_ids: Tensor
    weights: Tensor


class Mlp(nn.Module):
    def __init__(self, config: DecoderConfig, inner: int) -> None:
        super().__init__()
        hidden, biases = config.hidden_size, config.mlp_bias
        if config.family.form.one_matrix:
            self.gate_up_proj: nn.Module = nn.Linear(hidden, 2 * inner, bias=biases)
        else:
            self.gate_proj = nn.Linear(hidden, inner, bias=biases)
            self.up_proj = nn.Linear(hidden, inner, bias=biases)
        self.down_proj: nn.Module = nn.Linear(inner, hidden, bias=biases)
        self.activation = _ACTIVATIONS[config.activation]

    def prepare(self) -> None:
        """Join what is loaded."""
        if hasattr(self, "gate_proj"):
            self.gate_up_proj = detach_and_join(self, "gate_proj", "up_proj")

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] to [N, H]."""
        out: Tensor = self.down_proj(self._inner(x))
        return out

    def add_to(self, rows: Tensor, x: Tensor) -> None:
        """Add the output for normed rows ``x`` to ``rows``."""
        add_product(rows, self.down_proj, self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.activation(gate).mul_(up)


class Router(nn.Module):
    """Its matrix stays in the layers' dtype: which experts run depends on it."""

    def __init__(self, config: DecoderConfig, names: ExpertNames) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(config.num_experts), requires_grad=False) if names.clamped else None
        self._top_k, self._normalises_top_k = config.num_experts_per_tok, names.clamped
        self._normed = config.normed_weights

    def forward(self, x: Tensor) -> Routed:
        """[N, H] normed rows."""
        scores = product(x, self.weight, self.bias)
        if self._normalises_top_k:  # the softmax of the chosen experts' scores
            top, expert_ids = scores.topk(self._top_k, -1)
            return Routed(x, expert_ids, top.softmax(-1))
        weights, expert_ids = scores.softmax(-1, dtype=torch.float32).topk(self._top_k, -1)
        if self._normed:
            weights /= weights.sum(-1, keepdim=True)
        return Routed(x, expert_ids, weights.to(x.dtype))


class Mixture(nn.Module):
    """A router and experts; its modules have the names that checkpoints give them."""

    def __init__(self, config: DecoderConfig, names: ExpertNames) -> None:
        super().__init__()
        self._router = names.router
        self.add_module(names.router, Router(config, names))
        gated = (ClampedGate(config.swiglu_alpha, config.swiglu_limit) if names.clamped
                 else Gated(_ACTIVATIONS[config.activation]))
        self.experts = Experts.on_meta(names, config.hidden_size, config.expert_width, config.num_experts, gated)
        if config.shared:
            self.shared_expert = Mlp(config, config.shared)
            self.shared_expert_gate: nn.Module = nn.Linear(config.hidden_size, 1, bias=False)

    def prepare(self) -> None:
        if hasattr(self, "shared_expert"):
            self.shared_expert.prepare()

    def route(self, rows: Tensor, x: Tensor) -> Routed:
        """Choose experts for normed rows ``x``; the shared expert's part is added to ``rows``."""
        routed: Routed = getattr(self, self._router)(x)
        if hasattr(self, "shared_expert"):
            rows += sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return routed


def feed_forward(config: DecoderConfig, index: int) -> Mlp | Mixture:
    """Make layer ``index``'s."""
    names = config.family.experts
    return Mixture(config, names) if names and config.sparse[index] else Mlp(config, config.intermediate_size)

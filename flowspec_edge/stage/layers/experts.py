"""Mixtures of experts, with each expert's matrices as linears of their own: a pass reads the touched ones.

transformers stacks a layer's experts in two tensors and computes them, by default, as grouped products.  Here
every matrix is a linear under the name that checkpoints give it, so that reading, sharding, sizes and
quantisation treat experts like any other matrix, one at a time.  Routers are transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class _Names(NamedTuple):
    """In checkpoints: of the block in its layer, and of an expert's matrices."""

    block: str
    gate: str
    up: str
    down: str


_FAMILIES = {
    "qwen3_moe": _Names("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": _Names("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_next": _Names("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_5_moe_text": _Names("mlp", "gate_proj", "up_proj", "down_proj"),
    "gpt_oss": _Names("mlp", "gate_proj", "up_proj", "down_proj"),
}


class _Matrix(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: checkpoints have the values, and there are many thousands of matrices."""


class Expert(nn.Module):
    """Gate and up stay two products: joined after loading they would leave holes in memory, half as large."""

    def __init__(self, names: _Names, width: int, inner: int, gated: nn.Module, bias: bool = False) -> None:
        """``gated``: what gate and up become."""
        super().__init__()
        self._names = names
        for name, (rows, columns) in {names.gate: (inner, width), names.up: (inner, width),
                                      names.down: (width, inner)}.items():
            self.add_module(name, _Matrix(columns, rows, bias=bias, device="meta"))
        self._gated = gated

    def forward(self, x: Tensor) -> Tensor:
        """[n, H] to [n, H]."""
        gate, up, down = (self.get_submodule(name) for name in self._names[1:])  # packed ones, maybe
        out: Tensor = down(self._gated(gate(x), up(x)))
        return out


class Gated(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        activated: Tensor = self._activation(gate) * up
        return activated


class ClampedGate(nn.Module):
    """gpt-oss: (up + 1) gate sigmoid(alpha gate), with gate at most ``limit`` and up in its range."""

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self._alpha, self._limit = alpha, limit

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self._alpha))


class Experts(nn.ModuleList):
    """A layer's experts, called like transformers'.

    chosen  [n, k] int64 in host memory: the experts of the last pass's rows; None before it
    """

    chosen: Tensor | None = None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[n, H] and each row's k experts with their weights [n, k] to [n, H].

        Time and memory traffic are in proportion to the experts touched, which run in turn.  A row's sum has
        the order of its own choice, whatever other rows there are.
        """
        k = chosen.shape[1]
        self.chosen = chosen.cpu()
        flat = self.chosen.flatten()
        order, counts = flat.argsort(stable=True), flat.bincount(minlength=len(self)).tolist()
        order = order.to(x.device)
        inputs = x[order // k].split(counts)
        sorted_products = torch.cat([self[i](rows) for i, rows in enumerate(inputs) if len(rows)])
        products = torch.empty_like(sorted_products)
        products[order] = sorted_products
        return (products * weights.reshape(-1, 1)).view(len(x), k, -1).sum(1).to(x.dtype)


def separated(stacked: Any, family: str) -> Experts:
    """Experts like transformers' ``stacked`` ones, on the meta device."""
    names, bias = _FAMILIES[family], family == "gpt_oss"
    shape = ((stacked.hidden_size, stacked.intermediate_size) if bias else
             (stacked.hidden_dim, stacked.intermediate_dim))
    gated = ClampedGate(stacked.alpha, stacked.limit) if bias else Gated(stacked.act_fn)
    return Experts(Expert(names, *shape, gated, bias) for _ in range(stacked.num_experts))


def separate_experts(core: Any) -> None:
    """Replace the stacked experts of a decoder on the meta device; dense layers stay as they are."""
    family = core.config.model_type
    for layer in core.layers if family in _FAMILIES else ():
        block, name = layer.mlp, _FAMILIES[family].block
        if hasattr(block, "experts"):
            block.experts = separated(block.experts, family)
        if name != "mlp":  # a layer's forward calls ``mlp``; its tensors have the checkpoint's names
            del layer.mlp
            setattr(layer, name, block)
            layer.__dict__["mlp"] = block


def touched(layers: Iterable[nn.Module], start: int, stop: int) -> tuple[int, float]:
    """Of rows [start, stop) of the last pass: (distinct experts, and how many independent rows would touch on
    average, E (1 - (1 - k/E)^n)), both summed over ``layers``."""
    found, expected = 0, 0.0
    for layer in layers:
        experts = getattr(getattr(layer, "mlp", None), "experts", None)
        if isinstance(experts, Experts) and experts.chosen is not None:
            found += len(experts.chosen[start:stop].unique())
            expected += independent(len(experts), experts.chosen.shape[1], stop - start)
    return found, expected


def independent(experts: int, chosen: int, rows: float) -> float:
    """Distinct experts that ``rows`` touch on average if each chooses ``chosen`` of ``experts`` by itself."""
    return experts * (1 - (1 - chosen / experts) ** rows)

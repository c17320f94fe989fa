"""Mixtures of experts, with each expert's matrices as linears of their own: a pass reads the touched ones.

transformers stacks a layer's experts in two tensors and computes them, by default, as grouped products.  Here
every matrix is a linear under the name that checkpoints give it, so that reading, sharding, sizes and
quantisation treat experts like any other matrix, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowspec_edge.model.expert_counts import independent
from flowspec_edge.model.families import ExpertNames
from flowspec_edge.util.elementwise import sigmoid
from flowspec_edge.util.tensors import indices, on_host


class Expert(nn.Module):
    """Loading puts ``side_by_side``, which have no biases, into one matrix, ``joined``: a launch less."""

    def __init__(self, names: ExpertNames, width: int, inner: int) -> None:
        super().__init__()
        self._gates, self._down = (names.gate, names.up), names.down
        self.side_by_side = () if names.clamped else self._gates
        for name, (rows, columns) in {names.gate: (inner, width), names.up: (inner, width),
                                      names.down: (width, inner)}.items():
            self.add_module(name, nn.Linear(columns, rows, bias=names.clamped, device="meta"))

    def gate_up(self, x: Tensor) -> Tensor:
        """[n, H] to [n, 2I], gates first."""
        parts: dict[str, Any] = self._modules
        out: Tensor = (parts["joined"](x) if "joined" in parts else
                       torch.cat([parts[name](x) for name in self._gates], -1))
        return out

    def down(self, x: Tensor) -> Tensor:
        """[n, I] to [n, H]."""
        out: Tensor = getattr(self, self._down)(x)
        return out


class Gated(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
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
        return (up + 1) * (gate * sigmoid(gate * self._alpha))


class Experts(nn.ModuleList):
    """A layer's experts, called like transformers'.

    expert_ids  [n, k] int64 in host memory: the experts of the last pass's rows; None before it
    """

    expert_ids: Tensor | None = None
    _gated: Any

    def __init__(self, experts: Iterable[nn.Module] = (), gated: nn.Module | None = None) -> None:
        """Take the experts; ``gated``: what gate and up become."""
        super().__init__(experts)
        self.__dict__["_gated"] = gated  # not one of the list

    @classmethod
    def on_meta(cls, names: ExpertNames, width: int, inner: int, count: int, gated: nn.Module) -> Experts:
        """Make ``count`` experts on the meta device."""
        template = Expert(names, width, inner)
        return cls((_like(template) for _ in range(count)), gated)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """[n, H] and each row's k experts with their weights [n, k] to [n, H].

        Memory traffic and launches, two an expert, are in proportion to the experts touched, which run in
        turn.  The host has to know which: this waits for the router.  A row's sum has the order of its own
        choice, whatever other rows there are.
        """
        n, k = expert_ids.shape
        self.expert_ids = on_host(expert_ids)
        flat = self.expert_ids.numpy().ravel()
        order = flat.argsort(kind="stable")
        used_ids, counts = np.unique(flat, return_counts=True)
        experts: list[Any] = [self._modules[str(i)] for i in used_ids]
        row_counts = counts.tolist()
        orders = indices(np.stack([order // k, order.argsort()]), x.device)
        inputs = x[orders[0]].split(row_counts)
        gate_up = torch.cat([expert.gate_up(rows) for expert, rows in zip(experts, inputs, strict=True)])
        inner = self.activated(gate_up).split(row_counts)
        outputs = torch.cat([expert.down(rows) for expert, rows in zip(experts, inner, strict=True)])
        return (outputs[orders[1]].view(n, k, -1) * weights[..., None]).sum(1).to(x.dtype)

    def activated(self, gate_up: Tensor) -> Tensor:
        """[n, 2I] to [n, I]."""
        activated: Tensor = self._gated(*gate_up.chunk(2, -1))
        return activated


def _like(module: nn.Module) -> Any:
    """Copy a module to the meta device, with the same hooks.

    To make many thousands of linears anew takes seconds.
    """
    copied = module.__new__(type(module))
    vars(copied).update(vars(module), _parameters={
        name: value if value is None else nn.Parameter(value.data, requires_grad=False)
        for name, value in module._parameters.items()}, _modules={
        name: part and _like(part) for name, part in module._modules.items()})
    return copied


def touched(layers: Iterable[nn.Module], start: int, stop: int) -> tuple[int, float]:
    """Count the distinct experts of rows [start, stop) in the last pass.

    The second result is how many independent rows would touch on average: E (1 - (1 - k/E)^n). Both are sums over
    ``layers``.
    """
    distinct, expected = 0, 0.0
    for experts, expert_ids in computed(layers):
        distinct += len(expert_ids[start:stop].unique())
        expected += independent(experts, expert_ids.shape[1], stop - start)
    return distinct, expected


def computed(layers: Iterable[nn.Module]) -> Iterator[tuple[int, Tensor]]:
    """(experts, ``Experts.expert_ids``) of each sparse layer that has computed a pass."""
    for layer in layers:
        experts = getattr(layer, "experts", None)
        if isinstance(experts, Experts) and experts.expert_ids is not None:
            yield len(experts), experts.expert_ids


def correlation_of(layers: Sequence[nn.Module], rows: int) -> float | None:
    """Return the correlation of the last pass's choices: c = (U(n) - touched) / (U(n) - k), with sums over ``layers``.

    It is below 0 where rows shared fewer experts than independent rows do on average. None without experts, and if
    the pass had one row or another number than ``rows``.
    """
    choices = [expert_ids for _, expert_ids in computed(layers)]
    if rows < 2 or not choices or len(choices[0]) != rows:
        return None
    distinct, expected = touched(layers, 0, rows)
    spread = expected - sum(expert_ids.shape[1] for expert_ids in choices)
    return (expected - distinct) / spread if spread > 0 else None

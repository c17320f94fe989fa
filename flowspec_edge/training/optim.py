"""Muon for matrices, AdamW for the rest, with one learning-rate schedule.

``torch.optim.Muon`` runs the Newton-Schulz iteration in bfloat16, ten times slower than float32 on CPUs
without bfloat16 arithmetic.  This one stacks equal shapes and uses float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# The quintic's coefficients: torch.optim.Muon's (and Jordan et al., "Muon", 2024).
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(grads: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each matrix in [n, rows, cols] towards 1."""
    x = grads.float() if grads.device.type == "cpu" else grads.bfloat16()
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x.mT if tall else x).to(grads.dtype)


class Muon(torch.optim.Optimizer):
    """For two-dimensional hidden weights only."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95,
                 weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    update = torch.lerp(p.grad, buffer, group["momentum"])
                    by_shape.setdefault(p.shape, []).append((p, update))
            for shape, pairs in by_shape.items():
                params, updates = zip(*pairs, strict=True)
                lr = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, orthogonalise(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-lr)


class Optimiser:
    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float, decay_from: float,
                 warmup: int = 40) -> None:
        """``decay_from``: the fraction of the run after which the rate falls linearly to zero."""
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        hidden = [p for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        ids = {id(p) for p in hidden}
        rest = [p for _, p in named if id(p) not in ids]
        self._rates = (muon_lr, adam_lr)
        self._optimisers: tuple[torch.optim.Optimizer, ...] = (
            Muon(hidden, muon_lr, weight_decay=0.01),
            torch.optim.AdamW(rest, adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._decay_from, self._warmup = decay_from, warmup

    def step(self, step: int, total: int) -> float:
        """Returns the factor on the learning rates."""
        left = (total - step) / max(1.0, total * (1 - self._decay_from))
        factor = min(1.0, (step + 1) / self._warmup, left)
        for optimiser, rate in zip(self._optimisers, self._rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return factor

    def state_dict(self) -> list[dict[str, object]]:
        return [o.state_dict() for o in self._optimisers]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        for optimiser, state in zip(self._optimisers, states, strict=True):
            optimiser.load_state_dict(state)

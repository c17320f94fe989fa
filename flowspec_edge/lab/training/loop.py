"""The training loop of all models: progress, checkpoints, resuming.

Muon for matrices, AdamW for the rest, with one learning-rate schedule.

A resumed run sees the same batches as an undisturbed one, and ends with the same weights.

``torch.optim.Muon`` runs the Newton-Schulz iteration in bfloat16, ten times slower than float32 on CPUs
without bfloat16 arithmetic. This one stacks equal shapes and uses float32 on a CPU.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError, first_line
from flowspec_edge.util.files import replacing

_TABLES = ("embed", "lm_head", "markov_w")  # matrices with a row for each token
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
        """Divide the trained parameters between Muon and AdamW.

        decay_from  fraction of the run after which the rate falls linearly to zero
        warmup      steps in which the rate rises, but never more than a tenth of the run
        """
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        hidden = [p for n, p in trainable if p.ndim == 2 and not any(table in n for table in _TABLES)]
        ids = {id(p) for p in hidden}
        other_parameters = [p for _, p in trainable if id(p) not in ids]
        self._rates = (muon_lr, adam_lr)
        self._optimisers: tuple[torch.optim.Optimizer, ...] = (
            Muon(hidden, muon_lr, weight_decay=0.01),
            torch.optim.AdamW(other_parameters, adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._decay_from, self._warmup = decay_from, warmup

    def step(self, step: int, total: int) -> float:
        """Take one step and return the factor on the learning rates."""
        remaining = (total - step) / max(1.0, total * (1 - self._decay_from))
        factor = min(1.0, (step + 1) / max(1.0, min(self._warmup, total / 10)), remaining)
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


_LOG_EVERY_S = 30.0  # between lines of progress without a terminal, which shows no bar


@dataclass(frozen=True)
class LoopOptions:
    """Options that do not change the weights."""

    checkpoint_every_s: float = 120.0
    compile: bool = True  # takes minutes at the start, saves a quarter of every step


QUICK = LoopOptions(checkpoint_every_s=0.2, compile=False)  # to try a recipe


@dataclass
class Run:
    """A training run: what it trains, and how.

    loss    back-propagates step ``step`` of ``total`` and returns the mean loss
    report  a line of figures, such as the agreement on held-out text
    keep    called before every checkpoint, to write what the run needs beside it
    """

    name: str
    model: nn.Module
    optimiser: Optimiser
    steps: int
    checkpoint: Path
    loss: Callable[[int, int], float]
    report: Callable[[], str]
    checkpoint_every_s: float
    report_every: int = 200
    keep: Callable[[], None] = lambda: None


def train(run: Run) -> None:
    """Run to the last step, from the checkpoint if there is one.

    A terminal shows a progress bar. A log gets a line at the first step and then twice a minute, with the
    time that is left.
    """
    start = _resume(run) if run.checkpoint.exists() else 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    smooth, began = None, time.monotonic()
    saved, logged = began, -_LOG_EVERY_S
    with Progress(*columns) as progress:
        task = progress.add_task(run.name, total=run.steps, completed=start, note="")
        if start:
            progress.console.print(f"{run.name} goes on after step {start}/{run.steps}", soft_wrap=True)
        for step in range(start, run.steps):
            value = run.loss(step, run.steps)
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimiser.step(step, run.steps)
            finished_steps, last, now = step + 1, step + 1 == run.steps, time.monotonic()
            smooth = value if smooth is None else 0.95 * smooth + 0.05 * value
            progress.update(task, completed=finished_steps, note=f"loss {smooth:.3f}")
            line = f"{run.name} step {finished_steps}/{run.steps}: loss {smooth:.3f}"
            if finished_steps % run.report_every == 0 or last:
                progress.console.print(f"{line}  {run.report()}", soft_wrap=True)
            elif not progress.console.is_terminal and now - logged > _LOG_EVERY_S:
                seconds = (now - began) / (finished_steps - start) * (run.steps - finished_steps)
                remaining = timedelta(seconds=round(seconds))
                progress.console.print(f"{line}  about {remaining} left", soft_wrap=True)
                logged = now
            if last or now - saved > run.checkpoint_every_s:
                _save(run, finished_steps)
                saved = time.monotonic()


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that change: frozen ones, such as a target's embedding, are read from the target."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()
            if parameter.requires_grad}


def _resume(run: Run) -> int:
    try:
        state = torch.load(run.checkpoint, map_location="cpu", weights_only=True)
        trained, stored = _trained(run.model), state["model"]
        if trained.keys() != stored.keys():
            raise KeyError(sorted(trained.keys() ^ stored.keys()))
        for name, parameter in trained.items():
            parameter.copy_(stored[name])
        run.optimiser.load_state_dict(state["optimiser"])
        return int(state["step"])
    except Exception as error:  # the remedy is the same for every defect of the file
        raise FlowspecError(
            f"{run.checkpoint} is not a checkpoint of this recipe; delete it to train {run.name} anew"
        ) from error


def _save(run: Run, step: int) -> None:
    run.keep()
    state = {"model": _trained(run.model), "optimiser": run.optimiser.state_dict(), "step": step}
    try:
        with replacing(run.checkpoint) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of what its file raises
        raise FlowspecError(f"cannot write {run.checkpoint}: {first_line(error)}; free some space and run "
                            "this again: it goes on from the checkpoint before") from error


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compiled(function: Callable[..., Tensor], enabled: bool) -> Callable[..., Tensor]:
    """torch.compile, if ``enabled`` and its compiler exists: g++ for CPUs, Triton for GPUs (not on Jetson)."""
    on_gpu = device().type == "cuda"
    installed = importlib.util.find_spec("triton") if on_gpu else shutil.which("g++")
    return torch.compile(function) if enabled and installed else function


def window_batch(count: int, step: int, batch: int, seed: int) -> list[int]:
    """Return the numbers of batch ``step``'s windows: each epoch is a seeded shuffle of all ``count``.

    A text of fewer windows than a batch is one smaller batch.
    """
    per_epoch = max(1, count // batch)
    generator = torch.Generator().manual_seed(seed + step // per_epoch)
    order = torch.randperm(count, generator=generator)
    at = (step % per_epoch) * batch
    numbers: list[int] = order[at : at + batch].tolist()
    return numbers


def cut_windows(tokens: Tensor, length: int, numbers: Sequence[int]) -> Tensor:
    """Return the windows with these numbers: int64 [len(numbers), length + 1]; neighbours share a token."""
    return torch.stack([tokens[i * length : i * length + length + 1] for i in numbers]).long()


def windows(tokens: Tensor, length: int, step: int, batch: int, seed: int) -> Tensor:
    """Return batch ``step`` of a seeded shuffle of all windows: int64 [batch, length + 1]."""
    return cut_windows(tokens, length, window_batch((len(tokens) - 1) // length, step, batch, seed))


def backpropagate(loss: Callable[..., Tensor], dev: torch.device, size: int, *tensors: Tensor) -> float:
    """Return the mean of ``loss`` over equally long ``tensors``, at most ``size`` rows at a time; adds gradients."""
    value, total = 0.0, len(tensors[0])
    for parts in zip(*(t.split(max(1, size)) for t in tensors), strict=True):
        with torch.autocast(dev.type, torch.bfloat16, enabled=dev.type == "cuda"):
            part_loss = loss(*(part.to(dev) for part in parts)) * (len(parts[0]) / total)
        part_loss.backward()
        value += part_loss.item()
    return value

"""The training loop of all models: progress, checkpoints, resuming.

A resumed run sees the same batches as an undisturbed one, and ends with the same weights.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError
from flowspec_edge.training.optim import Optimiser
from flowspec_edge.util.files import replacing

_PLAIN_EVERY = 25  # steps between log lines without a terminal


@dataclass(frozen=True)
class LoopOptions:
    """Options that do not change the weights."""

    checkpoint_every_s: float = 120.0
    compile: bool = True  # takes minutes at the start, saves a quarter of every step


QUICK = LoopOptions(checkpoint_every_s=0.2, compile=False)  # to try a recipe


@dataclass
class Run:
    """``loss`` back-propagates step ``step`` of ``total``, and returns the mean loss."""

    name: str
    model: nn.Module
    optimiser: Optimiser
    steps: int
    checkpoint: Path
    loss: Callable[[int, int], float]
    report: Callable[[], str]
    checkpoint_every_s: float
    report_every: int = 200


def train(run: Run) -> None:
    """Run to the last step, from the checkpoint if there is one."""
    start = _resume(run) if run.checkpoint.exists() else 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    smooth, saved = None, time.monotonic()
    with Progress(*columns) as progress:
        task = progress.add_task(run.name, total=run.steps, completed=start, note="")
        for step in range(start, run.steps):
            value = run.loss(step, run.steps)
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimiser.step(step, run.steps)
            done, last = step + 1, step + 1 == run.steps
            smooth = value if smooth is None else 0.95 * smooth + 0.05 * value
            progress.update(task, completed=done, note=f"loss {smooth:.3f}")
            if done % run.report_every == 0 or last:
                line = f"{run.name} step {done}/{run.steps}: loss {smooth:.3f}  {run.report()}"
                progress.console.print(line, soft_wrap=True)
            elif done % _PLAIN_EVERY == 0 and not progress.console.is_terminal:
                progress.console.print(f"{run.name} step {done}/{run.steps}: loss {smooth:.3f}")
            if last or time.monotonic() - saved > run.checkpoint_every_s:
                _save(run, done)
                saved = time.monotonic()


def _resume(run: Run) -> int:
    try:
        state = torch.load(run.checkpoint, map_location="cpu", weights_only=True)
        run.model.load_state_dict(state["model"])
        run.optimiser.load_state_dict(state["optimiser"])
        return int(state["step"])
    except Exception as error:  # the remedy is the same for every defect of the file
        raise FlowspecError(
            f"{run.checkpoint} is not a checkpoint of this recipe; delete it to train {run.name} anew"
        ) from error


def _save(run: Run, step: int) -> None:
    state = {"model": run.model.state_dict(), "optimiser": run.optimiser.state_dict(), "step": step}
    with replacing(run.checkpoint) as file:
        torch.save(state, file)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compiled(function: Callable[..., Tensor], wanted: bool) -> Callable[..., Tensor]:
    """torch.compile, if ``wanted`` and its compiler exists: g++ for CPUs, Triton for GPUs (not on Jetson)."""
    on_gpu = device().type == "cuda"
    installed = importlib.util.find_spec("triton") if on_gpu else shutil.which("g++")
    return torch.compile(function) if wanted and installed else function


def windows(tokens: Tensor, length: int, step: int, batch: int, seed: int) -> Tensor:
    """Batch ``step`` of a seeded shuffle of all [length + 1] windows: int64 [batch, length + 1]."""
    count = (len(tokens) - 1) // length
    per_epoch = count // batch
    generator = torch.Generator().manual_seed(seed + step // per_epoch)
    order = torch.randperm(count, generator=generator)
    at = (step % per_epoch) * batch
    rows = [tokens[i * length : i * length + length + 1] for i in order[at : at + batch].tolist()]
    return torch.stack(rows).long()


def backpropagate(loss: Callable[..., Tensor], dev: torch.device, size: int, *tensors: Tensor) -> float:
    """The mean of ``loss`` over equally long ``tensors``, at most ``size`` rows at a time; adds gradients."""
    value, total = 0.0, len(tensors[0])
    for parts in zip(*(t.split(max(1, size)) for t in tensors), strict=True):
        with torch.autocast(dev.type, torch.bfloat16, enabled=dev.type == "cuda"):
            part_loss = loss(*(part.to(dev) for part in parts)) * (len(parts[0]) / total)
        part_loss.backward()
        value += part_loss.item()
    return value

"""The training loop that every model shares: progress, checkpoints, resuming.

Knows steps, losses and checkpoint files; does not know what the model is.  A run that is killed
goes on from its last checkpoint with the same batches it would have seen, to the same weights.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError
from flowspec_edge.training.optim import Optimiser

_PLAIN_EVERY = 25  # steps between the lines that take the bar's place where there is no terminal


@dataclass(frozen=True)
class Pace:
    """How a training runs, as against what it computes: nothing here changes the weights."""

    checkpoint_every_s: float = 120.0
    compile: bool = True  # takes minutes at the start, and saves a quarter of every step


@dataclass
class Run:
    """What a training needs.

    loss     back-propagates step ``step`` of ``total`` and returns the mean loss
    report   one line on how good the model is by now; asked for every ``report_every`` steps
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


def train(run: Run) -> None:
    """Run to the end, from the last checkpoint if there is one."""
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
    except Exception as error:  # whatever is wrong with the file, the way out is the same
        raise FlowspecError(
            f"{run.checkpoint} is not a checkpoint of this recipe; delete it to train {run.name} anew"
        ) from error


def _save(run: Run, step: int) -> None:
    partial = run.checkpoint.with_suffix(".partial")
    state = {"model": run.model.state_dict(), "optimiser": run.optimiser.state_dict(), "step": step}
    torch.save(state, partial)
    os.replace(partial, run.checkpoint)


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compiled(function: Callable[..., Tensor], wanted: bool) -> Callable[..., Tensor]:
    """torch.compile where it is wanted and what it generates can be built: C++ on a CPU (a quarter faster),
    Triton's language on a GPU, which wheels for Jetson boards lack."""
    if device().type == "cuda":
        at_hand = importlib.util.find_spec("triton") is not None
    else:
        at_hand = shutil.which("g++") is not None
    return torch.compile(function) if wanted and at_hand else function


def windows(tokens: Tensor, length: int, step: int, batch: int, seed: int) -> Tensor:
    """Batch ``step`` of a seeded shuffle of all [length + 1] windows: int64 [batch, length + 1]."""
    count = (len(tokens) - 1) // length
    per_epoch = count // batch
    generator = torch.Generator().manual_seed(seed + step // per_epoch)
    order = torch.randperm(count, generator=generator)
    at = (step % per_epoch) * batch
    rows = [tokens[i * length : i * length + length + 1] for i in order[at : at + batch].tolist()]
    return torch.stack(rows).long()


def micro_batches(size: int, *tensors: Tensor) -> Iterator[tuple[float, tuple[Tensor, ...]]]:
    """Split equally long tensors into parts of at most ``size`` rows: (share of all rows, parts)."""
    total = len(tensors[0])
    for parts in zip(*(t.split(max(1, size)) for t in tensors), strict=True):
        yield len(parts[0]) / total, parts

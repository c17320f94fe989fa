"""The training loop that every model shares: progress, checkpoints, resuming.

Knows batches and losses; does not know what the model is.  A run that is killed goes on from its
last checkpoint with the same batches it would have seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from flowspec_edge.training.optim import Optimiser

CHECKPOINT_EVERY_S = 120.0


@dataclass
class Run:
    """What a training needs: ``loss(step, total)`` back-propagates and returns the mean loss."""

    name: str
    model: nn.Module
    optimiser: Optimiser
    steps: int
    checkpoint: Path
    loss: Callable[[int, int], float]
    report: Callable[[], str] | None = None
    report_every: int = 200


def train(run: Run) -> None:
    """Run to the end, from the last checkpoint if there is one."""
    start = 0
    if run.checkpoint.exists():
        state = torch.load(run.checkpoint, map_location="cpu", weights_only=True)
        run.model.load_state_dict(state["model"])
        run.optimiser.load_state_dict(state["optimiser"])
        start = int(state["step"])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    smooth, saved = None, time.monotonic()
    with Progress(*columns) as progress:
        task = progress.add_task(run.name, total=run.steps, completed=start, note="")
        for step in range(start, run.steps):
            value = run.loss(step, run.steps)
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimiser.step(step, run.steps)
            smooth = value if smooth is None else 0.95 * smooth + 0.05 * value
            progress.update(task, completed=step + 1, note=f"loss {smooth:.3f}")
            if run.report and ((step + 1) % run.report_every == 0 or step + 1 == run.steps):
                progress.console.print(f"{run.name} step {step + 1}: loss {smooth:.3f}  {run.report()}")
            if time.monotonic() - saved > CHECKPOINT_EVERY_S or step + 1 == run.steps:
                _save(run, step + 1)
                saved = time.monotonic()


def _save(run: Run, step: int) -> None:
    partial = run.checkpoint.with_suffix(".partial")
    state = {"model": run.model.state_dict(), "optimiser": run.optimiser.state_dict(), "step": step}
    torch.save(state, partial)
    os.replace(partial, run.checkpoint)


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def windows(tokens: Tensor, length: int, step: int, batch: int, seed: int) -> Tensor:
    """Batch ``step`` of a seeded shuffle of all [length + 1] windows: int64 [batch, length + 1]."""
    count = (len(tokens) - 1) // length
    per_epoch = count // batch
    generator = torch.Generator().manual_seed(seed + step // per_epoch)
    order = torch.randperm(count, generator=generator)
    at = (step % per_epoch) * batch
    rows = [tokens[i * length : i * length + length + 1] for i in order[at : at + batch].tolist()]
    return torch.stack(rows).long()

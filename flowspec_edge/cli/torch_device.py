"""What ``--device`` means for a model: whether it fits on a GPU of this machine.

Knows what a run keeps on its device.  Imports torch only when something else than the CPU is asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flowspec_edge.cli.options import Dtype
from flowspec_edge.errors import UsageError
from flowspec_edge.manifest import Manifest
from flowspec_edge.modeldir import ModelDir

if TYPE_CHECKING:
    from flowspec_edge.torchdevice import Gpu

_ROWS = 4096  # of a text whose caches must fit, if the model takes as many
# What a driver for NVIDIA's GPUs leaves in /dev: on a PC, on a Jetson, under WSL.
_DRIVERS = ("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "nvmap", "dxg")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def device_of(asked: str, model: ModelDir, dtype: Dtype, *, processes: int = 1, rows: int | None = None,
              ) -> str:
    """The torch device of D0 and of stages on this machine: "cpu" or "cuda:N".

    processes  that use the device at a time
    rows       of all texts, in the caches; by default those of one text

    UsageError for a GPU that is not there or too small.  Where "auto" has a reason to leave out a GPU
    that is there, it is told on stderr.
    """
    # Without a driver there is no need to wait for torch: the processes to come import it meanwhile.
    if asked == "cpu" or (asked == "auto" and not any(list(Path("/dev").glob(name)) for name in _DRIVERS)):
        return "cpu"
    from flowspec_edge.torchdevice import CONTEXT_BYTES, architectures, gpus, pick

    found: list[Gpu] = gpus()
    needed = processes * CONTEXT_BYTES + loaded_bytes(model, dtype, 1, rows) if found else 0
    device, reason = pick(asked, found, architectures(), needed, model.name)
    if reason:
        print(f"flowspec: note: computing on the CPU: {reason}", file=sys.stderr)
    return device


def plain_device_of(device: str, model: ModelDir, dtype: Dtype, processes: int) -> str:
    """Where plain decoding computes beside a cluster of so many processes that is yet to be loaded on
    ``device``: there too, or, told on stderr, on the CPU where the weights do not fit twice."""
    if device == "cpu":
        return "cpu"
    from flowspec_edge.torchdevice import CONTEXT_BYTES, architectures, gpus, pick

    needed = processes * CONTEXT_BYTES + loaded_bytes(model, dtype, copies=2)
    try:
        return pick(device, gpus(), architectures(), needed, f"{model.name} and plain decoding beside it")[0]
    except UsageError as error:
        print(f"flowspec: note: plain decoding computes on the CPU: {error}", file=sys.stderr)
        return "cpu"


def loaded_bytes(model: ModelDir, dtype: Dtype, copies: int = 1, rows: int | None = None) -> int:
    """Bytes of ``copies`` targets, of D0's models and of the caches of ``rows`` rows."""
    rows = min(_ROWS, model.max_positions) if rows is None else rows
    if model.sharded:
        manifest = Manifest.read(model.path)
        wider = _BYTES[dtype] / _BYTES[manifest.compute_dtype]
        d0 = manifest.parts["draft"]
        stages = [part for name, part in manifest.parts.items() if name != "draft"]
        held = copies * sum(part.weight_bytes for part in stages) + d0.weight_bytes
        return int(wider * (held + rows * sum(part.row_bytes for part in (*stages, d0))))
    from flowspec_edge.fleet.memory import model_bytes

    size = model_bytes(str(model.path), dtype)
    caches = rows * (size.layers * size.kv_row + size.draft_kv_row)
    return copies * size.target_weights + size.d0_weights + caches

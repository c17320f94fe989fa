"""Defaults of ``--stages``, ``--dtype`` and ``--device`` for a model; torch is imported only for a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flowspec_edge.cli.common.options import Dtype, DtypeChoice
from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import ModelDir, cache_values
from flowspec_edge.util import procfs

if TYPE_CHECKING:
    from flowspec_edge.model.manifest import Manifest
    from flowspec_edge.util.torchdevice import TorchGpu

_ROWS = 4096  # of text whose caches must fit on a GPU, unless the model takes fewer
# Devices of NVIDIA's drivers in /dev: on a PC, on a Jetson, under WSL.
_DRIVERS = ("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "nvmap", "dxg")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def device_of(requested: str, model: ModelDir, dtype: Dtype, *, processes: int = 1, rows: int | None = None,
              ) -> str:
    """The torch device of D0 and of local stages: "cpu" or "cuda:N".

    ``processes`` share the device; ``rows``: of text in the caches, None: those of one text.  UsageError for
    a GPU that is missing or too small; "auto" prints why it rejects a GPU on stderr.
    """
    # Without a driver there is no GPU, and no need to import torch here.
    driver = any(list(Path("/dev").glob(name)) for name in _DRIVERS)
    if requested == "cpu" or (requested == "auto" and not driver):
        return "cpu"
    from flowspec_edge.util.torchdevice import CONTEXT_BYTES, architectures, gpus, pick

    found: list[TorchGpu] = gpus()
    needed = processes * CONTEXT_BYTES + loaded_bytes(model, dtype, 1, rows) if found else 0
    device, reason = pick(requested, found, architectures(), needed, model.name)
    if reason:
        print(f"flowspec: note: computing on the CPU: {reason}", file=sys.stderr)
    return device


def plain_device_of(device: str, model: ModelDir, dtype: Dtype, processes: int) -> str:
    """``device`` for plain decoding beside a cluster; the CPU, with a note, if the weights do not fit
    twice."""
    if device == "cpu":
        return "cpu"
    from flowspec_edge.util.torchdevice import CONTEXT_BYTES, architectures, gpus, pick

    needed = processes * CONTEXT_BYTES + loaded_bytes(model, dtype, copies=2)
    try:
        return pick(device, gpus(), architectures(), needed, f"{model.name} and plain decoding beside it")[0]
    except UsageError as error:
        print(f"flowspec: note: plain decoding computes on the CPU: {error}", file=sys.stderr)
        return "cpu"


def loaded_bytes(model: ModelDir, dtype: Dtype, copies: int = 1, rows: int | None = None) -> int:
    """Bytes of ``copies`` targets, D0's models, and caches of ``rows`` rows."""
    rows = min(_ROWS, model.max_positions) if rows is None else rows
    if model.sharded:
        manifest = _manifest(model)
        wider = _BYTES[dtype] / _BYTES[manifest.compute_dtype]
        d0 = manifest.parts["draft"]
        stages = [part for name, part in manifest.parts.items() if name != "draft"]
        held = copies * sum(part.weight_bytes for part in stages) + d0.weight_bytes
        return int(wider * (held + rows * sum(part.row_bytes for part in (*stages, d0))))
    from flowspec_edge.fleet.planning.model_size import model_bytes

    size = model_bytes(str(model.path), dtype)
    caches = rows * (size.layers * size.kv_row + size.draft_kv_row)
    return copies * size.target_weights + size.d0_weights + caches


def require_room(context: int, at_once: int, rows: int, model: ModelDir, dtype: Dtype, local: bool) -> None:
    """UsageError, with the context that fits, if the weights and caches of ``rows`` rows (``context`` and the
    drafts of ``at_once`` requests) exceed this machine's available memory; without torch.

    ``local``: whether stages compute in this machine's memory.  Prints a note if ``context`` is more than
    the requests can use, by the model's positions.
    """
    limit = model.max_positions
    positions = f"a text of {model.name} has at most {limit} tokens, {at_once} at once use {at_once * limit}"
    available = procfs.sizes(Path("/proc/meminfo")).get("MemAvailable")
    if model.sharded:
        manifest = _manifest(model)
        wider = _BYTES[dtype] / _BYTES[manifest.compute_dtype]
        weights = wider * sum(part.weight_bytes for part in manifest.parts.values())
        row = wider * sum(part.row_bytes for part in manifest.parts.values())
    else:
        stored = 4 if model.config.get("dtype", model.config.get("torch_dtype")) == "float32" else 2
        files = [file for end in ("safetensors", "bin") for file in model.target.glob(f"*.{end}")]
        weights = sum(file.stat().st_size for file in files) * _BYTES[dtype] / stored
        row = cache_values(model.config) * _BYTES[dtype]
    if local and available is not None and weights + rows * row > available:
        fitting = (int((available - weights) / row) - (rows - context)) // 1000 * 1000
        raise UsageError(
            f"--context {context}: caches of {rows * row / 1e9:,.2f} GB and weights of {weights / 1e9:,.2f} "
            f"GB do not fit in the {available / 1e9:,.2f} GB of memory that are available here: "
            + (f"--context {fitting} fits; {positions}" if fitting > 0 else "use --dtype fp16, a model in 4 "
               "bits (flowspec models shard --dtype int4), or end other programs"))
    if context > at_once * limit:
        print(f"flowspec: note: {positions} of --context {context}; the rest keeps texts that ended, for "
              "requests that continue them", file=sys.stderr)


def _manifest(model: ModelDir) -> Manifest:
    from flowspec_edge.model.manifest import Manifest  # pydantic takes a while

    return Manifest.read(model.path)


_STAGES = 4


def stages_of(model: ModelDir, requested: int) -> int:
    """0: those of a sharded model, or the paper's four."""
    if not model.sharded:
        return requested or _STAGES
    manifest = _manifest(model)
    if requested:
        manifest.check_stages(requested)
    return manifest.stages


def dtype_of(model: ModelDir, requested: DtypeChoice) -> Dtype:
    """"auto": the compute dtype of a sharded model, or fp32."""
    if requested != "auto":
        return requested
    return _manifest(model).compute_dtype if model.sharded else "fp32"


def require_unsharded(model: ModelDir, strategy: str) -> None:
    """UsageError for a tensor-parallel ``strategy`` on a sharded model."""
    if model.sharded:
        raise UsageError(f"{strategy} gives every device a slice of all layers, but {model.path} is sharded "
                         "for a pipeline: use the original checkpoint, or leave this strategy out")

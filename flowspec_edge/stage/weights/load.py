"""Loads weights into modules on the meta device, without holding the weights in memory twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.manifest import Manifest, stage_part
from flowspec_edge.model.modeldir import is_sharded
from flowspec_edge.stage.quant.base import QuantLinear, Scheme
from flowspec_edge.stage.quant.schemes import scheme
from flowspec_edge.stage.weights.checkpoint import Checkpoint, check_shape
from flowspec_edge.stage.weights.tensor_names import is_ignorable
from flowspec_edge.util.tensors import check_finite


def part_of(model_dir: Path | str, part: str) -> Path:
    """The weights' directory: a part of a sharded model, checked against its manifest, or the checkpoint."""
    if not is_sharded(model_dir):
        return Path(model_dir)
    Manifest.read(model_dir).check(part)
    return Path(model_dir) / part


def scheme_of(model_dir: Path | str) -> Scheme | None:
    """The scheme of a model whose matrices are stored in 4 bits, else None."""
    how = Manifest.read(model_dir).quantisation if is_sharded(model_dir) else None
    return scheme(how.kind, how.group) if how else None


def head_scheme_of(model_dir: Path | str) -> Scheme | None:
    """The scheme of a model whose lm_head is stored in 8 or 4 bits, else None."""
    how = Manifest.read(model_dir).lm_head if is_sharded(model_dir) else None
    return scheme(how.kind, how.group) if how else None


def shard_digest(model_dir: Path, index: int, stages: int) -> str:
    """The digest of ``load_shard(model_dir, index, stages, …)``, without loading the weights.

    UsageError if ``model_dir`` is not sharded into ``stages``; FlowspecError for missing or damaged files.
    """
    manifest = Manifest.read(model_dir)
    manifest.check_stages(stages)
    checkpoint = Checkpoint(manifest.directory / stage_part(index))
    return checkpoint.digest(name for name in checkpoint.names if not is_ignorable(name))


def load_modules(parts: Mapping[str, nn.Module], checkpoint: Checkpoint, dtype: torch.dtype,
                 device: torch.device, scheme: Scheme | None = None) -> list[str]:
    """Load every meta parameter of ``parts``, keyed by prefix; returns the names of the tensors read.

    A QuantLinear of ``scheme`` replaces every linear whose weight is not stored in plain form.  Needs some
    tens of MB beyond the modules, and with a scheme one packed matrix.  FlowspecError that names a missing,
    misshapen or damaged tensor.
    """
    read: list[str] = []
    for prefix, module in parts.items():
        if scheme is not None:
            read += _quantised(prefix, module, checkpoint, scheme, dtype, device)
        wanted = module.state_dict()
        names = {key: f"{prefix}.{key}" for key in wanted}
        shapes = checkpoint.shapes(list(names.values()))
        transposed = {f"{name}.weight" if name else "weight" for name, linear in module.named_modules()
                      if isinstance(linear, nn.Linear) and is_transposed(dtype, device)}
        values = {}
        for key, name in names.items():
            check_shape(checkpoint.directory, name, shapes[name], wanted[key].shape)
            values[key] = _copied(checkpoint, name, shapes[name], dtype, device, key in transposed)
        module.load_state_dict(values, strict=True, assign=True)
        module.requires_grad_(False).eval()
        read += names.values()
    return read


def load_tensor(checkpoint: Checkpoint, name: str, shape: torch.Size, dtype: torch.dtype,
                device: torch.device) -> Tensor:
    """FlowspecError unless the tensor has ``shape``."""
    check_shape(checkpoint.directory, name, checkpoint.shapes([name])[name], shape)
    return _copied(checkpoint, name, shape, dtype, device, transposed=False)


def fast_layout(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t() if is_transposed(weight.dtype, weight.device) else weight


def is_transposed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether to transpose linear weights in memory: MKL is a tenth faster in float32 for 1 to 64 rows."""
    return device.type == "cpu" and dtype == torch.float32


def _copied(checkpoint: Checkpoint, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device,
            transposed: bool) -> Tensor:
    """Copies piece by piece, so that the weights are not mapped pages, which the kernel may drop."""
    if transposed:
        value = torch.empty(tuple(reversed(shape)), dtype=dtype, device=device).t()
    else:
        value = torch.empty(shape, dtype=dtype, device=device)
    for lo, piece in checkpoint.pieces(name):
        check_finite(piece, dtype, f"{checkpoint.directory}: tensor {name}")
        (value[lo : lo + len(piece)] if shape else value).copy_(piece)
    return value


def _quantised(prefix: str, module: nn.Module, checkpoint: Checkpoint, scheme: Scheme, dtype: torch.dtype,
               device: torch.device) -> Iterator[str]:
    for path, linear in list(module.named_modules()):
        name = f"{prefix}.{path}"
        if not path or not isinstance(linear, nn.Linear) or f"{name}.weight" in checkpoint:
            continue
        rows, columns = linear.weight.shape
        packed: QuantLinear = scheme.linear(rows, columns, linear.bias is not None, dtype, device)
        stored = {suffix: f"{name}.{suffix}" for suffix in scheme.stored(rows, columns)}
        tensors = checkpoint.tensors(list(stored.values()))
        for full, tensor in tensors.items():
            check_finite(tensor, tensor.dtype, f"{checkpoint.directory}: tensor {full}")
        bias = f"{name}.bias"
        try:
            packed.fill({suffix: tensors[full] for suffix, full in stored.items()},
                        checkpoint.tensors([bias])[bias] if linear.bias is not None else None)
        except FlowspecError as error:
            raise FlowspecError(f"{checkpoint.directory}: {name}: {error}") from error
        parent, _, child = path.rpartition(".")
        setattr(module.get_submodule(parent), child, packed)
        yield from stored.values()
        if linear.bias is not None:
            yield bias

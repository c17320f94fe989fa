"""Weights from a checkpoint into modules that were made on the meta device.

Knows how a tensor gets to its place without being in memory twice, and that quantised linears take the
place of plain ones.  Does not know which modules a stage has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError
from flowspec_edge.stage.checkpoint import Checkpoint, check_shape
from flowspec_edge.stage.quant import QuantLinear, Scheme


def fill(parts: Mapping[str, nn.Module], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device,
         scheme: Scheme | None = None) -> list[str]:
    """Give every meta parameter of ``parts``, named by prefix, its stored values; returns what was read.

    scheme  of the linears whose weight is not stored as such: a QuantLinear takes their place

    No more than some tens of MB are held beside the modules, and one packed matrix where there is a
    scheme.  FlowspecError that names a tensor which is missing, misshapen or damaged.
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
    """One tensor, which must have ``shape``, in memory of its own."""
    check_shape(checkpoint.directory, name, checkpoint.shapes([name])[name], shape)
    return _copied(checkpoint, name, shape, dtype, device, transposed=False)


def laid_out(weight: Tensor) -> Tensor:
    """A linear layer's weight as it is read fastest, see :func:`is_transposed`."""
    return weight.t().contiguous().t() if is_transposed(weight.dtype, weight.device) else weight


def is_transposed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linear layers' weights lie transposed in memory: in float32, with MKL, they are read a
    tenth faster so, for 1 to 64 rows."""
    return device.type == "cpu" and dtype == torch.float32


def _copied(checkpoint: Checkpoint, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device,
            transposed: bool) -> Tensor:
    """A copy piece by piece, so that weights live in memory and not in pages that the kernel may drop."""
    if transposed:
        value = torch.empty(tuple(reversed(shape)), dtype=dtype, device=device).t()
    else:
        value = torch.empty(shape, dtype=dtype, device=device)
    for lo, piece in checkpoint.pieces(name):
        (value[lo : lo + len(piece)] if shape else value).copy_(piece)
    return value


def _quantised(prefix: str, module: nn.Module, checkpoint: Checkpoint, scheme: Scheme, dtype: torch.dtype,
               device: torch.device) -> Iterator[str]:
    """Put a filled QuantLinear in the place of every linear whose plain weight is not stored."""
    for path, linear in list(module.named_modules()):
        name = f"{prefix}.{path}"
        if not path or not isinstance(linear, nn.Linear) or f"{name}.weight" in checkpoint:
            continue
        rows, columns = linear.weight.shape
        packed: QuantLinear = scheme.linear(rows, columns, linear.bias is not None, dtype, device)
        stored = {suffix: f"{name}.{suffix}" for suffix in scheme.stored(rows, columns)}
        tensors = checkpoint.tensors(list(stored.values()))
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

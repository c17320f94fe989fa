"""The schemes of quantised weights by name, and the replacement of a module's linears."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from flowspec_edge.errors import UsageError
from flowspec_edge.model.manifest import HeadBits, ShardDtype
from flowspec_edge.stage.quant.base import DEFAULT_GROUP, KINDS, Kind, Scheme, slices
from flowspec_edge.stage.quant.bnb import BnbScheme
from flowspec_edge.stage.quant.grouped import GroupedScheme
from flowspec_edge.stage.quant.int8 import Int8Scheme


def scheme(kind: Kind, group: int = DEFAULT_GROUP) -> Scheme:
    """UsageError for an unknown kind or group, or without bitsandbytes.

    int4      PyTorch's grouped int4; ``group``: 32, 64, 128 or 256 weights share a scale and a zero
    nf4, fp4  bitsandbytes, always in blocks of 64
    int8      two planes of int4, for lm_head and draft models; ``group`` as for int4
    """
    if kind == "int4":
        return GroupedScheme(group)
    if kind == "int8":
        return Int8Scheme(group)
    if kind in KINDS:
        return BnbScheme(kind)
    raise UsageError(f"no kind of quantised weights {kind!r}: use one of {', '.join(KINDS)}")


def head_scheme(bits: HeadBits) -> Scheme | None:
    """Of lm_head and draft heads; None for "16bit"."""
    return None if bits == "16bit" else scheme(bits)


def default_head_bits(dtype: ShardDtype) -> HeadBits:
    """For a model whose decoder layers are stored in ``dtype``."""
    return "int4" if dtype in KINDS else "16bit"


@torch.no_grad()
def quantise_linears(module: nn.Module, how: Scheme, device: torch.device) -> None:
    """Replace the linears of ``module`` whose shape the scheme takes; they compute on ``device``, in the
    dtype of the weight that they replace.  Linears on the meta device stay."""
    for path in [path for path, part in module.named_modules() if isinstance(part, nn.Linear)]:
        linear = cast(nn.Linear, module.get_submodule(path))  # no list holds those that are replaced
        if how.fits(*linear.weight.shape) is None or any(p.is_meta for p in linear.parameters()):
            continue
        rows, columns = linear.weight.shape
        packed = how.linear(rows, columns, linear.bias is not None, linear.weight.dtype, device)
        for lo, hi in slices(rows, columns):
            packed.fill_rows(lo, how.quantise(linear.weight[lo:hi].to(device)))
        if packed.bias is not None:
            packed.bias.copy_(linear.bias)
        parent, _, child = path.rpartition(".")
        setattr(module.get_submodule(parent), child, packed)

"""The 4-bit schemes by name."""

from __future__ import annotations

from flowspec_edge.errors import UsageError
from flowspec_edge.stage.quant.base import DEFAULT_GROUP, KINDS, Kind, Scheme
from flowspec_edge.stage.quant.bnb import BnbScheme
from flowspec_edge.stage.quant.grouped import GroupedScheme


def scheme(kind: Kind, group: int = DEFAULT_GROUP) -> Scheme:
    """UsageError for an unknown kind or group, or without bitsandbytes.

    int4      PyTorch's grouped int4; ``group``: 32, 64, 128 or 256 weights share a scale and a zero
    nf4, fp4  bitsandbytes, always in blocks of 64
    """
    if kind == "int4":
        return GroupedScheme(group)
    if kind in KINDS:
        return BnbScheme(kind)
    raise UsageError(f"no 4-bit kind {kind!r}: use one of {', '.join(KINDS)}")

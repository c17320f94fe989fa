"""Checkpoints that others have quantised: AWQ and GPTQ linears, repacked as grouped int4.

Both state w = (q - z) * s with an integer z and an fp16 s for every group, which is grouped int4 with
zero = (8 - z) * s; scale and zero are rounded to bfloat16, which moves a weight by at most a twentieth of
a step.  The codes stay as they are.  Knows the layouts; does not open files.

    AWQ   qweight int32 [in, out / 8], qzeros int32 [in / g, out / 8], scales fp16 [in / g, out]; the
          eight columns in an int32 lie in the order 0 2 4 6 1 3 5 7, lowest bits first
    GPTQ  qweight int32 [in / 8, out], qzeros int32 [in / g, out / 8], scales fp16 [in / g, out], in order;
          g_idx [in], the group of every input; qzeros holds z - 1 unless the format is "gptq_v2"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.grouped_fit import pack
from flowspec_edge.stage.quant import DEFAULT_GROUP, slices
from flowspec_edge.stage.quant_grouped import GROUPS, GroupedScheme

_BITS = 4
_IN_WORD = 32 // _BITS
_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # where column i of eight lies
_MIDDLE = 8


def importer(config: Any) -> Importer | None:
    """What reads the quantised linears of a checkpoint with this transformers configuration.

    None where nothing is quantised.  UsageError for a method, format or number of bits that cannot be
    taken, which it names.
    """
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    facts: dict[str, Any] = stated if isinstance(stated, dict) else stated.to_dict()
    method = str(facts.get("quant_method", "unknown")).lower()
    if method not in ("awq", "gptq"):
        raise UsageError(f"the checkpoint is quantised with {method!r}: only AWQ and GPTQ can be read; "
                         "take the model in 16 bits, and have it quantised here")
    bits = facts.get("bits", facts.get("w_bit"))
    if bits != _BITS:
        raise UsageError(f"the checkpoint has {bits} bits a weight ({method.upper()}): only 4 can be read")
    group = facts.get("group_size", facts.get("q_group_size", DEFAULT_GROUP))
    if method == "awq":
        layout = str(facts.get("version") or facts.get("format") or "gemm").lower()
        if layout != "gemm":
            raise UsageError(f"AWQ checkpoints in the layout {layout!r} cannot be read, only 'gemm'")
        return AwqImporter(group)
    layout = str(facts.get("checkpoint_format") or facts.get("format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2") or facts.get("is_marlin_format"):
        found = "marlin" if facts.get("is_marlin_format") else layout
        raise UsageError(f"GPTQ checkpoints in the layout {found!r} cannot be read, "
                         "only 'gptq' and 'gptq_v2'")
    return GptqImporter(group, zeros_less_one=layout == "gptq")


class Importer(ABC):
    """Repacks the linears of one checkpoint.

    group   of the "int4" scheme that holds what ``convert`` returns
    """

    suffixes: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def __init__(self, group_size: Any) -> None:
        if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
            raise UsageError(f"a group size of {group_size!r} in the checkpoint's configuration")
        self._stated = group_size  # -1: a row is one group
        widest = max(GROUPS) if group_size == -1 else group_size
        dividing = [g for g in GROUPS if g <= widest and (group_size == -1 or group_size % g == 0)]
        if not dividing:
            raise UsageError(f"the checkpoint has groups of {group_size} weights: only multiples of "
                             f"{min(GROUPS)} can be read")
        self.group = DEFAULT_GROUP if group_size == -1 else max(dividing)

    def names(self, prefix: str, checkpoint: Container[str]) -> list[str]:
        """The tensors that make up the weight of the linear called ``prefix``, its bias not among them;
        none where this linear was left in 16 bits.  FlowspecError if one is missing."""
        if f"{prefix}.qweight" not in checkpoint:
            return []
        wanted = [f"{prefix}.{suffix}" for suffix in self.suffixes]
        for name in wanted:
            if name not in checkpoint:
                raise FlowspecError(f"the checkpoint has {prefix}.qweight but no {name}: it is incomplete")
        return wanted + [name for suffix in self.optional
                         if (name := f"{prefix}.{suffix}") in checkpoint]

    def convert(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
        """The linear in the layout of ``scheme("int4", self.group)``.

        tensors   what ``names`` named, under those names or their last parts
        rows, columns  of the matrix: outputs and inputs

        FlowspecError that names a tensor of another shape; UsageError for what the layout cannot hold.
        """
        found = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
        scheme = GroupedScheme(self.group)
        group = scheme.group_of(rows, columns)
        source = columns if self._stated == -1 else self._stated
        if columns % source or source % group:
            raise UsageError(f"groups of {source} do not cut {columns} inputs into runs of {group}")
        groups = columns // source
        self._check(found, rows, columns, groups)
        repeats = source // group
        parts: list[dict[str, Tensor]] = []
        for lo, hi in slices(rows, columns):
            codes = self._codes(found["qweight"], lo, hi)
            zeros = self._zeros(found["qzeros"], lo, hi).float()
            scales = found["scales"][:, lo:hi].t().float()
            parts.append({
                "qweight": pack(codes),
                "scales": scales.to(torch.bfloat16).repeat_interleave(repeats, 1),
                "zeros": ((_MIDDLE - zeros) * scales).to(torch.bfloat16).repeat_interleave(repeats, 1),
            })
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _check(self, found: Mapping[str, Tensor], rows: int, columns: int, groups: int) -> None:
        """FlowspecError unless every tensor has its shape; what else a layout asks for."""
        shapes = {"qweight": self._qweight_shape(rows, columns), "scales": (groups, rows),
                  "qzeros": (groups, rows // _IN_WORD)}
        for name, shape in shapes.items():
            if tuple(found[name].shape) != shape:
                raise FlowspecError(f"{name} of a quantised matrix of {rows} x {columns} has shape "
                                    f"{list(found[name].shape)}, and should have {list(shape)}")

    @abstractmethod
    def _qweight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of the codes of a matrix of this shape."""

    @abstractmethod
    def _codes(self, qweight: Tensor, lo: int, hi: int) -> Tensor:
        """Codes of outputs [lo, hi): uint8 [hi - lo, in]."""

    @abstractmethod
    def _zeros(self, qzeros: Tensor, lo: int, hi: int) -> Tensor:
        """Integer zeros of outputs [lo, hi): uint8 [hi - lo, groups]."""


class AwqImporter(Importer):
    """AWQ's "gemm" layout."""

    suffixes = ("qweight", "qzeros", "scales")

    def _qweight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return columns, rows // _IN_WORD

    def _codes(self, qweight: Tensor, lo: int, hi: int) -> Tensor:
        words = _nibbles(qweight[:, lo // _IN_WORD:hi // _IN_WORD])
        return words[..., _AWQ_PLACE].flatten(1).t()

    def _zeros(self, qzeros: Tensor, lo: int, hi: int) -> Tensor:
        return self._codes(qzeros, lo, hi)


class GptqImporter(Importer):
    """GPTQ, groups in order.

    ``zeros_less_one``: the file holds z - 1 in four bits, so that 15 stands for 0.
    """

    suffixes = ("qweight", "qzeros", "scales")
    optional = ("g_idx",)

    def __init__(self, group_size: Any, zeros_less_one: bool) -> None:
        super().__init__(group_size)
        self._less = int(zeros_less_one)

    def _check(self, found: Mapping[str, Tensor], rows: int, columns: int, groups: int) -> None:
        super()._check(found, rows, columns, groups)
        order = found.get("g_idx")
        if order is not None and not torch.equal(
                order.long(), torch.arange(columns, device=order.device) // (columns // groups)):
            raise UsageError("the GPTQ checkpoint was quantised with act-order (desc_act), which puts inputs "
                             "in an order of importance: take one without it")

    def _qweight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return columns // _IN_WORD, rows

    def _codes(self, qweight: Tensor, lo: int, hi: int) -> Tensor:
        return _nibbles(qweight[:, lo:hi].t()).flatten(1)

    def _zeros(self, qzeros: Tensor, lo: int, hi: int) -> Tensor:
        stored = _nibbles(qzeros[:, lo // _IN_WORD:hi // _IN_WORD]).flatten(1).t()
        return (stored + self._less) & 15


def _nibbles(words: Tensor) -> Tensor:
    """The eight numbers 0..15 in each int32, lowest bits first: uint8 [..., 8]."""
    pairs = words.contiguous().view(torch.uint8).view(*words.shape, 4)  # little-endian, as files and CPUs are
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)

"""AWQ and GPTQ checkpoints: their linears, repacked as grouped int4.

Both state w = (q - z) * s with an integer z and an fp16 s per group, which is grouped int4 with
zero = (8 - z) * s.  The codes do not change; rounding scale and zero to bfloat16 moves a weight by at most
a twentieth of a step.

    AWQ   qweight int32 [in, out / 8], qzeros int32 [in / g, out / 8], scales fp16 [in / g, out]; the
          eight columns in an int32 are in the order 0 2 4 6 1 3 5 7, lowest bits first
    GPTQ  qweight int32 [in / 8, out], qzeros int32 [in / g, out / 8], scales fp16 [in / g, out], in order;
          g_idx [in], the group of every input; qzeros holds z - 1 unless the format is "gptq_v2"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.quant.base import Scheme, StoredTensors, slices
from flowspec_edge.stage.quant.grouped import GroupedScheme, pack
from flowspec_edge.stage.quant.sizes import DEFAULT_GROUP, GROUPS

_BITS = 4
_CODES_PER_WORD = 32 // _BITS
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of column i of eight
_MIDDLE = 8


def importer(config: Mapping[str, Any]) -> Importer | None:
    """Return what repacks a checkpoint with such a config.json; None without quantisation.

    UsageError for an unsupported method, format or number of bits.
    """
    facts = config.get("quantization_config")
    if facts is None:
        return None
    method = str(facts.get("quant_method", "unknown")).lower()
    if method == "mxfp4":  # read as 16 bits: ``weights.stacked``
        return None
    if method not in ("awq", "gptq"):
        raise UsageError(f"the checkpoint is quantised with {method!r}: only AWQ and GPTQ can be read; "
                         "take the model in 16 bits, and quantise it with --dtype int4")
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
        layout_name = "marlin" if facts.get("is_marlin_format") else layout
        raise UsageError(f"GPTQ checkpoints in the layout {layout_name!r} cannot be read, "
                         "only 'gptq' and 'gptq_v2'")
    return GptqImporter(group, zeros_less_one=layout == "gptq")


class Importer(ABC):
    """Repacks the linears of one checkpoint; ``group`` is that of the resulting int4 scheme."""

    suffixes = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ()
    only_int4 = True  # nothing else is made of such a checkpoint

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
        """Return the weight tensors of a linear; none if it is in 16 bits.

        FlowspecError if one is missing.
        """
        if f"{prefix}.qweight" not in checkpoint:
            return []
        required = [f"{prefix}.{suffix}" for suffix in self.suffixes]
        for name in required:
            if name not in checkpoint:
                raise FlowspecError(f"the checkpoint has {prefix}.qweight but no {name}: it is incomplete")
        return required + [name for suffix in self.optional
                           if (name := f"{prefix}.{suffix}") in checkpoint]

    def scheme_of(self, prefix: str) -> Scheme:
        """Return how a linear is stored: all of them in the one group."""
        return GroupedScheme(self.group)

    def pieces(self, prefix: str, checkpoint: StoredTensors, rows: int, columns: int) -> Iterator[dict[str, Tensor]]:
        """Yield :meth:`convert` of a linear in one piece, since these formats are stored by columns."""
        yield self.convert(checkpoint.tensors(self.names(prefix, checkpoint)), rows, columns)

    def convert(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
        """Return the linear [rows, columns] in the layout of ``scheme("int4", self.group)``.

        ``tensors`` are those of ``names``, by full name or by suffix.  FlowspecError that names a tensor of
        another shape; UsageError for groups that do not fit.
        """
        stored = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
        scheme = GroupedScheme(self.group)
        group = scheme.group_of(rows, columns)
        source = columns if self._stated == -1 else self._stated
        if columns % source or source % group:
            raise UsageError(f"groups of {source} do not cut {columns} inputs into runs of {group}")
        groups = columns // source
        self._check(stored, rows, columns, groups)
        repeats = source // group
        parts: list[dict[str, Tensor]] = []
        for lo, hi in slices(rows, columns):
            codes = self._codes(stored["qweight"], lo, hi)
            zeros = self._zeros(stored["qzeros"], lo, hi).float()
            scales = stored["scales"][:, lo:hi].t().float()
            parts.append({
                "qweight": pack(codes),
                "scales": scales.to(torch.bfloat16).repeat_interleave(repeats, 1),
                "zeros": ((_MIDDLE - zeros) * scales).to(torch.bfloat16).repeat_interleave(repeats, 1),
            })
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _check(self, stored: Mapping[str, Tensor], rows: int, columns: int, groups: int) -> None:
        shapes = {"qweight": self._qweight_shape(rows, columns), "scales": (groups, rows),
                  "qzeros": (groups, rows // _CODES_PER_WORD)}
        for name, shape in shapes.items():
            if tuple(stored[name].shape) != shape:
                raise FlowspecError(f"{name} of a quantised matrix of {rows} x {columns} has shape "
                                    f"{list(stored[name].shape)}, and should have {list(shape)}")

    @abstractmethod
    def _qweight_shape(self, rows: int, columns: int) -> tuple[int, int]: ...

    @abstractmethod
    def _codes(self, qweight: Tensor, lo: int, hi: int) -> Tensor:
        """Codes of outputs [lo, hi): uint8 [hi - lo, in]."""

    @abstractmethod
    def _zeros(self, qzeros: Tensor, lo: int, hi: int) -> Tensor:
        """Integer zeros of outputs [lo, hi): uint8 [hi - lo, groups]."""


class AwqImporter(Importer):
    def _qweight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return columns, rows // _CODES_PER_WORD

    def _codes(self, qweight: Tensor, lo: int, hi: int) -> Tensor:
        words = _nibbles(qweight[:, lo // _CODES_PER_WORD:hi // _CODES_PER_WORD])
        return words[..., _AWQ_ORDER].flatten(1).t()

    def _zeros(self, qzeros: Tensor, lo: int, hi: int) -> Tensor:
        return self._codes(qzeros, lo, hi)


class GptqImporter(Importer):
    """Repacks GPTQ's matrices.

    ``zeros_less_one``: the file holds z - 1 in four bits, so that 15 stands for 0.
    """

    optional = ("g_idx",)

    def __init__(self, group_size: Any, zeros_less_one: bool) -> None:
        super().__init__(group_size)
        self._less = int(zeros_less_one)

    def _check(self, stored: Mapping[str, Tensor], rows: int, columns: int, groups: int) -> None:
        super()._check(stored, rows, columns, groups)
        order = stored.get("g_idx")
        if order is not None and not torch.equal(
                order.long(), torch.arange(columns, device=order.device) // (columns // groups)):
            raise UsageError("the GPTQ checkpoint was quantised with act-order (desc_act), which puts inputs "
                             "in an order of importance: take one without it")

    def _qweight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return columns // _CODES_PER_WORD, rows

    def _codes(self, qweight: Tensor, lo: int, hi: int) -> Tensor:
        return _nibbles(qweight[:, lo:hi].t()).flatten(1)

    def _zeros(self, qzeros: Tensor, lo: int, hi: int) -> Tensor:
        stored = _nibbles(qzeros[:, lo // _CODES_PER_WORD:hi // _CODES_PER_WORD]).flatten(1).t()
        return (stored + self._less) & 15


def _nibbles(words: Tensor) -> Tensor:
    """Return the eight numbers 0..15 in each int32, lowest bits first: uint8 [..., 8]."""
    pairs = words.contiguous().view(torch.uint8).view(*words.shape, 4)  # little-endian, as files and CPUs are
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)

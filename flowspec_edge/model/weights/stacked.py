"""Experts that a checkpoint stacks, under the names that they have one by one: gpt-oss, in 16 bits or MXFP4.

For E experts of width I in a model of width H, ``experts`` holds

    gate_up_proj  [E, H, 2 I] and down_proj [E, I, H], transposed; or in MXFP4
    gate_up_proj_blocks uint8 [E, 2 I, H / 32, 16], _scales uint8 [E, 2 I, H / 32], and so on for down_proj
    gate_up_proj_bias  [E, 2 I], down_proj_bias [E, H]

Rows of gate and up take turns.  Here expert e has ``experts.e.gate_proj.weight`` [I, H], ``.bias`` [I] and so
on.

An MXFP4 block is 32 values of 4 bits (sign, two bits of exponent, one of mantissa; the lower half of a byte
first) with a common power of two, 2^(scale - 127) (Open Compute Project, Microscaling Formats v1.0).  Each is
exact in bfloat16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.weight_file import TensorInfo, WeightFile

_STACKED = re.compile(r"(.*\.experts)\.(?:gate_up_proj|down_proj)(?:_blocks|_scales|_bias)?")
# Of an expert: the stack that holds its matrix, its first row there, and the step to the next.
_PLACES = {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2),
           "down_proj": ("down_proj", 0, 1)}
_BLOCK = 32  # values with a common scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def stacks(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the stacked tensors among ``names`` by the prefix of their layer's experts."""
    by_prefix: dict[str, list[str]] = {}
    for name in names:
        if match := _STACKED.fullmatch(name):
            by_prefix.setdefault(match[1], []).append(name)
    return by_prefix


class StackedExperts(WeightFile):
    """The experts of one layer, read one at a time: some tens of MB are in memory."""

    def __init__(self, prefix: str, names: Iterable[str], file_of: Callable[[str], WeightFile]) -> None:
        """Take the layer's stacked tensors by their ``names``.

        FlowspecError if one is missing or has an impossible shape.
        """
        self._file_of = file_of
        self._names = set(names)
        self._last_slab: tuple[str, int, Tensor] | None = None
        self.tensors = {}
        self._sources: dict[str, tuple[str, int, str]] = {}  # (stack, expert, matrix) of each tensor
        counts = {}
        for matrix, (stack, _, step) in _PLACES.items():
            name = f"{prefix}.{stack}"
            experts, rows, columns, dtype = self._shape(name)
            counts[name] = experts
            bias = self._info(f"{name}_bias")
            if tuple(bias.shape) != (experts, rows):
                raise self._shape_error(f"{name}_bias", bias, f"[{experts}, {rows}]")
            for expert in range(experts):
                expert_name = f"{prefix}.{expert}.{matrix}"
                self.tensors[f"{expert_name}.weight"] = TensorInfo(torch.Size((rows // step, columns)), dtype)
                self.tensors[f"{expert_name}.bias"] = TensorInfo(torch.Size((rows // step,)), bias.dtype)
                self._sources |= {f"{expert_name}.{part}": (name, expert, matrix) for part in ("weight", "bias")}
        if len(set(counts.values())) > 1:
            counts_text = " and ".join(f"{name} has {count} experts" for name, count in counts.items())
            raise FlowspecError(f"{self.path.parent}: {counts_text}: the checkpoint is incomplete")
        in_turn = sorted(self.tensors, key=lambda name: self._sources[name][1])  # so that a slab is read once
        self.tensors = {name: self.tensors[name] for name in in_turn}

    @property
    def path(self) -> Path:  # type: ignore[override]
        return self._file_of(min(self._names)).path

    def sources(self, name: str) -> list[str]:
        """Return the stacked tensors that hold a tensor."""
        stack = self._sources[name][0]
        parts = ("_bias",) if name.endswith(".bias") else ("", "_blocks", "_scales")
        candidates = [stack + part for part in parts]
        return [stacked for stacked in candidates if stacked in self._names]

    def read(self, name: str, lo: int = 0, hi: int | None = None, buffer: Tensor | None = None) -> Tensor:
        stack, expert, matrix = self._sources[name]
        _, first, step = _PLACES[matrix]
        if name.endswith(".bias"):
            return self._slab(f"{stack}_bias", expert)[first::step][lo:hi]
        if f"{stack}_blocks" not in self._names:
            return self._slab(stack, expert).t()[first::step][lo:hi].contiguous()
        blocks, scales = (self._slab(stack + part, expert)[first::step][lo:hi]
                          for part in ("_blocks", "_scales"))
        return from_mxfp4(blocks, scales)

    def _slab(self, name: str, expert: int) -> Tensor:
        """Return the tensor's part of one expert; the last large one stays in memory for its other rows."""
        if self._last_slab is None or self._last_slab[:2] != (name, expert):
            slab = self._file_of(name).read(name, expert, expert + 1)[0]
            if name.endswith(("_bias", "_scales")):
                return slab
            self._last_slab = name, expert, slab
        return self._last_slab[2]

    def _shape(self, name: str) -> tuple[int, int, int, torch.dtype]:
        """Return a stack's experts, rows and columns of each, and dtype."""
        if name in self._names:
            info = self._info(name)
            if len(info.shape) != 3:
                raise self._shape_error(name, info, "[experts, columns, rows]")
            experts, columns, rows = info.shape
            return experts, rows, columns, info.dtype
        blocks, scales = self._info(f"{name}_blocks"), self._info(f"{name}_scales")
        if len(blocks.shape) != 4 or blocks.shape[3] != _BLOCK // 2 or blocks.dtype != torch.uint8:
            raise self._shape_error(f"{name}_blocks", blocks, f"uint8 [experts, rows, blocks, {_BLOCK // 2}]")
        if scales.shape != blocks.shape[:3] or scales.dtype != torch.uint8:
            raise self._shape_error(f"{name}_scales", scales, f"uint8 {list(blocks.shape[:3])}, one for each block")
        experts, rows, count, _ = blocks.shape
        return experts, rows, count * _BLOCK, torch.bfloat16

    def _info(self, name: str) -> TensorInfo:
        if name not in self._names:
            raise FlowspecError(f"{self.path.parent} has no tensor {name}: the checkpoint is incomplete, or "
                                "not of this architecture")
        return self._file_of(name).info(name)

    def _shape_error(self, name: str, info: TensorInfo, expected: str) -> FlowspecError:
        kind = str(info.dtype).removeprefix("torch.")
        return FlowspecError(f"{self._file_of(name).path}: tensor {name} is {kind} {list(info.shape)}, and "
                             f"must be {expected}: copy the model again")


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[n, g, 16] and [n, g] uint8 to bfloat16 [n, 32 g]."""
    table = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), dtype=torch.float32)
    values = table[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()]
    return torch.ldexp(values, scales.int().sub_(_BIAS)[..., None]).flatten(-2).to(torch.bfloat16)

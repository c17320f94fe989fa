"""Loads weights into modules on the meta device, without holding the weights in memory twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.manifest import Manifest, stage_part
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.weights.checkpoint import Checkpoint, check_shape
from flowspec_edge.stage.quant.base import QuantLinear, Scheme
from flowspec_edge.stage.quant.schemes import LayerSchemes, draft_scheme, scheme
from flowspec_edge.stage.weights.tensor_names import is_ignorable
from flowspec_edge.util.bounded_read import PIECE
from flowspec_edge.util.tensors import check_finite

_JOINED = ".joined.weight"  # of matrices that are side by side (``_join``)


def schemes_of(model: OpenModel) -> LayerSchemes | None:
    """Return the schemes of a model whose layers' matrices are stored in 4 bits, or some in 8, else None."""
    quantisation = model.manifest.quantisation if model.manifest else None
    if quantisation is None:
        return None
    return LayerSchemes(scheme(quantisation.kind, quantisation.group), frozenset(quantisation.int8))


def head_scheme_of(model: OpenModel) -> Scheme | None:
    """Return the scheme of a model whose lm_head is stored in 8 or 4 bits, else None."""
    lm_head = model.manifest.lm_head if model.manifest else None
    return scheme(lm_head.kind, lm_head.group) if lm_head else None


def draft_scheme_of(model: OpenModel) -> Scheme | None:
    """Return the scheme to which a model's draft heads are brought when they are loaded.

    None if they stay as stored.
    """
    lm_head = model.manifest.lm_head if model.manifest else None
    return draft_scheme(lm_head.kind) if lm_head else None


def shard_digest(manifest: Manifest, index: int) -> str:
    """Return the digest of ``load_shard`` for stage ``index``, without loading the weights.

    FlowspecError for missing or damaged files.
    """
    checkpoint = Checkpoint(manifest.directory / stage_part(index))
    return checkpoint.digest(name for name in checkpoint.names if not is_ignorable(name))


def load_modules(parts: Mapping[str, nn.Module], checkpoint: Checkpoint, dtype: torch.dtype,
                 device: torch.device, schemes: LayerSchemes | None = None) -> list[str]:
    """Load every meta parameter of ``parts``, keyed by prefix; returns the names of the tensors read.

    A QuantLinear of ``schemes`` replaces every linear whose weight is not stored in plain form.  Needs some
    tens of MB beyond the modules, and with schemes one packed matrix.  FlowspecError that names a missing,
    misshapen or damaged tensor.
    """
    names: list[str] = []
    buffer = torch.empty(PIECE, dtype=torch.uint8, device="cpu")
    for prefix, module in parts.items():
        packed = _packed(prefix, module, checkpoint, schemes, dtype, device) if schemes else {}
        joined_parts = _joined(prefix, module, dtype, device)
        state = module.state_dict()
        values = {key: value for key, value in state.items() if key.endswith(_JOINED)}
        shapes = {f"{prefix}.{key}": value.shape for key, value in state.items() if key not in values}
        shapes |= {name: part.shape for name, part in joined_parts.items()}
        transposed = {f"{prefix}.{name}.weight" if name else f"{prefix}.weight"
                      for name, linear in module.named_modules()
                      if isinstance(linear, nn.Linear) and is_transposed(dtype, device)}
        for name in checkpoint.in_file_order(dict.fromkeys([*shapes, *packed])):  # with experts, thousands
            if name in packed:
                tensor = checkpoint.tensors([name])[name]
                check_finite(tensor, tensor.dtype, f"{checkpoint.display_path}: tensor {name}")
                packed[name].add(name, tensor)
            else:
                value = load_tensor(checkpoint, name, shapes[name], dtype, device, name in transposed, buffer,
                                    joined_parts.get(name))
                if name not in joined_parts:
                    values[name.removeprefix(f"{prefix}.")] = value
            names.append(name)
        module.load_state_dict(values, strict=True, assign=True)
        module.requires_grad_(False).eval()
    return names


def load_tensor(checkpoint: Checkpoint, name: str, shape: torch.Size, dtype: torch.dtype,
                device: torch.device, transposed: bool = False, buffer: Tensor | None = None,
                into: Tensor | None = None) -> Tensor:
    """Load a tensor; FlowspecError unless it has ``shape``.

    transposed  in memory
    buffer      as for ``WeightFile.pieces``
    into        memory that it has
    """
    check_shape(checkpoint.directory, name, checkpoint.stored([name])[name].shape, shape)
    value = _empty(shape, dtype, device, transposed) if into is None else into
    for lo, piece in checkpoint.pieces(name, buffer=buffer):
        check_finite(piece, dtype, f"{checkpoint.display_path}: tensor {name}")
        (value[lo : lo + len(piece)] if shape else value).copy_(piece)
    return value


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device, transposed: bool) -> Tensor:
    if transposed:
        return torch.empty(tuple(reversed(shape)), dtype=dtype, device=device).t()
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def fast_layout(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t() if is_transposed(weight.dtype, weight.device) else weight


def is_transposed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether to transpose linear weights in memory: MKL is a tenth faster in float32 for 1 to 64 rows."""
    return device.type == "cpu" and dtype == torch.float32


class _PackedMatrix:
    """Fills its rows of a QuantLinear once it has all tensors: files hold the small ones of all matrices first."""

    def __init__(self, source: str, linear: QuantLinear, names: Mapping[str, str], bias: str | None,
                 first: int, rows: int) -> None:
        self._source, self._linear, self._bias = source, linear, bias
        self._first, self._rows = first, rows
        self._names = names  # of the tensors, by suffix
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor
        if len(self._tensors) < len(self._names) + (self._bias is not None):
            return
        try:
            self._linear.fill({suffix: self._tensors[full] for suffix, full in self._names.items()},
                              None if self._bias is None else self._tensors[self._bias],
                              self._first, self._rows)
        except FlowspecError as error:
            raise FlowspecError(f"{self._source}: {error}") from error
        self._tensors.clear()


def _packed(prefix: str, module: nn.Module, checkpoint: Checkpoint, schemes: LayerSchemes, dtype: torch.dtype,
            device: torch.device) -> dict[str, _PackedMatrix]:
    """Put QuantLinears in the place of linears that are stored quantised.

    The result has the matrix that each stored tensor is a part of, by the tensor's name.
    """
    matrices: dict[str, _PackedMatrix] = {}

    def fill(path: str, packed: QuantLinear, first: int, rows: int) -> None:
        name = f"{prefix}.{path}"
        names = {suffix: f"{name}.{suffix}" for suffix in packed.scheme.stored(rows, packed.in_features)}
        bias = f"{name}.bias" if packed.bias is not None else None
        matrix = _PackedMatrix(f"{checkpoint.display_path}: {name}", packed, names, bias, first, rows)
        matrices.update(dict.fromkeys([*names.values(), *([bias] if bias else [])], matrix))

    def is_packed(path: str, linear: object) -> bool:
        return isinstance(linear, nn.Linear) and f"{prefix}.{path}.weight" not in checkpoint

    for parent, paths, rows, columns in _side_by_side(module):
        layer_scheme, *others = [schemes.scheme_for(f"{prefix}.{path}") for path in paths]
        if (all(is_packed(path, module.get_submodule(path)) for path in paths)
                and all(other is layer_scheme for other in others) and layer_scheme.joins(rows, columns)):
            packed = layer_scheme.linear(sum(rows), columns, False, dtype, device)
            for path, first, count in zip(paths, accumulate([0, *rows]), rows, strict=False):
                fill(path, packed, first, count)
            _join(parent, packed)
    for path, linear in list(module.named_modules()):
        if path and is_packed(path, linear):
            rows, columns = linear.weight.shape
            scheme = schemes.scheme_for(f"{prefix}.{path}")
            packed = scheme.linear(rows, columns, linear.bias is not None, dtype, device)
            fill(path, packed, 0, rows)
            owner, _, child = path.rpartition(".")
            setattr(module.get_submodule(owner), child, packed)
    return matrices


def _joined(prefix: str, module: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Make one linear of those that are side by side; return the places of their weights in it, by name."""
    joined_parts: dict[str, Tensor] = {}
    for parent, paths, rows, columns in _side_by_side(module):
        if any(type(module.get_submodule(path)) is not nn.Linear for path in paths):
            continue  # one is packed
        linear = nn.Linear(columns, sum(rows), bias=False, device="meta")
        weight = _empty((sum(rows), columns), dtype, device, is_transposed(dtype, device))
        linear.weight = nn.Parameter(weight, requires_grad=False)
        joined_parts |= {f"{prefix}.{path}.weight": part for path, part in
                         zip(paths, weight.split(rows), strict=True)}
        _join(parent, linear)
    return joined_parts


def _side_by_side(module: nn.Module) -> Iterator[tuple[Any, list[str], list[int], int]]:
    """Yield each parent with linears that multiply the same rows, without biases: (parent, paths, rows, columns).

    The parent's ``side_by_side`` names the linears, and it still has them.
    """
    for path, parent in list(module.named_modules()):
        names = getattr(parent, "side_by_side", ())
        if names and all(name in parent._modules for name in names):
            linears: list[Any] = [parent.get_submodule(name) for name in names]
            yield (parent, [f"{path}.{name}" for name in names],
                   [linear.out_features for linear in linears], linears[0].in_features)


def _join(parent: Any, linear: nn.Module) -> None:
    for name in parent.side_by_side:
        delattr(parent, name)
    parent.joined = linear

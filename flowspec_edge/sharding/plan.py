"""Plans a sharding from names, shapes and dtypes alone; reads no weights and writes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import cast, get_args

import torch

from flowspec_edge.errors import UsageError
from flowspec_edge.model.candidates import LEAST_COUNT, candidates_for, default_count
from flowspec_edge.model.manifest import (
    DRAFT,
    DRAFT_TARGET,
    CacheBits,
    ComputeDtype,
    HeadBits,
    QuantKind,
    ShardDtype,
    stage_part,
)
from flowspec_edge.model.weights.located import INDEX, SAFE, display_path
from flowspec_edge.sharding.source import Linear, SourceModel
from flowspec_edge.sharding.writer import Layout, file_size
from flowspec_edge.stage.layers.kinds import layer_kinds
from flowspec_edge.stage.layers.recurrent import GatedDelta
from flowspec_edge.stage.output_head import PREFIX as HEAD_PREFIX
from flowspec_edge.stage.quant.base import Scheme
from flowspec_edge.stage.quant.schemes import draft_scheme, head_scheme, scheme
from flowspec_edge.stage.quant.sizes import DEFAULT_GROUP, Packed, default_head_bits, factor_bytes
from flowspec_edge.stage.shard import split_layers
from flowspec_edge.stage.weights import tensor_names
from flowspec_edge.util.tensors import DTYPES

DTYPE_NAMES: dict[torch.dtype, ComputeDtype] = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

# Small matrices of recurrent layers and mixtures, whose outputs are decays and gates.
IN_16_BITS = (".in_proj_a", ".in_proj_b", ".in_proj_ba", ".shared_expert_gate")


@dataclass(frozen=True)
class Recipe:
    """The storage of weights, as the options of ``flowspec models shard`` ask for it.

    The options are ``--dtype``, ``--group``, ``--compute-dtype``, ``--lm-head``, ``--kv-cache`` and ``--candidates``.

    compute  dtype of computation on the devices
    plain    dtype of everything that is not quantised
    scheme   of the decoder layers' matrices, but for those that a GGUF file has in other than 4 bits; None if they
             stay plain
    lm_head  of lm_head; None if it stays plain
    """

    dtype: ShardDtype
    compute: ComputeDtype
    plain: torch.dtype
    scheme: Scheme | None
    group: int
    lm_head: Scheme | None = None
    kv_cache: CacheBits = "16bit"
    candidates: int = 0

    @property
    def kind(self) -> QuantKind | None:
        return cast(QuantKind, self.scheme.kind) if self.scheme else None


@dataclass(frozen=True)
class TensorsFile:
    """A safetensors file: ``plain`` tensors of the source, cast, and ``packed`` matrices in 4 bits.

    ``head``: the matrix that is written as a quantised lm_head.
    """

    path: Path
    plain: tuple[str, ...]
    packed: tuple[Linear, ...] = ()
    head: str | None = None


@dataclass(frozen=True)
class TextFile:
    path: Path
    data: bytes


@dataclass(frozen=True)
class CopiedFile:
    path: Path
    source: Path


PlannedFile = TensorsFile | TextFile | CopiedFile


@dataclass(frozen=True)
class PlannedPart:
    name: str
    files: tuple[PlannedFile, ...]
    parameters: int
    weight_bytes: int
    row_bytes: int
    windows: dict[int, int] = field(default_factory=dict)  # as in the manifest, and so ``states``
    states: int = 0


@dataclass(frozen=True)
class ShardingPlan:
    """What a model's files will hold.

    unquantised  matrices that stay in 16 bits beside those in 4
    int8         matrices in 8 bits; their names lack ``.weight``
    """

    source: SourceModel
    recipe: Recipe
    ranges: tuple[tuple[int, int], ...]
    parts: tuple[PlannedPart, ...]
    unquantised: tuple[str, ...]
    int8: tuple[str, ...]

    def layout(self, file: TensorsFile) -> Layout:
        return _layout(self.source, self.recipe, file)

    def size(self, file: PlannedFile) -> int:
        if isinstance(file, TensorsFile):
            return file_size(self.layout(file))
        return len(file.data) if isinstance(file, TextFile) else file.source.stat().st_size

    @cached_property
    def request(self) -> str:
        """A fingerprint of everything that determines the output, the source's weights included."""
        source = self.source
        facts = [
            source.config_sha256, source.weights.digest(source.weights.names), self.ranges,
            self.recipe.dtype, self.recipe.compute, str(self.recipe.plain), self.recipe.group,
            head.kind if (head := self.recipe.lm_head) else None, self.recipe.kv_cache,
            [(path.name, path.stat().st_size) for path in source.extra_files],
            [(d.kind.name, d.fingerprint, [(path.name, path.stat().st_size) for path in d.files])
             for d in source.drafts],
            *([self.int8] if self.int8 else []),
            *([f"candidates {self.recipe.candidates}"] if self.recipe.candidates else []),
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def recipe_for(source: SourceModel, dtype: ShardDtype | None = None, group: int | None = None,
               compute: ComputeDtype | None = None, lm_head: HeadBits | None = None,
               kv_cache: CacheBits = "16bit", candidates: int | None = None) -> Recipe:
    """Choose how weights are stored; UsageError for options that conflict with one another or the checkpoint.

    dtype    None: the checkpoint's own 16-bit type, or fp16; int4 if its matrices are in 4 bits, as AWQ's and
             GPTQ's have to remain
    group    weights that share a scale in int4; None: 128, or that of a checkpoint in 4 bits
    compute  None: bf16 if matrices are in 4 bits, else the dtype of the weights
    lm_head  None: ``default_head_bits``
    candidates  of D0's candidate head; None: ``default_count``
    """
    recipe = _layers_recipe(source, dtype, group, compute)
    bits = lm_head or default_head_bits(recipe.dtype)
    lm_head_scheme = head_scheme(bits)
    rows, columns = source.tensors[tensor_names.EMBEDDING].shape
    if lm_head_scheme is not None and lm_head_scheme.fits(rows, columns) is None:
        if lm_head is not None:
            raise UsageError(f"--lm-head {bits} cannot hold an lm_head of {rows} x {columns}: the vocabulary "
                             "must be a multiple of 16, the width of 32; use 16bit")
        lm_head_scheme = None
    return replace(recipe, lm_head=lm_head_scheme, kv_cache=kv_cache,
                   candidates=_candidates(source, candidates, rows, columns))


def _candidates(source: SourceModel, requested: int | None, rows: int, columns: int) -> int:
    """0 if no draft model here ranks by the whole lm_head."""
    if requested and candidates_for(requested, rows, columns) is None:
        raise UsageError(f"--candidates {requested} does not go with an lm_head of {rows} x {columns}: "
                         f"{LEAST_COUNT} at least, a quarter of its tokens at most, or 0 for no candidate head")
    count = default_count(rows) if requested is None else requested
    return count if any(draft.ranks_by_target for draft in source.drafts) else 0


def _layers_recipe(source: SourceModel, dtype: ShardDtype | None, group: int | None,
                   compute: ComputeDtype | None) -> Recipe:
    float_dtype = source.dtype if source.dtype in (torch.float16, torch.bfloat16) else torch.float16
    imported = source.imported
    if imported is not None and (imported.only_int4 or dtype in (None, "int4")):
        if dtype not in (None, "int4") or group not in (None, imported.group):
            raise UsageError(f"{display_path(source.weights.directory)} is quantised already, in groups of "
                             f"{imported.group}: it can only become int4 with these; for another kind take it in "
                             "16 bits")
        dtype, group = "int4", imported.group
    if dtype is None:
        dtype = DTYPE_NAMES[float_dtype]
    if dtype not in get_args(QuantKind):
        if group is not None:
            raise UsageError(f"--group goes with --dtype int4, not with {dtype}")
        plain = DTYPES[dtype]
        return Recipe(dtype, compute or DTYPE_NAMES[plain], plain, None, 0)
    if group is not None and dtype != "int4":
        raise UsageError(f"--group goes with --dtype int4; {dtype} has blocks of 64")
    compute = compute or "bf16"
    if source.dtype not in DTYPE_NAMES or source.dtype == torch.float32:
        float_dtype = DTYPES[compute] if compute != "fp32" else torch.float16
    layer_scheme = scheme(cast(QuantKind, dtype), group or DEFAULT_GROUP)
    return Recipe(dtype, compute, float_dtype, layer_scheme, (group or DEFAULT_GROUP) if dtype == "int4" else 64)


def ranges_for(layers: int, stages: int | None, split: Sequence[int] | None) -> tuple[tuple[int, int], ...]:
    """[lo, hi) of every stage: an even split, or runs of the lengths in ``split``.

    UsageError unless exactly one is given, every stage has a layer and every layer a stage.
    """
    if (stages is None) == (split is None):
        raise UsageError("give either --stages N or --split, such as --split 8,8,8,8")
    if split is None:
        assert stages is not None
        return tuple(split_layers(layers, stages))
    if min(split, default=0) < 1:
        raise UsageError(f"--split {','.join(map(str, split))}: every stage needs at least one layer")
    if sum(split) != layers:
        raise UsageError(f"--split {','.join(map(str, split))} makes {sum(split)} layers, and the model has "
                         f"{layers}")
    ends = [sum(split[: i + 1]) for i in range(len(split))]
    return tuple((end - length, end) for end, length in zip(ends, split, strict=True))


def make_plan(source: SourceModel, recipe: Recipe, ranges: Sequence[tuple[int, int]]) -> ShardingPlan:
    stages = [_stage(source, recipe, i, ranges) for i in range(len(ranges))]
    unquantised = tuple(f"{linear.prefix}.weight" for layer in source.linears for linear in layer
                        if recipe.scheme is not None and not _is_packed(source, recipe, linear))
    int8 = tuple(linear.prefix for layer in source.linears for linear in layer
                 if (linear_scheme := _scheme_of(source, recipe, linear)) is not None and linear_scheme.kind == "int8")
    return ShardingPlan(source, recipe, tuple(ranges), (*stages, _draft(source, recipe)), unquantised, int8)


def _stage(source: SourceModel, recipe: Recipe, index: int, ranges: Sequence[tuple[int, int]]) -> PlannedPart:
    lo, hi = ranges[index]
    home = Path(stage_part(index))
    files: list[TensorsFile] = []
    if index == 0:
        files.append(TensorsFile(home / "embed.safetensors", (tensor_names.EMBEDDING,)))
    for i in range(lo, hi):
        packed = tuple(linear for linear in source.linears[i] if _is_packed(source, recipe, linear))
        inside = {f"{linear.prefix}.weight" for linear in packed}
        plain = tuple(name for name in source.tensors
                      if name.startswith(f"model.layers.{i}.") and name not in inside)
        files.append(TensorsFile(home / f"layer-{i:05d}.safetensors", plain, packed))
    if index == len(ranges) - 1:
        files.append(TensorsFile(home / "norm.safetensors", ("model.norm.weight",)))
    width = DTYPES[recipe.compute].itemsize
    layouts = {file.path.name: _layout(source, recipe, file) for file in files}
    index_file = {
        "metadata": {"total_size": sum(prod(shape) * dtype.itemsize for layout in layouts.values()
                                       for shape, dtype in layout.values())},
        "weight_map": {name: file for file, layout in layouts.items() for name in layout},
    }
    texts = (TextFile(home / f"{SAFE}{INDEX}", (json.dumps(index_file, indent=1) + "\n").encode()),
             TextFile(home / "config.json", source.plain_config))
    plain_values = sum(prod(source.tensors[name].shape) for file in files for name in file.plain)
    embedded = prod(source.tensors[tensor_names.EMBEDDING].shape) if index == 0 else 0  # stay in the file
    packed_all = [linear for file in files for linear in file.packed]
    kinds = layer_kinds(source.config, recipe.kv_cache)[lo:hi]
    windows = {window: sum(kind.row_bytes(width) for kind in kinds if kind.window == window)
               for window in {kind.window for kind in kinds} if window is not None}
    return PlannedPart(
        home.name, (*files, *texts),
        parameters=plain_values + sum(linear.rows * linear.columns for linear in packed_all),
        weight_bytes=(plain_values - embedded) * width + sum(
            _packed_bytes(source, recipe, linear) for linear in packed_all),
        row_bytes=sum(kind.row_bytes(width) for kind in kinds), windows=windows,
        states=sum(kind.request_bytes(width) for kind in kinds if isinstance(kind, GatedDelta)))


def _draft(source: SourceModel, recipe: Recipe) -> PlannedPart:
    """Tied weights are stored once, as the embeddings, where loaders look for both."""
    target = DRAFT_TARGET
    needs_embeddings = any(draft.embeddings for draft in source.drafts)
    head = tensor_names.EMBEDDING if source.tied else tensor_names.LM_HEAD
    names: tuple[str, ...] = (head,) if source.tied or not needs_embeddings else (head, tensor_names.EMBEDDING)
    packed = head if recipe.lm_head else None
    if packed:
        names = (tensor_names.EMBEDDING,) if needs_embeddings else ()
    files: list[PlannedFile] = [TensorsFile(target / SAFE, names, head=packed),
                                TextFile(target / "config.json", source.plain_config)]
    files += [CopiedFile(target / path.name, path) for path in source.extra_files]
    for draft in source.drafts:
        home = Path(DRAFT, draft.kind.directory)
        files += [CopiedFile(home / path.name, path) for path in draft.files]
        if draft.kind.in_target:
            files += [TensorsFile(home / SAFE, tuple(draft.tensors)),
                      TextFile(home / "config.json", source.plain_config)]
    width = DTYPES[recipe.compute].itemsize
    rows, columns = source.tensors[head].shape
    matrix = rows * columns
    head_bytes = recipe.lm_head.nbytes(rows, columns) if recipe.lm_head else matrix * width
    loaded = draft_scheme(cast(HeadBits, recipe.lm_head.kind)) if recipe.lm_head else None
    candidates = candidates_for(recipe.candidates, rows, columns)
    factors = 0
    if candidates is not None:
        packed_up: Packed | None = "int4" if loaded else None
        factors = factor_bytes(candidates.rank, rows, columns, width, packed_up) * sum(
            draft.ranks_by_target for draft in source.drafts)
    return PlannedPart(
        DRAFT, tuple(files),
        parameters=matrix * (len(names) + (packed is not None))
        + sum(draft.parameters for draft in source.drafts),
        weight_bytes=head_bytes + factors + sum(draft.weight_bytes(width, loaded) for draft in source.drafts),
        row_bytes=sum(draft.kv_row for draft in source.drafts) * width)


def _layout(source: SourceModel, recipe: Recipe, file: TensorsFile) -> Layout:
    layout = {name: (tuple(source.tensors[name].shape), recipe.plain) for name in file.plain}
    for linear in file.packed:
        linear_scheme = _scheme_of(source, recipe, linear)
        assert linear_scheme is not None
        layout.update({f"{linear.prefix}.{suffix}": stored
                       for suffix, stored in linear_scheme.stored(linear.rows, linear.columns).items()})
    if file.head:
        assert recipe.lm_head is not None
        stored_head = recipe.lm_head.stored(*source.tensors[file.head].shape)
        layout.update({f"{HEAD_PREFIX}.{suffix}": stored for suffix, stored in stored_head.items()})
    return layout


def _is_packed(source: SourceModel, recipe: Recipe, linear: Linear) -> bool:
    return _scheme_of(source, recipe, linear) is not None


def _scheme_of(source: SourceModel, recipe: Recipe, linear: Linear) -> Scheme | None:
    """How a matrix is stored; None if it stays in 16 or 32 bits."""
    layer_scheme = recipe.scheme
    if layer_scheme is None:
        return None
    if is_imported(source, recipe):
        assert source.imported is not None
        return source.imported.scheme_of(linear.prefix) if linear.prefix in source.packed else None
    if linear.prefix.endswith(IN_16_BITS):
        return None
    return layer_scheme if layer_scheme.fits(linear.rows, linear.columns) is not None else None


def is_imported(source: SourceModel, recipe: Recipe) -> bool:
    """Whether matrices are repacked, not quantised: a GGUF file's can also be dequantised, and then quantised anew."""
    return source.imported is not None and recipe.kind == "int4"


def _packed_bytes(source: SourceModel, recipe: Recipe, linear: Linear) -> int:
    linear_scheme = _scheme_of(source, recipe, linear)
    assert linear_scheme is not None
    return linear_scheme.nbytes(linear.rows, linear.columns)

"""One stage's part of a model: a run of decoder layers, with the embeddings or the final norm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowspec_edge.errors import UsageError
from flowspec_edge.messages import Payload
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.experts import correlation_of
from flowspec_edge.model.manifest import DRAFT, CacheBits, stage_part
from flowspec_edge.model.opened import OpenModel, opened
from flowspec_edge.model.weights.checkpoint import Checkpoint
from flowspec_edge.stage import forward
from flowspec_edge.stage.families.decoder import DecoderLayer, embedding_scale, layers_on_meta, norm_on_meta, skeleton
from flowspec_edge.stage.families.norm import Norm
from flowspec_edge.stage.families.rotary import Rotary
from flowspec_edge.stage.layer_graphs import LayerGraphs
from flowspec_edge.stage.layers.kinds import by_kind, layer_kinds
from flowspec_edge.stage.layers.stage_cache import CacheKind, LayerArena, Part, PartResult
from flowspec_edge.stage.quant.half import HalfLinear, halve_linears, is_mixed
from flowspec_edge.stage.weights import tensor_names
from flowspec_edge.stage.weights.load import load_modules, load_tensor, schemes_of
from flowspec_edge.util.linears import PaddedLinear, replace_linears
from flowspec_edge.util.tensors import from_torch, parse_dtype, wire_name
from flowspec_edge.util.torchdevice import allocation, available_bytes, release, use_exact_kernels
from flowspec_edge.util.weight_file import Embedding, as_embedding

log = logging.getLogger(__name__)

ROW_STEP = 16  # so that any number of rows runs the same kernels of a GPU
_NEED_LESS = "lower the limits of the session, or give this stage fewer layers"
_FEWER_LAYERS = "give this stage fewer layers, or quantise the model: flowspec models shard --dtype int4"


@dataclass(frozen=True, eq=False)
class Shard:
    """The modules of stage ``index`` of ``stages``.

    layers   [lo, hi) of the whole model; ``modules[i]`` is layer lo + i
    embed    first stage only; rows are multiplied by ``embed_scale``
    norm     last stage only
    digest   fingerprint of the stored tensors, independent of ``dtype``
    kv_cache  how the cache keeps keys and values
    row_step  rows of a pass are padded to a multiple of it
    """

    index: int
    stages: int
    layers: tuple[int, int]
    config: DecoderConfig
    modules: tuple[DecoderLayer, ...]
    rotary: Rotary
    embed: nn.Module | None
    norm: Norm | None
    dtype: torch.dtype
    device: torch.device
    digest: str
    kv_cache: CacheBits = field(default="16bit", kw_only=True)
    embed_scale: float = field(default=1.0, kw_only=True)
    row_step: int = field(default=1, kw_only=True)

    @cached_property
    def turns(self) -> Sequence[str]:
        """The type by which the rotary embedding tells each layer's angles."""
        return self.config.turns[slice(*self.layers)]

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def wire(self) -> str:
        """What a message calls the type of its hidden states."""
        return wire_name(self.dtype)

    @property
    def vocabulary(self) -> int | None:
        """The vocabulary of the tokens that the first stage takes; None on the others."""
        return None if self.embed is None else self.config.vocab_size

    @property
    def is_last(self) -> bool:
        return self.norm is not None

    @cached_property
    def kinds(self) -> Sequence[CacheKind]:
        """How each of its layers remembers rows."""
        return layer_kinds(self.config, self.kv_cache)[slice(*self.layers)]

    @cached_property
    def layers_of_kinds(self) -> dict[CacheKind, list[int]]:
        """The stage's layers by kind, as indexes in the model."""
        return by_kind(self.kinds, self.layers[0])

    @cached_property
    def kind_indexes(self) -> list[int]:
        """The place of each layer's kind among the stage's kinds."""
        order = list(self.layers_of_kinds)
        return [order.index(kind) for kind in self.kinds]

    def subset(self, index: int, stages: int, layers: tuple[int, int]) -> Shard:
        """Return a stage with some of this shard's layers; it shares the modules and the digest."""
        lo, hi = (end - self.layers[0] for end in layers)
        return replace(
            self, index=index, stages=stages, layers=layers, modules=self.modules[lo:hi],
            embed=self.embed if index == 0 else None, norm=self.norm if index == stages - 1 else None)

    def arena(self, kind: CacheKind, layers: Sequence[int], rows: int) -> LayerArena:
        return kind.arena(layers, self.dtype, self.device, rows)

    def row_bytes(self, kind: CacheKind) -> int:
        """Return the bytes of one row in one layer."""
        return kind.row_bytes(self.dtype.itemsize)

    def allocating(self, purpose: str, nbytes: int) -> AbstractContextManager[None]:
        """Raise FlowspecError, in the context, if ``nbytes`` more (0: unknown) do not fit."""
        return allocation(purpose, nbytes, _NEED_LESS, available_bytes(self.device) if nbytes else None)

    def run(self, parts: Sequence[Part], keep_going: Callable[[], bool], graphs: Mapping[int, LayerGraphs]
            ) -> list[PartResult] | None:
        """Run the layers as ``forward.run``, with results in host memory."""
        computed = forward.run(self, parts, keep_going, graphs)
        return None if computed is None else [
            PartResult([(layer, from_torch(states)) for layer, states in taps], from_torch(hidden))
            for taps, hidden in computed]

    def no_rows(self) -> Payload:
        """Hidden states [0, H]."""
        return from_torch(torch.empty(0, self.hidden_size, dtype=self.dtype))

    def correlation(self, rows: int) -> float | None:
        """Return the correlation of the experts of the last pass, which had ``rows`` (``model.experts``)."""
        return correlation_of(self.modules, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, packed ones included."""
        modules = [*self.modules, *(m for m in (self.embed, self.norm) if m is not None)]
        halves = (part.packed_bytes for m in modules for part in m.modules() if isinstance(part, HalfLinear))
        return sum(t.numel() * t.element_size() for m in modules for t in (*m.parameters(), *m.buffers())) + sum(halves)


def split_layers(layers: int, stages: int, allow_empty: bool = False) -> list[tuple[int, int]]:
    """Split ``layers`` evenly into runs [lo, hi), the first ones one longer.

    UsageError for more stages than layers unless ``allow_empty``: an empty stage passes hidden states on.
    """
    if stages < 1:
        raise UsageError(f"stages must be at least 1, not {stages}")
    if stages > layers and not allow_empty:
        raise UsageError(f"{stages} stages are more than the model's {layers} layers: "
                         f"use at most {layers}")
    return even_runs(layers, stages)


def stage_ranges(model: OpenModel | Path | str, stages: int, allow_empty: bool = False) -> list[tuple[int, int]]:
    """Return the layers [lo, hi) of each stage: a sharded model's manifest decides, else an even split.

    UsageError for a sharded model with another number of stages; otherwise as for ``split_layers``.
    """
    open_model = opened(model)
    if open_model.manifest:
        open_model.manifest.check_stages(stages)
        return list(open_model.manifest.ranges)
    return split_layers(open_model.decoder.num_hidden_layers, stages, allow_empty)


def even_runs(total: int, parts: int) -> list[tuple[int, int]]:
    """Split [0, total) into runs [lo, hi), the first ones one longer; with more parts the last are empty."""
    size, longer = divmod(total, parts)
    return list(pairwise(i * size + min(i, longer) for i in range(parts + 1)))


def load_shard(model: OpenModel | Path | str, index: int, stages: int, dtype: str,
               device: torch.device | str = "cpu", row_step: int | None = None) -> Shard:
    """Load stage ``index`` (from 0) of ``stages``: only its own tensors.

    model      a checkpoint, or a sharded model with this stage's part, whose files are all checked against
               the manifest
    dtype      "fp32", "bf16" or "fp16": of activations, caches and all weights that are not in 4 bits; "mixed":
               fp32, and matrices in 16 bits
    row_step   pad the rows of a pass to a multiple of it; None: of ``ROW_STEP`` on CUDA

    UsageError for an unusable model or split.  FlowspecError for too little memory, and for a missing,
    misshapen, truncated, altered or unexpected file or tensor, which it names.
    """
    torch_dtype, torch_device = parse_dtype(dtype), torch.device(device)
    halves = is_mixed(dtype, torch_device)
    use_exact_kernels()
    open_model = opened(model)
    ranges = stage_ranges(open_model, stages)
    if not 0 <= index < stages:
        raise UsageError(f"no stage {index} of {stages}: stages count from 0")
    lo, hi = ranges[index]
    with open_model.part(stage_part(index)) as part:
        config, checkpoint = part.decoder, part.checkpoint
        parts: dict[str, Any] = {f"model.layers.{i}": layer for i, layer in
                                 zip(range(lo, hi), layers_on_meta(config, lo, hi), strict=True)}
        if index == stages - 1:
            parts["model.norm"] = norm_on_meta(config)
        embed = None
        names = [tensor_names.EMBEDDING] if index == 0 else []
        quantised = schemes_of(open_model)
        if quantised and torch_device.type == "cuda":
            caveat = quantised.usual.caveat(torch_dtype, torch.cuda.get_device_capability(torch_device))
            if caveat:
                log.warning("V%d: %s", index + 1, caveat)
        with allocation(f"the weights of layers [{lo}, {hi})", 0, _FEWER_LAYERS):
            if index == 0:
                embed = _embedding(checkpoint, config, torch_dtype, torch_device)
            for name, module in parts.items():  # one by one: no more than one layer is in memory twice
                names += load_modules({name: module}, checkpoint, torch_dtype, torch_device, quantised)
                module.prepare()
                if halves:
                    halve_linears(module)
                elif torch_dtype == torch.bfloat16 and torch_device.type == "cpu":
                    replace_linears(module, PaddedLinear)
        release(torch_device)
        expected = names if open_model.sharded else tensor_names.whole_model(skeleton(config))
        tensor_names.check_no_unexpected(part.directory, checkpoint.names, expected)
        return Shard(
            index=index, stages=stages, layers=(lo, hi), config=config,
            modules=tuple(parts[f"model.layers.{i}"] for i in range(lo, hi)), rotary=Rotary(config, torch_device),
            embed=embed, norm=parts.get("model.norm"),
            dtype=torch_dtype, device=torch_device, digest=checkpoint.digest(names),
            kv_cache=open_model.manifest.kv_cache if open_model.manifest else "16bit",
            embed_scale=embedding_scale(config, torch_dtype),
            row_step=row_step or (ROW_STEP if torch_device.type == "cuda" else 1),
        )


def find_embedding(model: OpenModel | Path | str, dtype: str, device: torch.device | str = "cpu"
                   ) -> Embedding | None:
    """Return the token embeddings.

    An ``EmbeddingTable`` is looked up in host memory. None for D0's part of a sharded model whose draft models need
    no embeddings.
    """
    open_model = opened(model)
    checkpoint = open_model.checkpoint()
    if tensor_names.EMBEDDING not in checkpoint:
        return None
    return _embedding(checkpoint, open_model.decoder, parse_dtype(dtype), torch.device(device))


def _embedding(checkpoint: Checkpoint, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Embedding:
    """Return embeddings whose rows stay in the file. If that is not a safetensors file, load them all into memory."""
    name, shape = tensor_names.EMBEDDING, torch.Size((config.vocab_size, config.hidden_size))
    table = checkpoint.table(name, shape, dtype, device)
    return as_embedding(load_tensor(checkpoint, name, shape, dtype, device)) if table is None else table


def load_lm_head(model: OpenModel | Path | str, dtype: str, device: torch.device | str = "cpu") -> Tensor:
    """Return the output matrix [V, H], stored in plain form; the embeddings if the model ties the two."""
    with opened(model).part(DRAFT) as part:
        name, checkpoint, config = tensor_names.LM_HEAD, part.checkpoint, part.decoder
        if config.tie_word_embeddings and name not in checkpoint:
            name = tensor_names.EMBEDDING
        shape = torch.Size((config.vocab_size, config.hidden_size))
        return load_tensor(checkpoint, name, shape, parse_dtype(dtype), torch.device(device))

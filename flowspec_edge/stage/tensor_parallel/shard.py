"""One rank's part of a model: a slice of every layer.

Query heads and the MLP's width are split as evenly as possible; norms and embeddings are on every rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowspec_edge.errors import UsageError
from flowspec_edge.model.families import family_of
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.weights.checkpoint import Checkpoint, TensorSlice, digest
from flowspec_edge.stage.families import skeleton
from flowspec_edge.stage.shard import Shard, even_runs
from flowspec_edge.stage.tensor_parallel.layers import Heads, Projection, TensorLayer
from flowspec_edge.stage.tensor_parallel.layout import JoinedNorm, SplitEmbedding, TensorKind, make_layout
from flowspec_edge.stage.tensor_parallel.process_group import ProcessGroup
from flowspec_edge.stage.weights.load import fast_layout, load_modules
from flowspec_edge.util.tensors import parse_dtype


@dataclass(frozen=True, eq=False)
class TensorShard(Shard):
    """A rank's shard: its modules communicate, so all ranks must run the same rows in the same order."""

    heads: Heads

    @property
    def kv_heads(self) -> int:
        return self.heads.key_count

    @property
    def kv_groups(self) -> int:
        return self.heads.groups


def load_tensor_shard(model_dir: Path | str, kind: TensorKind, group: ProcessGroup, dtype: str,
                      device: torch.device | str = "cpu") -> TensorShard:
    """Load ``group.rank``'s slices; there may be more ranks than heads.  Errors as for ``load_shard``."""
    torch_dtype, torch_device = parse_dtype(dtype), torch.device(device)
    if OpenModel(Path(model_dir)).sharded:
        raise UsageError(f"{model_dir} is sharded by layers, for a pipeline: tensor parallelism needs the "
                         "checkpoint that it was made from")
    config = OpenModel(Path(model_dir)).parsed_config
    if family_of(config).sparse:
        raise UsageError(f"{model_dir}: tensor parallelism cannot split the experts of {config.model_type!r} "
                         "models: choose a strategy for pipelines, such as flowspec")
    if not family_of(config).llama_like:
        raise UsageError(f"{model_dir}: tensor parallelism cannot split the layers of {config.model_type!r} "
                         "models: choose a strategy for pipelines, such as flowspec")
    rank, ranks = group.rank, group.size
    if not 0 <= rank < ranks:
        raise UsageError(f"no rank {rank} of {ranks}: ranks count from 0")
    key_group = config.num_attention_heads // config.num_key_value_heads
    heads = Heads.of_run(*even_runs(config.num_attention_heads, ranks)[rank], key_group)
    width = even_runs(config.intermediate_size, ranks)[rank]
    layout = make_layout(kind, group)
    loader = _Loader(Checkpoint(model_dir), torch_dtype, torch_device, rank == 0)
    core = skeleton(config)
    layers = tuple(
        TensorLayer(loader.whole(f"model.layers.{i}", layer), heads, layout,
                    *loader.slices(f"model.layers.{i}", layer, heads, width))
        for i, layer in enumerate(core.layers))
    embed, norm = core.embed_tokens, core.norm
    loader.fill({"model.embed_tokens": embed, "model.norm": norm})
    return TensorShard(
        index=rank, stages=ranks, layers=(0, len(layers)), config=config, modules=layers,
        rotary=type(core.rotary_emb)(config=config).to(torch_device),
        embed=SplitEmbedding(embed, layout), norm=JoinedNorm(norm, layout), dtype=torch_dtype,
        device=torch_device, digest=loader.digest(), heads=heads,
    )


class _Loader:
    """Loads one layer at a time, so that at most one is in memory twice, and hashes the tensors."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device,
                 first: bool) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._first = first
        self._sha = hashlib.sha256()

    def digest(self) -> str:
        return self._sha.hexdigest()

    def fill(self, parts: dict[str, nn.Module]) -> None:
        read = load_modules(parts, self._checkpoint, self._dtype, self._device)
        self._sha.update(self._checkpoint.digest(read).encode())

    def whole(self, prefix: str, layer: Any) -> Any:
        self.fill({f"{prefix}.{name}": module for name, module in layer.named_modules()
                   if name.endswith("norm")})
        return layer

    def slices(self, prefix: str, layer: Any, heads: Heads, width: tuple[int, int]
               ) -> tuple[Projection, Projection, Projection, Projection]:
        """The rank's slices of one layer: qkv, o, gate_up, down."""
        d = layer.self_attn.head_dim
        query = (heads.query[0] * d, heads.query[1] * d)
        keys = (heads.keys[0] * d, heads.keys[1] * d)
        attention, mlp = (f"{prefix}.self_attn", layer.self_attn), (f"{prefix}.mlp", layer.mlp)
        return (
            self._projection(*attention, {"q_proj": query, "k_proj": keys, "v_proj": keys}, dim=0),
            self._projection(*attention, {"o_proj": query}, dim=1),
            self._projection(*mlp, {"gate_proj": width, "up_proj": width}, dim=0),
            self._projection(*mlp, {"down_proj": width}, dim=1),
        )

    def _projection(self, prefix: str, block: Any, parts: dict[str, tuple[int, int]], dim: int) -> Projection:
        """One projection of concatenated slices: outputs (dim 0) or inputs (dim 1) [lo, hi) of each.

        Only the first rank adds the bias of a sum over all ranks.
        """
        cuts, biases = {}, {}
        for part, (lo, hi) in parts.items():
            name, linear = f"{prefix}.{part}", getattr(block, part)
            cuts[f"{name}.weight"] = TensorSlice(linear.weight.shape, dim, lo, hi)
            if linear.bias is not None and (dim == 0 or self._first):
                end = (lo, hi) if dim == 0 else (0, linear.out_features)
                biases[f"{name}.bias"] = TensorSlice(linear.bias.shape, 0, *end)
        stored = self._checkpoint.slices({**cuts, **biases})
        self._sha.update(digest(stored).encode())
        weight = fast_layout(self._side_by_side([stored[name] for name in cuts]))
        return Projection(weight, self._side_by_side([stored[name] for name in biases]) if biases else None)

    def _side_by_side(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).to(device=self._device, dtype=self._dtype, copy=True)

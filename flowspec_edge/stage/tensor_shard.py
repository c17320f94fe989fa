"""One rank's part of a model under tensor parallelism: a slice of every layer.

Query heads and the MLP's width are split as evenly as possible; norms and embeddings are on every
rank.  Reads no more of a checkpoint than its slices.  Does not know sessions or messages.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowspec_edge.errors import UsageError
from flowspec_edge.stage.checkpoint import Checkpoint, Cut, digest
from flowspec_edge.stage.filling import fill, laid_out
from flowspec_edge.stage.shard import Shard, even_runs, is_sharded, load_config, skeleton
from flowspec_edge.stage.tensor_connect import Joined, Split, TensorKind, connect
from flowspec_edge.stage.tensor_group import Group
from flowspec_edge.stage.tensor_layers import Heads, Projection, TensorLayer
from flowspec_edge.tensors import parse_dtype


@dataclass(frozen=True, eq=False)
class TensorShard(Shard):
    """Rank ``index`` of ``stages``; it stands where a Shard of all layers would.

    Its modules talk to the other ranks: all must run the same rows in the same order.
    """

    heads: Heads

    @property
    def kv_heads(self) -> int:
        return self.heads.key_count

    @property
    def kv_groups(self) -> int:
        return self.heads.groups


def load_tensor_shard(model_dir: Path | str, kind: TensorKind, group: Group, dtype: str,
                      device: torch.device | str = "cpu") -> TensorShard:
    """Load ``group.rank``'s slices; there may be more ranks than heads.

    dtype    "fp32", "bf16" or "fp16"

    Errors are those of :func:`~flowspec_edge.stage.shard.load_shard`.
    """
    torch_dtype, torch_device = parse_dtype(dtype), torch.device(device)
    if is_sharded(model_dir):
        raise UsageError(f"{model_dir} is cut by layers, for a pipeline: tensor parallelism needs the "
                         "checkpoint it was made from")
    config = load_config(model_dir)
    rank, ranks = group.rank, group.size
    if not 0 <= rank < ranks:
        raise UsageError(f"no rank {rank} of {ranks}: ranks count from 0")
    key_group = config.num_attention_heads // config.num_key_value_heads
    heads = Heads.of_run(*even_runs(config.num_attention_heads, ranks)[rank], key_group)
    width = even_runs(config.intermediate_size, ranks)[rank]
    connection = connect(kind, group)
    loader = _Loader(Checkpoint(model_dir), torch_dtype, torch_device, rank == 0)
    core = skeleton(config)
    layers = tuple(
        TensorLayer(loader.whole(f"model.layers.{i}", layer), heads, connection,
                    *loader.slices(f"model.layers.{i}", layer, heads, width))
        for i, layer in enumerate(core.layers))
    embed, norm = core.embed_tokens, core.norm
    loader.fill({"model.embed_tokens": embed, "model.norm": norm})
    return TensorShard(
        index=rank, stages=ranks, layers=(0, len(layers)), config=config, modules=layers,
        rotary=type(core.rotary_emb)(config=config).to(torch_device),
        embed=Split(embed, connection), norm=Joined(norm, connection), dtype=torch_dtype,
        device=torch_device, digest=loader.digest(), heads=heads,
    )


class _Loader:
    """Reads layer by layer, so that no more than one is in memory twice."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device,
                 first: bool) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._first = first
        self._sha = hashlib.sha256()

    def digest(self) -> str:
        """A fingerprint of all that was read."""
        return self._sha.hexdigest()

    def fill(self, parts: dict[str, nn.Module]) -> None:
        """Load whole modules."""
        read = fill(parts, self._checkpoint, self._dtype, self._device)
        self._sha.update(self._checkpoint.digest(read).encode())

    def whole(self, prefix: str, layer: Any) -> Any:
        """Load the norms of ``layer``; returns it."""
        self.fill({f"{prefix}.{name}": module for name, module in layer.named_modules()
                   if name.endswith("norm")})
        return layer

    def slices(self, prefix: str, layer: Any, heads: Heads, width: tuple[int, int]
               ) -> tuple[Projection, Projection, Projection, Projection]:
        """The rank's slices of one layer: query, key and value; output; gate and up; down."""
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
        """One projection of slices side by side: outputs (dim 0) or inputs (dim 1) [lo, hi) of each.

        The bias of a sum over all ranks is added by the first rank alone.
        """
        cuts, biases = {}, {}
        for part, (lo, hi) in parts.items():
            name, linear = f"{prefix}.{part}", getattr(block, part)
            cuts[f"{name}.weight"] = Cut(linear.weight.shape, dim, lo, hi)
            if linear.bias is not None and (dim == 0 or self._first):
                end = (lo, hi) if dim == 0 else (0, linear.out_features)
                biases[f"{name}.bias"] = Cut(linear.bias.shape, 0, *end)
        stored = self._checkpoint.cuts({**cuts, **biases})
        self._sha.update(digest(stored).encode())
        weight = laid_out(self._side_by_side([stored[name] for name in cuts]))
        return Projection(weight, self._side_by_side([stored[name] for name in biases]) if biases else None)

    def _side_by_side(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).to(device=self._device, dtype=self._dtype, copy=True)

"""One stage's part of a model: a run of decoder layers, with the embeddings or the final norm.

Knows how a decoder-only model of transformers is put together, loads only what the stage needs, and
checks a sharded model's part against its manifest.  Does not know sessions, caches or messages.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from flowspec_edge.errors import UsageError
from flowspec_edge.manifest import DRAFT_TARGET, Manifest, stage_part
from flowspec_edge.modeldir import MANIFEST
from flowspec_edge.stage import attention, families, keys
from flowspec_edge.stage.checkpoint import Checkpoint
from flowspec_edge.stage.filling import fill, load_tensor
from flowspec_edge.stage.fused import FusedLayer
from flowspec_edge.stage.memory import claim, release
from flowspec_edge.stage.quant import Scheme, scheme
from flowspec_edge.tensors import parse_dtype

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Shard:
    """The modules of stage ``index`` of ``stages``, ready to run on ``device`` in ``dtype``.

    layers   [lo, hi) of the whole model; ``modules[i]`` is layer lo + i
    embed    token embeddings, on the first stage only
    norm     the final norm, on the last stage only
    digest   fingerprint of the stored tensors, whatever dtype they were loaded in
    """

    index: int
    stages: int
    layers: tuple[int, int]
    config: Any
    modules: tuple[nn.Module, ...]
    rotary: nn.Module
    embed: nn.Module | None
    norm: nn.Module | None
    dtype: torch.dtype
    device: torch.device
    digest: str

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def kv_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    @property
    def kv_groups(self) -> int:
        """Query heads per key/value head."""
        return int(self.config.num_attention_heads) // self.kv_heads

    @property
    def head_dim(self) -> int:
        return int(getattr(self.config, "head_dim", None)
                   or self.config.hidden_size // self.config.num_attention_heads)

    def cut(self, index: int, stages: int, layers: tuple[int, int]) -> Shard:
        """Stage ``index`` of ``stages``, with those of this shard's layers that are [lo, hi) of the whole
        model: the same modules, not copies.  The digest stays that of the whole."""
        lo, hi = (end - self.layers[0] for end in layers)
        return replace(
            self, index=index, stages=stages, layers=layers, modules=self.modules[lo:hi],
            embed=self.embed if index == 0 else None, norm=self.norm if index == stages - 1 else None)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, packed ones included."""
        held = [*self.modules, *(m for m in (self.embed, self.norm) if m is not None)]
        return sum(t.numel() * t.element_size() for m in held for t in (*m.parameters(), *m.buffers()))


def split_layers(layers: int, stages: int, allow_empty: bool = False) -> list[tuple[int, int]]:
    """Cut ``layers`` into ``stages`` runs [lo, hi) of equal length, the first ones one longer.

    More stages than layers is a UsageError unless ``allow_empty``: an empty stage passes hidden
    states on.
    """
    if stages < 1:
        raise UsageError(f"stages must be at least 1, not {stages}")
    if stages > layers and not allow_empty:
        raise UsageError(f"{stages} stages are more than the model's {layers} layers: "
                         f"use at most {layers}")
    return even_runs(layers, stages)


def stage_ranges(model_dir: Path | str, stages: int, allow_empty: bool = False) -> list[tuple[int, int]]:
    """The layers [lo, hi) of each stage: as a sharded model was cut, else an even split.

    UsageError when a sharded model was cut into another number of stages; otherwise as
    :func:`split_layers`.
    """
    if is_sharded(model_dir):
        manifest = Manifest.read(model_dir)
        manifest.check_stages(stages)
        return list(manifest.ranges)
    return split_layers(load_config(model_dir).num_hidden_layers, stages, allow_empty)


def is_sharded(model_dir: Path | str) -> bool:
    return (Path(model_dir) / MANIFEST).is_file()


def even_runs(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, total) into runs [lo, hi), the first ones one longer; with more parts the last are empty."""
    size, longer = divmod(total, parts)
    return list(pairwise(i * size + min(i, longer) for i in range(parts + 1)))


def load_config(model_dir: Path | str, quantised: bool = False) -> Any:
    """transformers' configuration of the model in ``model_dir``.

    UsageError if there is none or if stages cannot run such a model (``stage.families``); weights that
    somebody else has quantised only with ``quantised``: they must be sharded first.  Every part of a
    sharded model holds a copy.
    """
    model_dir = _config_home(Path(model_dir))
    path = model_dir / "config.json"
    if not path.is_file():
        raise UsageError(f"no model at {model_dir}: config.json is missing")
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except Exception as error:  # transformers and huggingface_hub raise many kinds, Exception itself too
        reason = shorten(str(error), 200, placeholder=" …")
        raise UsageError(f"{path} is not a model configuration: {reason}") from error
    families.check(config, path, quantised)
    return config


def _config_home(model_dir: Path) -> Path:
    """Where config.json lies: in a sharded model, in the first part that is here."""
    if not is_sharded(model_dir):
        return model_dir
    parts = [DRAFT_TARGET, *(Path(stage_part(i)) for i in range(Manifest.read(model_dir).stages))]
    homes = [model_dir / part for part in parts if (model_dir / part / "config.json").is_file()]
    return homes[0] if homes else model_dir / parts[0]


def load_shard(model_dir: Path | str, index: int, stages: int, dtype: str,
               device: torch.device | str = "cpu", allow_empty: bool = False,
               fused: bool | None = None) -> Shard:
    """Load stage ``index`` (from 0) of ``stages``: its own tensors and nothing else.

    model_dir    a checkpoint, or a sharded model of which no more than this stage's part need be there:
                 every file of it is checked against the manifest first
    dtype        "fp32", "bf16" or "fp16": of activations, caches and all weights that are not in 4 bits
    allow_empty  whether there may be more stages than layers
    fused        whether layers are taken apart for few launches (``stage.fused``); None: on CUDA

    UsageError for a model or split that cannot work, FlowspecError that names the file or
    tensor for a missing, misshapen, truncated, altered or unexpected one, or for too little memory.
    """
    torch_dtype, torch_device = parse_dtype(dtype), torch.device(device)
    fused = torch_device.type == "cuda" if fused is None else fused
    ranges = stage_ranges(model_dir, stages, allow_empty)
    if not 0 <= index < stages:
        raise UsageError(f"no stage {index} of {stages}: stages count from 0")
    lo, hi = ranges[index]
    weights = part_of(model_dir, stage_part(index))
    config, checkpoint = load_config(weights), Checkpoint(weights)
    core = skeleton(config)
    parts: dict[str, nn.Module] = {"model.embed_tokens": core.embed_tokens} if index == 0 else {}
    parts.update({f"model.layers.{i}": core.layers[i] for i in range(lo, hi)})
    if index == stages - 1:
        parts["model.norm"] = core.norm
    wanted = keys.whole_model(core)
    read: list[str] = []
    quantised = scheme_of(model_dir)
    if quantised and torch_device.type == "cuda":
        caveat = quantised.caveat(torch_dtype, torch.cuda.get_device_capability(torch_device))
        if caveat:
            log.warning("V%d: %s", index + 1, caveat)
    with claim(f"the weights of layers [{lo}, {hi})", 0,
               "give this stage fewer layers, or quantise the model: flowspec models shard --dtype int4"):
        for name, module in parts.items():  # one by one: no more than one layer is in memory twice
            read += fill({name: module}, checkpoint, torch_dtype, torch_device, quantised)
            if fused and name.startswith("model.layers."):
                parts[name] = FusedLayer(module)
    release(torch_device)
    keys.refuse_unexpected(weights, checkpoint.names, read if is_sharded(model_dir) else wanted)
    rotary = type(core.rotary_emb)(config=config).to(device)  # computed from the config alone
    return Shard(
        index=index, stages=stages, layers=(lo, hi), config=config,
        modules=tuple(parts[f"model.layers.{i}"] for i in range(lo, hi)), rotary=rotary,
        embed=parts.get("model.embed_tokens"), norm=parts.get("model.norm"),
        dtype=torch_dtype, device=torch_device, digest=checkpoint.digest(read),
    )


def part_of(model_dir: Path | str, part: str) -> Path:
    """Where a part's weights lie: a sharded model's part, checked against its manifest, or the whole
    checkpoint."""
    if not is_sharded(model_dir):
        return Path(model_dir)
    Manifest.read(model_dir).check(part)
    return Path(model_dir) / part


def scheme_of(model_dir: Path | str) -> Scheme | None:
    """How a model's matrices are stored, if in 4 bits."""
    how = Manifest.read(model_dir).quantisation if is_sharded(model_dir) else None
    return scheme(how.kind, how.group) if how else None


def skeleton(config: Any) -> Any:
    """The decoder of transformers' model, on the meta device: it costs no memory.

    All of it is built, so that layer indexes (and whatever a family derives from them) are right.
    """
    attention.register()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).model


def load_embedding(model_dir: Path | str, dtype: str, device: torch.device | str = "cpu") -> Tensor:
    """The token embeddings [V, H]."""
    return _load_matrix(model_dir, keys.EMBEDDING, dtype, device)


def find_embedding(model_dir: Path | str, dtype: str, device: torch.device | str = "cpu") -> Tensor | None:
    """The token embeddings [V, H]; None where D0's part of a sharded model has none, since none of its
    draft models looks them up."""
    return load_embedding(model_dir, dtype, device) if keys.EMBEDDING in Checkpoint(model_dir) else None


def load_lm_head(model_dir: Path | str, dtype: str, device: torch.device | str = "cpu") -> Tensor:
    """The output matrix [V, H]; the embeddings where the model ties the two."""
    name = keys.LM_HEAD
    if load_config(model_dir).tie_word_embeddings and name not in Checkpoint(model_dir):
        name = keys.EMBEDDING
    return _load_matrix(model_dir, name, dtype, device)


def _load_matrix(model_dir: Path | str, name: str, dtype: str, device: torch.device | str) -> Tensor:
    torch_dtype, config = parse_dtype(dtype), load_config(model_dir)
    shape = torch.Size((config.vocab_size, config.hidden_size))
    return load_tensor(Checkpoint(model_dir), name, shape, torch_dtype, torch.device(device))

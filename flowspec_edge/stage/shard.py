"""One stage's part of a model: a run of decoder layers, with the embeddings or the final norm.

Knows how a decoder-only model of transformers is put together and loads only what the stage
needs.  Does not know sessions, caches or messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from flowspec_edge.errors import UsageError
from flowspec_edge.stage import attention, families
from flowspec_edge.stage.checkpoint import Checkpoint, check_shape, digest
from flowspec_edge.tensors import parse_dtype


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

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        held = [*self.modules, *(m for m in (self.embed, self.norm) if m is not None)]
        return sum(p.numel() * p.element_size() for m in held for p in m.parameters())


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
    """The layers [lo, hi) of each stage: an even split; errors as :func:`split_layers`."""
    return split_layers(load_config(model_dir).num_hidden_layers, stages, allow_empty)


def even_runs(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, total) into runs [lo, hi), the first ones one longer; with more parts the last are empty."""
    size, longer = divmod(total, parts)
    return list(pairwise(i * size + min(i, longer) for i in range(parts + 1)))


def load_config(model_dir: Path | str, quantised: bool = False) -> Any:
    """transformers' configuration of the model in ``model_dir``.

    UsageError if there is none or if stages cannot run such a model (``stage.families``); weights that
    somebody else has quantised only with ``quantised``: they must be sharded first.
    """
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise UsageError(f"no model at {model_dir}: config.json is missing")
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UsageError(f"{path} is not a model configuration: {reason}") from error
    families.check(config, path, quantised)
    return config


def load_shard(model_dir: Path | str, index: int, stages: int, dtype: str,
               device: torch.device | str = "cpu", allow_empty: bool = False) -> Shard:
    """Load stage ``index`` (from 0) of ``stages``: its own tensors and nothing else.

    dtype    "fp32", "bf16" or "fp16"

    UsageError for a model or split that cannot work, FlowspecError that names the file or
    tensor for a missing, misshapen or truncated one.
    """
    torch_dtype = parse_dtype(dtype)
    config = load_config(model_dir)
    ranges = split_layers(config.num_hidden_layers, stages, allow_empty)
    if not 0 <= index < stages:
        raise UsageError(f"no stage {index} of {stages}: stages count from 0")
    lo, hi = ranges[index]
    core = skeleton(config)
    parts: dict[str, nn.Module] = {f"model.layers.{i}": core.layers[i] for i in range(lo, hi)}
    if index == 0:
        parts["model.embed_tokens"] = core.embed_tokens
    if index == stages - 1:
        parts["model.norm"] = core.norm
    fingerprint = digest(fill(parts, Checkpoint(model_dir), torch_dtype, torch.device(device)))
    rotary = type(core.rotary_emb)(config=config).to(device)  # computed from the config alone
    return Shard(
        index=index, stages=stages, layers=(lo, hi), config=config,
        modules=tuple(parts[f"model.layers.{i}"] for i in range(lo, hi)), rotary=rotary,
        embed=parts.get("model.embed_tokens"), norm=parts.get("model.norm"),
        dtype=torch_dtype, device=torch.device(device), digest=fingerprint,
    )


def skeleton(config: Any) -> Any:
    """The decoder of transformers' model, on the meta device: it costs no memory.

    All of it is built, so that layer indexes (and whatever a family derives from them) are right.
    """
    attention.register()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).model


def load_embedding(model_dir: Path | str, dtype: str, device: torch.device | str = "cpu") -> Tensor:
    """The token embeddings [V, H]."""
    return _load_matrix(model_dir, "model.embed_tokens.weight", dtype, device)


def load_lm_head(model_dir: Path | str, dtype: str, device: torch.device | str = "cpu") -> Tensor:
    """The output matrix [V, H]; the embeddings where the model ties the two."""
    name = "lm_head.weight"
    if load_config(model_dir).tie_word_embeddings and name not in Checkpoint(model_dir):
        name = "model.embed_tokens.weight"
    return _load_matrix(model_dir, name, dtype, device)


def _load_matrix(model_dir: Path | str, name: str, dtype: str, device: torch.device | str) -> Tensor:
    torch_dtype, config = parse_dtype(dtype), load_config(model_dir)
    tensor = Checkpoint(model_dir).tensors([name])[name]
    check_shape(model_dir, name, tensor.shape, torch.Size((config.vocab_size, config.hidden_size)))
    return tensor.to(device=device, dtype=torch_dtype, copy=True)


def fill(parts: dict[str, nn.Module], checkpoint: Checkpoint, dtype: torch.dtype,
         device: torch.device) -> dict[str, Tensor]:
    """Give every meta parameter of ``parts``, named by prefix, its stored values; returns these."""
    stored: dict[str, Tensor] = {}
    for prefix, module in parts.items():
        wanted = module.state_dict()
        tensors = checkpoint.tensors([f"{prefix}.{key}" for key in wanted])
        stored.update(tensors)
        for key, meta in wanted.items():
            check_shape(checkpoint.directory, f"{prefix}.{key}", tensors[f"{prefix}.{key}"].shape, meta.shape)
        # A copy, so that weights live in memory and not in pages that the kernel may drop.
        values = {key: tensors[f"{prefix}.{key}"].to(device=device, dtype=dtype, copy=True)
                  for key in wanted}
        module.load_state_dict(values, strict=True, assign=True)
        module.requires_grad_(False).eval()
        for linear in module.modules():
            if isinstance(linear, nn.Linear):
                linear.weight.data = laid_out(linear.weight.data)
    return stored


def laid_out(weight: Tensor) -> Tensor:
    """A linear layer's weight as it is read fastest: in float32, with MKL, transposed in memory, a
    tenth faster for 1 to 64 rows."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight

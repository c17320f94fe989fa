"""The whole model as transformers runs it: the reference for pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from flowspec_edge.model.manifest import DRAFT, DRAFT_TARGET, Manifest, stage_part
from flowspec_edge.model.modeldir import is_sharded
from flowspec_edge.stage.families import load_config
from flowspec_edge.stage.layers.attention import register_rounded
from flowspec_edge.stage.output_head import load_output_head
from flowspec_edge.stage.weights import tensor_names
from flowspec_edge.stage.weights.checkpoint import Checkpoint
from flowspec_edge.stage.weights.load import (
    fast_layout,
    head_scheme_of,
    load_modules,
    load_tensor,
    opened_part,
    part_dir,
    scheme_of,
)
from flowspec_edge.util.experts import separate_experts
from flowspec_edge.util.tensors import parse_dtype


def load_reference_model(model_dir: Path | str, dtype: str, device: torch.device | str = "cpu") -> Any:
    """transformers' causal language model, quantised matrices included; errors as for ``load_shard``."""
    torch_dtype, torch_device = parse_dtype(dtype), torch.device(device)
    config = load_config(model_dir)
    manifest = Manifest.read(model_dir) if is_sharded(model_dir) else None
    rounded = {"attn_implementation": register_rounded()} if manifest and manifest.kv_cache == "int8" else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **rounded)
        separate_experts(model.model)
    core = model.model
    whole = tensor_names.whole_model(core)  # before loading, which joins matrices
    runs = [(0, len(core.layers))]
    if manifest:
        runs = list(manifest.ranges)
    for index, (lo, hi) in enumerate(runs):
        parts: dict[str, nn.Module] = {f"model.layers.{i}": core.layers[i] for i in range(lo, hi)}
        if index == 0:
            parts["model.embed_tokens"] = core.embed_tokens
        if index == len(runs) - 1:
            parts["model.norm"] = core.norm
        with opened_part(model_dir, stage_part(index)) as files:
            checkpoint = Checkpoint(part_dir(model_dir, stage_part(index)), files)
            read = load_modules(parts, checkpoint, torch_dtype, torch_device, scheme_of(model_dir))
        tensor_names.check_no_unexpected(checkpoint.directory, checkpoint.names, read if manifest else whole)
    core.rotary_emb = type(core.rotary_emb)(config=config).to(torch_device)
    home = Path(model_dir) / DRAFT_TARGET if manifest else Path(model_dir)
    head_scheme = head_scheme_of(model_dir)
    if head_scheme is not None:
        with opened_part(model_dir, DRAFT) as files:
            model.lm_head = load_output_head(home, dtype, torch_device, head_scheme, files)
    elif config.tie_word_embeddings:
        model.lm_head.weight = core.embed_tokens.weight
    else:
        with opened_part(model_dir, DRAFT) as files:
            head = load_tensor(Checkpoint(home, files), tensor_names.LM_HEAD,
                               core.embed_tokens.weight.shape, torch_dtype, torch_device)
        model.lm_head.weight = nn.Parameter(fast_layout(head), requires_grad=False)
    if (home / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(home)
    return model.requires_grad_(False).eval()

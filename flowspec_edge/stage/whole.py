"""The whole model in one piece, as transformers runs it: what a pipeline is compared with.

Knows how to put a checkpoint, or all parts of a sharded model, into transformers' own class, quantised
matrices included.  Does not know stages' engines: attention and cache are transformers'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from flowspec_edge.manifest import DRAFT, DRAFT_TARGET, Manifest, stage_part
from flowspec_edge.stage import keys
from flowspec_edge.stage.checkpoint import Checkpoint
from flowspec_edge.stage.filling import fill, laid_out, load_tensor
from flowspec_edge.stage.shard import is_sharded, load_config, part_of, scheme_of
from flowspec_edge.tensors import parse_dtype


def load_whole(model_dir: Path | str, dtype: str, device: torch.device | str = "cpu") -> Any:
    """transformers' causal language model of ``model_dir``, ready to run.

    model_dir  a checkpoint, or a sharded model of which every part is here
    dtype      "fp32", "bf16" or "fp16": of activations and of all weights that are not in 4 bits

    Errors as :func:`~flowspec_edge.stage.shard.load_shard`.
    """
    torch_dtype, torch_device = parse_dtype(dtype), torch.device(device)
    config = load_config(model_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    core = model.model
    runs = [(0, len(core.layers))]
    if is_sharded(model_dir):
        runs = list(Manifest.read(model_dir).ranges)
    for index, (lo, hi) in enumerate(runs):
        parts: dict[str, nn.Module] = {f"model.layers.{i}": core.layers[i] for i in range(lo, hi)}
        if index == 0:
            parts["model.embed_tokens"] = core.embed_tokens
        if index == len(runs) - 1:
            parts["model.norm"] = core.norm
        checkpoint = Checkpoint(part_of(model_dir, stage_part(index)))
        read = fill(parts, checkpoint, torch_dtype, torch_device, scheme_of(model_dir))
        wanted = read if is_sharded(model_dir) else keys.whole_model(core)
        keys.refuse_unexpected(checkpoint.directory, checkpoint.names, wanted)
    core.rotary_emb = type(core.rotary_emb)(config=config).to(torch_device)
    home = Path(model_dir) / DRAFT_TARGET if is_sharded(model_dir) else Path(model_dir)
    if config.tie_word_embeddings:
        model.lm_head.weight = core.embed_tokens.weight
    else:
        part_of(model_dir, DRAFT)
        head = load_tensor(Checkpoint(home), keys.LM_HEAD, core.embed_tokens.weight.shape, torch_dtype,
                           torch_device)
        model.lm_head.weight = nn.Parameter(laid_out(head), requires_grad=False)
    if (home / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(home)
    return model.requires_grad_(False).eval()

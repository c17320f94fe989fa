"""A tiny model directory: target, EAGLE-2 head, draft model and SPD's module, all random."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from flowspec_edge.drafting.eagle.eagle2 import EagleConfig, EagleHead, eagle_config, save_head, usual_layer
from flowspec_edge.drafting.eagle.eagle3 import Eagle3Config, Eagle3Head
from flowspec_edge.drafting.eagle.eagle3_formats import save_head3
from flowspec_edge.lab.spd.module import SpdModule, save_module
from flowspec_edge.model.config import read_decoder_config
from kits.tiny_models import tiny_llama


def draw_matrices(module: torch.nn.Module) -> None:
    """Random weights, large enough for what goes in to decide what comes out."""
    for parameter in module.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)


def tiny_spd(model_dir: Path, layers: int = 2, seed: int = 0) -> None:
    """Write ``spd``, a random module for the ``target`` below ``model_dir``, in fp32."""
    config = LlamaConfig.from_pretrained(model_dir / "target")
    config.target_layers, config.num_hidden_layers = config.num_hidden_layers, layers
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = SpdModule(config)
        draw_matrices(module)
    save_module(module, model_dir / "spd", torch.float32)


def tiny_head(path: Path, vocab: int, hidden: int = 64) -> None:
    """A random EAGLE-2 head in the published format."""
    config = eagle_config({"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden,
                           "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}, "a head")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        save_head(EagleHead(config), path, torch.float32)


def tiny_eagle3(model_dir: Path, drafted: int | None = None, max_positions: int = 2048) -> None:
    """Write ``eagle3``, a random head for the ``target`` below ``model_dir``, in fp32, without embeddings.

    ``drafted``: tokens that it can name, drawn at random; all by default.
    """
    layer = replace(usual_layer(read_decoder_config(model_dir / "target")), max_position_embeddings=max_positions)
    config = Eagle3Config(**vars(layer), target_hidden_size=layer.hidden_size,
                          draft_vocab_size=drafted or layer.vocab_size)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = Eagle3Head(config)
        draw_matrices(head)
        if config.draft_vocab_size < config.vocab_size:
            ids = torch.randperm(config.vocab_size)[:drafted].sort().values
            head.d2t.copy_(ids - torch.arange(len(ids)))
            head.t2d.fill_(False)[ids] = True
    save_head3(head, model_dir / "eagle3", torch.float32)


def never_ends(model_dir: Path, sampled: bool = False) -> Path:
    """Give the target's end-of-sequence id a logit of 0: greedy answers reach their limits. ``sampled``:
    sampled ones, too, because the id ends nothing any more."""
    file = model_dir / "target" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][0] = 0
    save_file(tensors, file, {"format": "pt"})
    for name in ("config.json", "generation_config.json") if sampled else ():
        path = model_dir / "target" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    return model_dir


def with_eagle3(model_dir: Path, path: Path, drafted: int) -> Path:
    """Link the parts of ``model_dir`` below ``path`` and write an EAGLE-3 head beside them; returns ``path``."""
    for part in model_dir.iterdir():
        (path / part.name).symlink_to(part)
    tiny_eagle3(path, drafted)
    return path


def tiny_model_dir(path: Path, layers: int = 4, hidden: int = 64, vocab: int = 300, seed: int = 0) -> Path:
    """Write ``target``, ``eagle2``, ``draft-lm`` and ``spd`` below ``path``; returns it.

    From 257 tokens on, the tokenizer knows every byte, so any text is a prompt.
    """
    tiny_llama(path / "target", layers=layers, hidden=hidden, vocab=vocab, seed=seed)
    tiny_llama(path / "draft-lm", layers=1, hidden=32, vocab=vocab, seed=seed + 1)
    config = EagleConfig(**vars(usual_layer(read_decoder_config(path / "target"))))
    with torch.random.fork_rng():
        torch.manual_seed(seed + 2)
        save_head(EagleHead(config), path / "eagle2", torch.float32)
    tiny_spd(path, seed=seed + 3)
    return path

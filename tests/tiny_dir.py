"""A tiny model directory: target, EAGLE-2 head and draft model, all random."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import tiny_llama
from transformers import LlamaConfig

from flowspec_edge.drafting.eagle import EagleHead
from flowspec_edge.drafting.eagle_checkpoint import save_head


def tiny_model_dir(path: Path, layers: int = 4, hidden: int = 64, vocab: int = 300, seed: int = 0) -> Path:
    """Write ``target``, ``eagle2`` and ``draft-lm`` below ``path``; returns it.

    From 257 tokens on, the tokenizer knows every byte, so any text is a prompt.
    """
    tiny_llama(path / "target", layers=layers, hidden=hidden, vocab=vocab, seed=seed)
    tiny_llama(path / "draft-lm", layers=1, hidden=32, vocab=vocab, seed=seed + 1)
    config = LlamaConfig.from_pretrained(path / "target")
    config.num_hidden_layers = 1
    config.bias = True  # the published convention
    with torch.random.fork_rng():
        torch.manual_seed(seed + 2)
        save_head(EagleHead(config), path / "eagle2", torch.float32)
    return path

"""The language models of the demonstration: a Llama target, and a smaller draft of its kind.

Knows transformers' LlamaForCausalLM and how to measure it in bits per byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flowspec_edge.training.corpus import EOS, TokenizedCorpus
from flowspec_edge.training.loop import Run, device, train, windows
from flowspec_edge.training.optim import Optimiser

MAX_POSITIONS = 2048
_LONG_FROM = 0.75  # the last quarter sees windows of twice the length


@dataclass(frozen=True)
class LMRecipe:
    """Size and schedule of one language model; lengths and batches in tokens."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    steps: int
    window: int = 512
    tokens_per_step: int = 6144
    micro_batch: int = 4096
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    decay_from: float = 0.4


def llama_config(recipe: LMRecipe, vocab_size: int) -> LlamaConfig:
    """The transformers configuration of a recipe; token 0 ends a text."""
    return LlamaConfig(
        vocab_size=vocab_size, hidden_size=recipe.width, intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads, max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False, use_cache=True, bos_token_id=0, eos_token_id=0,
        pad_token_id=0,
    )


def train_lm(name: str, recipe: LMRecipe, corpus: TokenizedCorpus, work: Path, seed: int) -> LlamaForCausalLM:
    """Train one model on next-token cross-entropy; resumes from ``work/NAME.pt``."""
    torch.manual_seed(seed)
    dev = device()
    model = LlamaForCausalLM(llama_config(recipe, corpus.tokenizer.get_vocab_size())).to(dev)
    tokens = torch.from_numpy(np.asarray(corpus.train))

    def micro_loss(rows: Tensor) -> Tensor:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    compiled = _compile(micro_loss)

    def loss(step: int, total: int) -> float:
        window = recipe.window * (2 if step >= _LONG_FROM * total else 1)
        rows = windows(tokens, window, step, recipe.tokens_per_step // window, seed)
        parts = rows.to(dev).split(max(1, recipe.micro_batch // window))
        value = 0.0
        for part in parts:
            with torch.autocast(dev.type, torch.bfloat16, enabled=dev.type == "cuda"):
                part_loss = compiled(part) * (len(part) / len(rows))
            part_loss.backward()
            value += part_loss.item()
        return value

    optimiser = Optimiser(model, recipe.muon_lr, recipe.adam_lr, recipe.decay_from)
    report = lambda: f"held out {bits_per_byte(model, corpus, limit=60_000):.4f} bits per byte"  # noqa: E731
    train(Run(name, model, optimiser, recipe.steps, work / f"{name}.pt", loss, report))
    return model


def _compile(function):  # type: ignore[no-untyped-def]
    """torch.compile where a compiler is at hand (a third faster on CPU), else the function."""
    import shutil

    return torch.compile(function) if shutil.which("g++") else function


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, corpus: TokenizedCorpus, limit: int | None = None,
                  context: int = 1024) -> float:
    """Held-out cost: sum of -log2 p over all tokens / UTF-8 bytes, end-of-text marks included.

    Each token sees between ``context / 2`` and ``context`` tokens before it, except at the start.
    """
    ids = torch.from_numpy(np.asarray(corpus.held_out).astype(np.int64))
    share = 1.0 if limit is None else min(1.0, limit / len(ids))
    if limit is not None:  # an even sample of the text, not its first files only
        chunk = context // 2
        starts = np.linspace(0, len(ids) - chunk - 1, max(1, limit // chunk)).astype(int)
        pieces = [(ids[s : s + chunk + 1], 0) for s in starts]
        share = len(pieces) * chunk / len(ids)
    else:
        half = context // 2
        pieces = [(ids[0 : context + 1], 0)] + [
            (ids[s : s + context + 1], half) for s in range(half, len(ids) - half - 1, half)
        ]
    nats = 0.0
    was_training = model.training
    model.eval()
    for piece, skip in pieces:
        rows = piece.to(model.device)[None]
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
        nats += F.cross_entropy(logits[0, skip:], rows[0, 1 + skip :], reduction="sum").item()
    model.train(was_training)
    return nats / math.log(2) / (corpus.held_out_bytes * share)


def save_lm(model: LlamaForCausalLM, corpus: TokenizedCorpus, out: Path) -> None:
    """Write model (float16 safetensors) and tokenizer as transformers expects them."""
    model.eval().to("cpu").to(torch.float16).save_pretrained(out)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=corpus.tokenizer, eos_token=EOS, bos_token=EOS, pad_token=EOS,
        model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(out)

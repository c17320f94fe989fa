"""The demonstration's language models: a Llama target and a smaller draft model."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flowspec_edge.lab.training.loop import (
    LoopOptions,
    Optimiser,
    Run,
    backpropagate,
    compiled,
    device,
    train,
    windows,
)
from flowspec_edge.lab.training.python_source import TokenizedCorpus, prepare

EOS = "<|endoftext|>"
MAX_POSITIONS = 2048
_LONG_FROM = 0.75  # share of the run after which windows have twice the length


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


def tokenized_corpus(work: Path, vocab_size: int, seed: int, limit: int | None = None) -> TokenizedCorpus:
    """Return the training text, in the tokens of a tokenizer that is trained on a third of it."""

    def trained(texts: list[str]) -> tuple[Tokenizer, int]:
        tokenizer = train_tokenizer(texts, vocab_size)
        return tokenizer, tokenizer.get_vocab()[EOS]

    return prepare(work, seed, limit, trained)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which encodes any byte string."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=True))
    return tokenizer


def llama_config(recipe: LMRecipe, vocab_size: int) -> LlamaConfig:
    """Return the configuration of a Llama, whose token 0 ends a text."""
    return LlamaConfig(
        vocab_size=vocab_size, hidden_size=recipe.width, intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads, max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False, use_cache=True, bos_token_id=0, eos_token_id=0,
        pad_token_id=0,
    )


def train_lm(name: str, recipe: LMRecipe, corpus: TokenizedCorpus, work: Path, seed: int,
             loop: LoopOptions, teacher: LlamaForCausalLM | None = None) -> LlamaForCausalLM:
    """Train with cross-entropy to the text or the teacher's distributions; resumes from ``work``."""
    torch.manual_seed(seed)
    dev = device()
    model = LlamaForCausalLM(llama_config(recipe, corpus.tokenizer.get_vocab_size())).to(dev)
    tokens = torch.from_numpy(np.array(corpus.train))
    if teacher is not None:
        teacher = teacher.to(dev).eval().requires_grad_(False)

    def micro_loss(rows: Tensor) -> Tensor:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
        if teacher is None:
            return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        with torch.no_grad():
            target_probabilities = teacher(input_ids=rows[:, :-1], use_cache=False).logits.float().softmax(-1)
        return (logits.logsumexp(-1) - (target_probabilities * logits).sum(-1)).mean()

    step_loss = compiled(micro_loss, loop.compile)

    def loss(step: int, total: int) -> float:
        window = recipe.window * (2 if step >= _LONG_FROM * total else 1)
        rows = windows(tokens, window, step, recipe.tokens_per_step // window, seed)
        return backpropagate(step_loss, dev, recipe.micro_batch // window, rows)

    def report() -> str:
        return f"held out {bits_per_byte(model, corpus, limit=60_000):.4f} bits per byte"

    optimiser = Optimiser(model, recipe.muon_lr, recipe.adam_lr, recipe.decay_from)
    train(Run(name, model, optimiser, recipe.steps, work / f"{name}.pt", loss, report,
              loop.checkpoint_every_s))
    return model


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, corpus: TokenizedCorpus, limit: int | None = None,
                  context: int = 1024) -> float:
    """Measure the held-out cost: sum of -log2 p over all tokens / UTF-8 bytes, end-of-text marks included.

    Each token sees ``context / 2`` to ``context`` tokens before it, except at the start.

    limit  measure about that many tokens, in evenly spread pieces of ``context / 2``; faster, and a little too high
    """
    ids = torch.from_numpy(np.asarray(corpus.held_out).astype(np.int64))
    half = context // 2
    share = 1.0
    if limit is None or limit >= len(ids):
        starts = range(half, len(ids) - 1 - half, half)
        pieces = [(ids[: context + 1], 0), *((ids[s : s + context + 1], half) for s in starts)]
    else:
        offsets = np.linspace(0, len(ids) - half - 1, max(1, limit // half)).astype(int)
        pieces = [(ids[s : s + half + 1], 0) for s in offsets]
        share = len(pieces) * half / len(ids)
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
    """Write float16 safetensors and the tokenizer in transformers' layout, as versions 4.46 to 5 read it."""
    copy.deepcopy(model).eval().to("cpu", torch.float16).save_pretrained(out)
    _write_index(out / "model.safetensors")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=corpus.tokenizer, eos_token=EOS, bos_token=EOS, pad_token=EOS,
        model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(out)
    config = out / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields.pop("backend", None)
    # Version 5 writes its own name of this class, which older versions refuse; it reads the old name.
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _write_index(weights: Path) -> None:
    """Write the index that loaders of large models expect, EAGLE's for one, though there is one file."""
    with safe_open(weights, "pt") as file:
        names = sorted(file.keys())
        size = sum(file.get_tensor(name).nbytes for name in names)
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, weights.name)}
    weights.with_name(f"{weights.name}.index.json").write_text(json.dumps(index, indent=2) + "\n",
                                                              encoding="utf-8")


def load_lm(path: Path) -> LlamaForCausalLM:
    """Load a model in float32 and frozen."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval().requires_grad_(False)

"""Tiny random models on disk, for every test that needs a real checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

EOS = "<eos>"
_TEXT = Path(__file__)  # what the tokenizer's merges, if there is room for any, are learned from


def tiny_llama(path: Path | str, layers: int = 4, hidden: int = 64, heads: int = 4, kv_heads: int = 2,
               vocab: int = 97, seed: int = 0) -> Path:
    """Write a random Llama (fp32, eos 0) and a byte-level tokenizer to ``path``; returns it.

    Weights are large enough for attention and predictions to be far from uniform.  The tokenizer
    knows ASCII from 97 tokens on and every byte from 257 on; smaller models get none.
    """
    return tiny_model("llama", path, layers, hidden, heads, kv_heads, vocab, seed)


def tiny_model(family: str, path: Path | str, layers: int = 4, hidden: int = 64, heads: int = 4,
               kv_heads: int = 2, vocab: int = 97, seed: int = 0, **extra: Any) -> Path:
    """The same for any decoder-only family of transformers; ``extra`` goes into its config."""
    path = Path(path)
    config = AutoConfig.for_model(family, **{
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads, "max_position_embeddings": 2048, "initializer_range": 1.5 / hidden**0.5,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **extra,
    })
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.eval().save_pretrained(path)
    if vocab >= 97:
        tiny_tokenizer(vocab).save_pretrained(path)
    return path


def tiny_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with at most ``vocab`` tokens; token 0 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab < 257:  # printable ASCII, and the signs that stand for space and newline
        alphabet = [c for c in alphabet if "!" <= c <= "~"] + ["Ġ", "Ċ"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "".join(c for c in _TEXT.read_text(encoding="utf-8") if c.isascii())
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[EOS], initial_alphabet=alphabet,
                                  show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, bos_token=EOS, pad_token=EOS,
                                   clean_up_tokenization_spaces=False)

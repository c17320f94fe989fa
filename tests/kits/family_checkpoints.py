"""Tiny checkpoints of every family that stages run, one for each feature that sets it apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from flowspec_edge.strategies.params import Params
from kits.stages import RECURRENT
from kits.tiny_model_dir import tiny_head, tiny_spd
from kits.tiny_models import tiny_llama, tiny_model

VOCAB = 61
SMALL = Params(tree_size=12, width=3, depth=3, expand_depth=2, expand_size=8, extend_size=8, segment=5,
               pipedec_width=4, pipedec_children=3)
WINDOW = 7

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}

# Name -> (transformers' model type, what its configuration has besides the usual).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 24, "num_experts": 8, "num_experts_per_tok": 3,
                                "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "qwen3-moe-mixed": ("qwen3_moe", {"head_dim": 24, "num_experts": 5, "num_experts_per_tok": 2,
                                      "moe_intermediate_size": 32, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3-next": ("qwen3_next", RECURRENT | {
        "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen3.5": ("qwen3_5_text", RECURRENT | {"head_dim": 16}),
    "qwen3.5-tied": ("qwen3_5_text", RECURRENT | {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", RECURRENT | {
        "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "gpt-oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
                            "sliding_window": WINDOW, "swiglu_limit": 0.5}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "ministral3": ("ministral3", {"rope_parameters": _YARN | {
        "llama_4_scaling_beta": 0.4, "max_position_embeddings": 2048, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gemma3": ("gemma3_text", {"head_dim": 24, "query_pre_attn_scalar": 17, "sliding_window": WINDOW,
                               "layer_types": ["sliding_attention", "full_attention"] * 2,
                               "rope_parameters": {
                                   "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                                   "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}}),
    "gemma3-tied": ("gemma3_text", {"tie_word_embeddings": True, "sliding_window": WINDOW, "num_key_value_heads": 1,
                                    "sliding_window_pattern": 3}),
    "qwen3-tied-yarn": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True, "rope_parameters": _YARN}),
}


def family_model(name: str, path: Path, layers: int = 4, hidden: int = 32, vocab: int = VOCAB) -> Path:
    """Write a random model of ``FAMILIES[name]`` (fp32) to ``path``; returns it."""
    family, extra = FAMILIES[name]
    tiny_model(family, path, layers=layers, hidden=hidden, vocab=vocab, **extra)
    shake(path / "model.safetensors")
    return path


def family_dir(name: str, path: Path, hidden: int = 32) -> Path:
    """A whole model directory around it, with random draft parts; returns ``path``.

    The plain Llama drafts for itself, so every draft of its small model is right.
    """
    family_model(name, path / "target", hidden=hidden)
    words = WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(path / "target")
    if name == "llama":
        (path / "draft-lm").symlink_to(path / "target")
    else:
        tiny_llama(path / "draft-lm", layers=1, hidden=32, vocab=VOCAB, seed=2)
    tiny_head(path / "eagle2", VOCAB, hidden)
    tiny_spd(path)
    return path


class FamilyDirs(dict[str, Path]):
    """Whole model directories by family, each made when it is first wanted."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def __missing__(self, family: str) -> Path:
        self[family] = family_dir(family, self._base / family)
        return self[family]


def generated(target: Path, prompt: Sequence[int], new: int) -> list[int]:
    """transformers' own greedy continuation in fp32; end-of-sequence is a token like any other here."""
    return [*_generated(target, tuple(prompt), new)]


@cache
def _generated(target: Path, prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return tuple(out[0, len(prompt):].tolist())


def shake(path: Path) -> None:
    """Norms and biases away from one and zero, where a fresh model has them and hides their absence."""
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(5)
    for name in sorted(tensors):
        if tensors[name].ndim == 1 or name.endswith("bias"):
            tensors[name] += 0.3 * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})

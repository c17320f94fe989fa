"""GGUF files as llama.cpp's converter makes them, written by the package gguf from tiny checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from kits.tiny_models import tiny_model

# Family here, the architecture there, and what more a tiny model of it needs.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "qwen2": ("qwen2", {}), "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                               "norm_topk_prob": True}),
    "mixtral": ("llama", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma3_text": ("gemma3", {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 5,
                               "sliding_window_pattern": 2, "tie_word_embeddings": True}),
}
_NAMES = {  # of a layer's modules
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_GEMMA = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
          "post_feedforward_layernorm": "post_ffw_norm"}
_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Types = Callable[[str], gguf.GGMLQuantizationType]  # of a matrix, by its name in the GGUF file


def tiny_gguf(family: str, directory: Path, types: Types, layers: int = 2, hidden: int = 64,
              fields: Mapping[str, Any] | None = None, **config: Any) -> tuple[Path, Path]:
    """Write a random model as a checkpoint and as a GGUF file; return both places.  ``fields``: further metadata."""
    checkpoint = tiny_model(family, directory / "checkpoint", layers=layers, hidden=hidden,
                            **{**FAMILIES[family][1], **config})
    _shake_norms(checkpoint / "model.safetensors")
    return checkpoint, as_gguf(checkpoint, directory / "tiny.gguf", types, fields or {})


def _shake_norms(path: Path) -> None:
    """Away from what all have in a fresh model, by values to which a float32 can add 1 without rounding."""
    tensors, generator = load_file(path), torch.Generator().manual_seed(3)
    for name in sorted(tensors):
        if name.endswith("norm.weight"):
            tensors[name] += torch.randint(-64, 64, tensors[name].shape, generator=generator) / 256
    save_file(tensors, path, metadata={"format": "pt"})


def as_gguf(checkpoint: Path, out: Path, types: Types, fields: Mapping[str, Any]) -> Path:
    """Convert a checkpoint; its matrices get the types that ``types`` names, everything else stays in float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = FAMILIES[config["model_type"]][0]
    writer = gguf.GGUFWriter(str(out), architecture)
    _write_shape(writer, config)
    _write_tokenizer(writer, checkpoint)
    for key, value in fields.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, values in _tensors(checkpoint, config, architecture).items():
        kind = types(name) if values.ndim > 1 and "_inp" not in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def dequantised(checkpoint: Path, out: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """Copy a checkpoint with the values of its matrices after a file of this type: blocks lie within rows."""
    shutil.copytree(checkpoint, out)
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            blocks = gguf.quants.quantize(tensor.float().numpy(), kind)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _write_shape(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config["model_type"] == "gemma3_text":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32("gemma3.attention.sliding_window_pattern", config["layer_types"].index("full_attention") + 1)
    elif config["model_type"].startswith("qwen3"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    else:
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if inner := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(inner)


def _write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    state = json.loads((checkpoint / "tokenizer.json").read_text())
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    special = {token["content"] for token in state["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]] or [""])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _tensors(checkpoint: Path, config: Mapping[str, Any], architecture: str) -> dict[str, NDArray[np.float32]]:
    found: dict[str, NDArray[np.float32]] = {}
    experts: dict[str, list[NDArray[np.float32]]] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        values, (stem, _, part) = tensor.float().numpy(), name.rpartition(".")
        if stem in _WHOLE:
            found[f"{_WHOLE[stem]}.{part}"] = values
            continue
        layer, inner = stem.removeprefix("model.layers.").split(".", 1)
        if ".experts." in inner:  # in the order of their numbers, as files have them
            key = f"blk.{layer}.ffn_{_EXPERTS[inner.rpartition('.')[2]]}_exps.{part}"
            experts.setdefault(key, []).append(values)
            continue
        if architecture == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in inner else "num_key_value_heads"]
            values = _rotated(values, heads)
        names = _NAMES | (_GEMMA if architecture == "gemma3" else {})
        found[f"blk.{layer}.{names[inner]}.{part}"] = values
    if architecture == "gemma3":
        found |= {name: values + 1 for name, values in found.items() if name.endswith("norm.weight")}
    return found | {name: np.stack(parts) for name, parts in experts.items()}


def _rotated(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Pairs of values that are rotated together become neighbours."""
    return values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

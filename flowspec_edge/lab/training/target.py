"""The frozen target of a training: weights, tokenizer, layer shape."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowspec_edge.drafting.eagle.eagle2 import layer_heads
from flowspec_edge.drafting.eagle.head_config import llama_layer
from flowspec_edge.errors import FlowspecError, UsageError, first_line
from flowspec_edge.lab.plain import load_reference_model
from flowspec_edge.lab.training.loop import device
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.families import LLAMA, Family
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.weights.checkpoint import digest
from flowspec_edge.model.weights.located import display_path
from flowspec_edge.stage.shard import load_lm_head
from flowspec_edge.util.tensors import no_loading_bars

_SHAPE = ("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
          "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_key_value_heads",
          "rms_norm_eps", "rope_parameters", "vocab_size")  # fields that a draft layer takes over


def check_target(model: OpenModel) -> int:
    """Return the end-of-text id; UsageError without one, and if the model is sharded or cannot run on stages."""
    if model.sharded:
        raise UsageError(f"{model.display_path} is cut into shards, and training needs the whole model: "
                         "give the checkpoint that it was made from")
    _ = model.decoder  # refuses what stages cannot run
    if not model.stop_ids:
        raise UsageError(f"{model.target / 'config.json'} has no eos_token_id, which ends a training text")
    return min(model.stop_ids)


def load_target(model: OpenModel) -> Any:
    """Return a frozen causal LM: float32 on a CPU, where that is the fastest dtype; on a GPU as stored."""
    dev = device()
    if not model.read_by_transformers:
        return load_reference_model(model, "bf16" if dev.type == "cuda" else "fp32", dev)
    dtype: Any = "auto" if dev.type == "cuda" else torch.float32
    try:
        with no_loading_bars():
            target = AutoModelForCausalLM.from_pretrained(
                model.target, dtype=dtype, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and safetensors raise many types
        raise FlowspecError(f"{display_path(model.target)}: the model cannot be loaded: {first_line(error)}") from error
    return target.to(dev).eval().requires_grad_(False)


def load_tokenizer(model: OpenModel) -> Any:
    try:
        return AutoTokenizer.from_pretrained(model.target, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises a bare Exception
        raise UsageError(f"the tokenizer in {display_path(model.target)} cannot be loaded: {first_line(error)}"
                         ) from error


def load_fast_tokenizer(model: OpenModel) -> Tokenizer:
    """Raise UsageError if the model has only a slow tokenizer."""
    fast = getattr(load_tokenizer(model), "backend_tokenizer", None)
    if not isinstance(fast, Tokenizer):
        raise UsageError(f"the tokenizer in {display_path(model.target)} is too slow for so much text: "
                         "put its tokenizer.json beside it")
    return fast


def check_tokens(model: OpenModel, *texts: Tensor) -> None:
    """Raise UsageError for a token id outside the model's vocabulary."""
    largest, vocabulary = max(int(text.max()) for text in texts), int(model.config["vocab_size"])
    if largest >= vocabulary:
        raise UsageError(f"the tokenizer in {display_path(model.target)} makes token {largest} of the text, but the "
                         f"model's vocabulary has {vocabulary} tokens: they do not belong together")


def fingerprint(model: OpenModel) -> str:
    """Return a digest of the output matrix, which differs between a model and its fine-tunes."""
    return digest({"lm_head": load_lm_head(model, "fp32")})


def layer_shape(config: Any) -> dict[str, Any]:
    """Return the fields of a target's configuration that a draft layer takes over.

    Rows turn as in the target's layers that see all of them.
    """
    fields, rope = config.to_dict(), config.rope_parameters
    shape = {key: fields[key] for key in _SHAPE if fields.get(key) is not None}
    by_type = [rope[kind] for kind in ("full_attention", *(getattr(config, "layer_types", None) or ())) if kind in rope]
    return shape | {"rope_parameters": dict(by_type[0] if by_type else rope)}


def head_layer(config: Any, family: Family = LLAMA) -> DecoderConfig:
    """Return a Llama layer of the target's shape, without Qwen3's norms on queries and keys.

    ``family``: ``llama_layer``'s.
    """
    shape = {**layer_shape(config), **layer_heads(config)}
    return llama_layer({"num_hidden_layers": 1, "tie_word_embeddings": False, **shape}, "the target", family)

"""The frozen target that a draft part is trained for: its weights, its tokenizer, its layer's shape.

Knows transformers' loaders and which of a target's fields a draft layer takes over.  Does not know
any draft model.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.stage.checkpoint import digest
from flowspec_edge.stage.shard import load_config, load_lm_head
from flowspec_edge.training.loop import device

_SHAPE = ("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
          "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_key_value_heads",
          "rms_norm_eps", "rope_parameters", "vocab_size")  # of the target, and so of a draft layer


def check_target(model: ModelDir) -> int:
    """The id that ends a training text, of a target that a part can be trained for.

    UsageError for a sharded model, for one that stages cannot run, and for one without such an id.
    """
    if model.sharded:
        raise UsageError(f"{model.path} is cut into shards, and training needs the whole model: "
                         "give the checkpoint that it was made from")
    load_config(model.target)
    if not model.stop_ids:
        raise UsageError(f"{model.target / 'config.json'} has no eos_token_id, which ends a training text")
    return min(model.stop_ids)


def load_target(model: ModelDir) -> Any:
    """The target as a causal LM of transformers, on the device that trains, frozen.

    In float32 on a CPU, which computes in nothing else as fast; on a GPU as it is stored.
    """
    dev = device()
    dtype: Any = "auto" if dev.type == "cuda" else torch.float32
    try:
        target = AutoModelForCausalLM.from_pretrained(model.target, dtype=dtype, local_files_only=True)
    except Exception as error:  # transformers and safetensors raise many kinds for one fact
        raise FlowspecError(f"{model.target}: the model cannot be loaded: {_first(error)}") from error
    return target.to(dev).eval().requires_grad_(False)


def load_tokenizer(model: ModelDir) -> Any:
    """The target's tokenizer, as transformers loads it."""
    try:
        return AutoTokenizer.from_pretrained(model.target, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions for a file it cannot read
        raise UsageError(f"the tokenizer in {model.target} cannot be loaded: {_first(error)}") from error


def load_fast_tokenizer(model: ModelDir) -> Tokenizer:
    """The same without transformers around it; UsageError if it is written in Python."""
    fast = getattr(load_tokenizer(model), "backend_tokenizer", None)
    if not isinstance(fast, Tokenizer):
        raise UsageError(f"the tokenizer in {model.target} is too slow for so much text: "
                         "put its tokenizer.json beside it")
    return fast


def check_tokens(model: ModelDir, *texts: Tensor) -> None:
    """UsageError for a text with a token that the model does not know."""
    largest, vocabulary = max(int(text.max()) for text in texts), int(load_config(model.target).vocab_size)
    if largest >= vocabulary:
        raise UsageError(f"the tokenizer in {model.target} makes token {largest} of the text, but the "
                         f"model's vocabulary has {vocabulary} tokens: they do not belong together")


def fingerprint(model: ModelDir) -> str:
    """Tells targets and their fine-tunes apart, by their output matrices."""
    return digest({"lm_head": load_lm_head(model.target, "fp32")})


def layer_config(config: Any, **own: Any) -> LlamaConfig:
    """A Llama layer of the target's shape; ``own`` fields take precedence.

    Norms on queries and keys (Qwen3) are left out: draft layers have none.
    """
    shape = config.to_dict()
    known = {key: shape[key] for key in _SHAPE if shape.get(key) is not None}
    return LlamaConfig(**{"num_hidden_layers": 1, "tie_word_embeddings": False, **known, **own})


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""EAGLE-1/2 checkpoints as they are published: config.json and one weight file.

Knows tensor names and shapes, and is strict about them.  Does not know how the head is run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from flowspec_edge.drafting import weights
from flowspec_edge.drafting.eagle import EagleHead
from flowspec_edge.errors import FlowspecError

_WHAT = "an EAGLE head"
_EMBEDDING = "embed_tokens.weight"
PUBLISHED = (  # what a head's config.json says of its layer
    "attention_bias", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "pad_token_id", "qkv_bias", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "vocab_size",
)


def load_head(directory: Path, embedding: Tensor | None, dtype: torch.dtype) -> EagleHead:
    """Read a head; ``embedding`` [V, H], the target's, stands in where the file has none.

    Raises UsageError when the directory or a file in it is missing, FlowspecError when a tensor is
    missing, unexpected, misshapen or unreadable: the text names it.
    """
    config = head_config(directory)
    stored = weights.plain_names(weights.read_weights(directory, _WHAT), directory)
    if embedding is not None:
        require_fit(directory, "width", config.hidden_size, embedding.shape[1])
        require_fit(directory, "vocabulary", config.vocab_size, len(embedding))
    if _EMBEDDING not in stored and embedding is not None:
        stored[_EMBEDDING] = embedding
    head = head_skeleton(config)
    weights.assign(head, stored, directory, _WHAT, dtype)
    head.rotary_emb = type(head.rotary_emb)(config)  # its buffers are computed, not stored
    return head.eval()


def save_head(head: EagleHead, directory: Path, dtype: torch.dtype, with_embedding: bool = True) -> None:
    """Write config.json and model.safetensors in ``dtype``."""
    facts = head.config.to_dict()
    config = {key: facts[key] for key in PUBLISHED if key in facts}
    config.update(architectures=["LlamaForCausalLM"], bias=head.fc.bias is not None,
                  rope_theta=facts["rope_parameters"]["rope_theta"],
                  torch_dtype=str(dtype).removeprefix("torch."))
    stored = {name: weight for name, weight in head.state_dict().items()
              if with_embedding or name != _EMBEDDING}
    weights.write(directory, config, stored, dtype)


def require_fit(directory: Path, what: str, heads: int, targets: int) -> None:
    """FlowspecError unless the head was made for a target of this width, this vocabulary, …"""
    if heads != targets:
        unit = " tokens" if what == "vocabulary" else ""
        raise FlowspecError(f"{directory}: the head's {what} is {heads}{unit}, the target's {targets}; "
                            "a head works with the target that it was trained for only")


def head_skeleton(config: LlamaConfig) -> EagleHead:
    """A head of this shape on the meta device: it costs no memory."""
    with torch.device("meta"):
        return EagleHead(config)


def head_config(directory: Path) -> LlamaConfig:
    """What a head's config.json says; UsageError or FlowspecError when it cannot be used."""
    raw = weights.read_config(directory, _WHAT)
    raw.setdefault("bias", True)  # the published convention: absent means that fc has one
    raw.pop("model_type", None)  # heads of Qwen2 call themselves so; the layer is Llama's
    config = LlamaConfig.from_dict(raw)
    if config.num_hidden_layers != 1:
        raise FlowspecError(f"{directory / 'config.json'}: an EAGLE-1/2 head has one layer, "
                            f"not {config.num_hidden_layers}")
    return config

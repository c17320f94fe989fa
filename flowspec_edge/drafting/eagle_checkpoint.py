"""EAGLE-1/2 checkpoints as they are published: config.json and one weight file.

Knows file names, tensor names and shapes, and is strict about all three.  Does not know how the
head is run.
"""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from transformers import LlamaConfig

from flowspec_edge.drafting.eagle import EagleHead
from flowspec_edge.errors import FlowspecError, UsageError

_EMBEDDING = "embed_tokens.weight"
_PUBLISHED = (  # what a head's config.json says of its layer
    "attention_bias", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "pad_token_id", "qkv_bias", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "vocab_size",
)
_SAFE, _BIN = "model.safetensors", "pytorch_model.bin"


def load_head(directory: Path, embedding: Tensor | None, dtype: torch.dtype) -> EagleHead:
    """Read a head; ``embedding`` [V, H], the target's, stands in where the file has none.

    Raises UsageError when the directory or a file in it is missing, FlowspecError when a tensor is
    missing, unexpected, misshapen or unreadable: the text names it.
    """
    config = _config(directory)
    weights = _weights(directory)
    if embedding is not None and embedding.shape[-1] != config.hidden_size:
        raise FlowspecError(
            f"{directory}: the head's width is {config.hidden_size}, the target's {embedding.shape[-1]}; "
            "a head works with the target that it was trained for only"
        )
    if _EMBEDDING not in weights and embedding is not None:
        weights[_EMBEDDING] = embedding
    with torch.device("meta"):  # the shapes only: the weights below take the place of all parameters
        head = EagleHead(config)
    _check(directory, head, weights)
    head.load_state_dict({name: w.to(dtype) for name, w in weights.items()}, strict=True, assign=True)
    head.rotary_emb = type(head.rotary_emb)(config)  # its buffers are computed, not stored
    return head.eval()


def save_head(head: EagleHead, directory: Path, dtype: torch.dtype, with_embedding: bool = True) -> None:
    """Write config.json and model.safetensors in ``dtype``."""
    directory.mkdir(parents=True, exist_ok=True)
    facts = head.config.to_dict()
    config = {key: facts[key] for key in _PUBLISHED if key in facts}
    config.update(architectures=["LlamaForCausalLM"], bias=head.fc.bias is not None,
                  rope_theta=facts["rope_parameters"]["rope_theta"],
                  torch_dtype=str(dtype).removeprefix("torch."))
    weights = {
        name: weight.detach().to("cpu", dtype).contiguous() for name, weight in head.state_dict().items()
        if with_embedding or name != _EMBEDDING
    }
    safetensors.torch.save_file(weights, directory / _SAFE, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _config(directory: Path) -> LlamaConfig:
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no EAGLE head at {directory}: config.json is missing") from None
    except (OSError, ValueError) as error:
        raise FlowspecError(f"{path} is not readable as JSON: {error}") from None
    raw.setdefault("bias", True)  # the published convention: absent means that fc has one
    raw.pop("model_type", None)  # heads of Qwen2 call themselves so; the layer is Llama's
    config = LlamaConfig.from_dict(raw)
    if config.num_hidden_layers != 1:
        raise FlowspecError(f"{path}: an EAGLE-1/2 head has one layer, not {config.num_hidden_layers}")
    return config


def _weights(directory: Path) -> dict[str, Tensor]:
    safe, pickled = directory / _SAFE, directory / _BIN
    try:
        if safe.exists():
            return safetensors.torch.load_file(safe)
        if pickled.exists():
            return dict(torch.load(pickled, map_location="cpu", weights_only=True))
    except Exception as error:  # both readers raise many kinds for one fact: the file is no good
        name = safe if safe.exists() else pickled
        raise FlowspecError(f"{name} cannot be read as weights: {_first_line(error)}") from error
    raise UsageError(f"no EAGLE head at {directory}: neither {_SAFE} nor {_BIN} is there")


def _check(directory: Path, head: EagleHead, weights: dict[str, Tensor]) -> None:
    wanted = {name: tuple(w.shape) for name, w in head.state_dict().items()}
    for name in wanted:
        if name not in weights:
            raise FlowspecError(f"{directory}: tensor {name} is missing from the EAGLE head")
    for name, weight in weights.items():
        if name not in wanted:
            raise FlowspecError(f"{directory}: tensor {name} does not belong in an EAGLE-1/2 head")
        if tuple(weight.shape) != wanted[name]:
            raise FlowspecError(
                f"{directory}: tensor {name} has shape {list(weight.shape)}, "
                f"config.json asks for {list(wanted[name])}"
            )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

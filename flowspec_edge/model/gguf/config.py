"""A model's config.json from a GGUF file's metadata.

The names of the fields are those of docs/gguf.md in ggml's repository; what llama.cpp assumes for a field that is
left out is assumed here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.families import FAMILIES, Family

ROPE_FACTORS = "rope_freqs.weight"  # by which Llama 3.1 and later divide each frequency
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Fields:
    """The metadata of one file, with errors that name it."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.path, self._fields = path, fields
        self.architecture: str = self.text("general.architecture")

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.unusable(key, value, "a text")
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number of the architecture: ``key`` without its name."""
        key = f"{self.architecture}.{key}"
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()  # of every layer
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.unusable(key, value, "a number")
        return value

    def get(self, key: str) -> Any:
        """Return a field's value; None if it is left out."""
        return self._fields.get(key)

    def unusable(self, key: str, value: Any, expected: str) -> FlowspecError:
        if value is None:
            return FlowspecError(f"{self.path} does not state {key}: it is no language model, or damaged")
        value_text = f"{len(value)} numbers" if isinstance(value, np.ndarray) else repr(value)[:60]
        return FlowspecError(f"{self.path} states {value_text} for {key}, which must be {expected}")


def family_in(fields: Fields) -> Family:
    """Return the file's family; UsageError for an architecture that stages cannot run."""
    sparse = bool(fields.number("expert_count", 0))
    for family in FAMILIES.values():
        if family.gguf and family.gguf.architecture == fields.architecture and family.sparse == sparse:
            return family
    supported = dict.fromkeys(family.gguf.architecture for family in FAMILIES.values() if family.gguf)
    raise UsageError(f"{fields.path}: a GGUF file of the architecture {fields.architecture!r} cannot be read, only "
                     f"of {', '.join(supported)}: take the checkpoint of which it was made")


def config_of(fields: Fields, names: Collection[str], vocabulary: int, rope_factors: NDArray[np.float32] | None
              ) -> dict[str, Any]:
    """Return the fields of config.json.

    names         of the file's tensors
    vocabulary    rows of the embeddings
    rope_factors  values of the tensor ``ROPE_FACTORS``; None without it

    UsageError for what stages cannot compute; FlowspecError that names a field which is missing.
    """
    family, heads = family_in(fields), fields.number("attention.head_count")
    assert family.gguf is not None
    width = fields.number("embedding_length")
    head = fields.number("attention.key_length", width // max(1, heads))
    rotated = fields.number("rope.dimension_count", head)
    if rotated != head or fields.number("attention.value_length", head) != head:
        raise UsageError(f"{fields.path}: heads of {head} values of which {rotated} are rotated cannot be computed")
    positions, window = fields.number("context_length"), fields.number("attention.sliding_window", 0)
    further = _FURTHER.get(fields.architecture)
    if 0 < window < positions and further is None:
        raise UsageError(f"{fields.path}: layers that see a window of {window} rows cannot be read from a GGUF file: "
                         "take the checkpoint of which it was made")
    config: dict[str, Any] = {
        "model_type": family.name, "hidden_size": width, "head_dim": head, "num_attention_heads": heads,
        "num_key_value_heads": fields.number("attention.head_count_kv", heads),
        "num_hidden_layers": fields.number("block_count"),
        "intermediate_size": fields.number("feed_forward_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": float(fields.number("rope.freq_base", 10_000.0)),
        "max_position_embeddings": positions,
        "vocab_size": vocabulary, "tie_word_embeddings": "output.weight" not in names, "hidden_act": "silu",
    }
    if "blk.0.attn_q.bias" in names:
        config["attention_bias"] = True
    if (scaling := _rope_scaling(fields, rope_factors, config)) is not None:
        config["rope_scaling"] = scaling
    if further is not None:
        config |= further(fields, config)
    config |= {name: fields.number(key) for name, key in family.gguf.fields.items()}
    config.update(family.gguf.constants)
    for name in ("bos", "eos", "pad"):
        key = f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id"
        if fields.get(key) is not None:
            config[f"{name}_token_id"] = fields.get(key)
    return config


def _gemma3(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what sets Gemma 3 apart; what no field states is as llama.cpp assumes it."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if value := fields.number(key, 0):
            raise UsageError(f"{fields.path}: {fields.architecture}.{key} is {value}, which stages do not compute")
    window, pattern = fields.number("attention.sliding_window", 0), fields.number("attention.sliding_window_pattern", 6)
    if pattern < 1:
        raise fields.unusable(f"{fields.architecture}.attention.sliding_window_pattern", pattern, "a number above 0")
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == 62:  # the 27B alone scales queries by another number than the width of heads
        scalar = config["hidden_size"] // max(1, config["num_attention_heads"])
    return {"sliding_window": window or None, "sliding_window_pattern": pattern if window else 1,
            "query_pre_attn_scalar": scalar, "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": float(fields.number("rope.freq_base_swa", 10_000.0))}


_FURTHER: dict[str, Callable[[Fields, Mapping[str, Any]], dict[str, Any]]] = {"gemma3": _gemma3}


def _rope_scaling(fields: Fields, factors: NDArray[np.float32] | None, config: Mapping[str, Any]
                  ) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3(fields, factors, config)
    kind = fields.get(f"{fields.architecture}.rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor,
                "original_max_position_embeddings": fields.number("rope.scaling.original_context_length")}
    raise UsageError(f"{fields.path}: positions scaled by {kind!r} cannot be computed, only by 'linear' and 'yarn'")


def _llama3(fields: Fields, factors: NDArray[np.float32], config: Mapping[str, Any]) -> dict[str, Any]:
    """Find the factor of which Llama 3.1's rule makes these ``factors``.

    Its other constants are the same in all published models.
    """
    scaling = {"rope_type": "llama3", "factor": float(str(np.float32(factors.max()))), **_LLAMA3}
    expected = llama3_factors(config["rope_theta"], config["head_dim"], scaling)
    if len(factors) != len(expected) or not np.allclose(factors, expected, rtol=1e-4):
        raise UsageError(f"{fields.path}: the tensor {ROPE_FACTORS} divides the frequencies of positions in a way that "
                         "is not Llama 3's: take the checkpoint of which the file was made")
    return scaling


def llama3_factors(theta: float, head: int, scaling: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return what Llama 3.1 divides each frequency by: 1 for short waves, the factor for long ones."""
    waves = 2 * np.pi * theta ** (np.arange(0, head, 2) / head)
    low, high, text = (scaling[name] for name in ("low_freq_factor", "high_freq_factor",
                                                  "original_max_position_embeddings"))
    smooth = np.clip((text / waves - low) / (high - low), 0, 1)
    divided: NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return divided

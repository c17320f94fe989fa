"""Which models stages can run, judged by their configuration.

Knows what a family's forward pass must look like for a pipeline of stages.  Does not load weights;
``positions`` says how long a text may be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.activations import ACT2FN

from flowspec_edge.errors import UsageError

# Families whose forward is: embed, then layers with one full-attention mask, then norm, with
# nothing between them.  A family belongs here once tests/stage/test_families.py compares it with
# transformers.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

# Rotary embeddings whose angle depends on a row's own position alone.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Those that depend on how long the text has become: rows cached before it grew would be wrong.
_GROWING_ROPE = ("dynamic", "longrope")

# Quantised layouts that `flowspec models shard` converts.
_CONVERTED = ("awq", "gptq")


def check(config: Any, path: Path, quantised: bool = False) -> None:
    """UsageError, which names ``path``, unless stages can run models of this configuration.

    config     transformers' configuration object
    quantised  whether weights that somebody else has quantised are fine too: the sharder converts them
    """
    if config.model_type not in ARCHITECTURES:
        raise UsageError(f"{path}: stages cannot run {config.model_type!r} models, "
                         f"only {', '.join(ARCHITECTURES)}")
    _check_rope(config, path)
    _check_shape(config, path)
    _check_layers(config, path)
    if not quantised:
        _check_quantisation(config, path)


def rope_type(config: Any) -> str:
    """The kind of rotary embedding, under the name that transformers gives it."""
    return str(config.rope_parameters.get("rope_type", "default"))


def _check_rope(config: Any, path: Path) -> None:
    kind = rope_type(config)
    if kind in _GROWING_ROPE:
        raise UsageError(f"{path}: rope type {kind!r} turns rows by an angle that changes as the text grows, "
                         "which rows already in a cache cannot follow; where the model permits, set "
                         f"rope_type to one of: {', '.join(ROPE_TYPES)}")
    if kind not in ROPE_TYPES:
        raise UsageError(f"{path}: no rope type {kind!r}, only {', '.join(ROPE_TYPES)}")


    for name in {"rope_theta", "factor"} & set(config.rope_parameters):
        value = config.rope_parameters[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{path}: the rope's {name} must be a number, not {value!r}")


def _check_shape(config: Any, path: Path) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        raise UsageError(f"{path}: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    if config.hidden_act not in ACT2FN:
        raise UsageError(f"{path}: transformers has no activation {config.hidden_act!r}")


def _check_layers(config: Any, path: Path) -> None:
    others = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if others:
        raise UsageError(f"{path}: layers of type {', '.join(sorted(others))} cannot be run, only "
                         "full_attention and sliding_attention")


def _check_quantisation(config: Any, path: Path) -> None:
    how = getattr(config, "quantization_config", None)
    if how is None:
        return
    how = how if isinstance(how, dict) else how.to_dict()
    method = str(how.get("quant_method", "an unknown method"))
    if method in _CONVERTED:
        raise UsageError(f"{path}: {method.upper()} weights must be converted first: flowspec models shard "
                         f"--model {path.parent} --stages N --out DIR")
    raise UsageError(f"{path}: weights quantised with {method} cannot be read; take the 16 bit checkpoint, "
                     "and quantise it with: flowspec models shard --dtype int4")

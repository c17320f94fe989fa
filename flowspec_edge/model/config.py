"""config.json of a model.

Fields that decide the family and shapes are checked before a library computes with them; the whole is as transformers
reads it. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from flowspec_edge.errors import UsageError
from flowspec_edge.model.decoder_config import DecoderConfig, decoder_config, layer_types
from flowspec_edge.model.families import family_of, text_config
from flowspec_edge.model.recognise import refuse_quantised, refuse_unless_runnable, require_family
from flowspec_edge.util.bounded_read import read_json_object


def cache_values(config: Mapping[str, Any]) -> int:
    """Elements of one row's keys and values in all layers; ``config``: of a config.json."""
    heads = int(config.get("num_attention_heads") or 0)
    keys = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or (int(config.get("hidden_size") or 0) // max(1, heads)))
    return 2 * keys * width * (int(config.get("num_hidden_layers") or 1) - recurrent_layers(config))


def recurrent_layers(config: Mapping[str, Any]) -> int:
    """Layers without keys and values."""
    if not family_of(config).recurrent:
        return 0
    return layer_types(config, "config.json").count("linear_attention")


def position_limit(config: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens, prompt and answer together, that stages can run.

    It holds whatever the rope scaling.
    """
    return int(config["max_position_embeddings"])


_SIZES = {  # field -> the most of any model, with room
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "num_hidden_layers": 1_000,
    "linear_num_key_heads": 1 << 16,
    "linear_num_value_heads": 1 << 16,
    "linear_key_head_dim": 1 << 16,
    "linear_value_head_dim": 1 << 16,
    "linear_conv_kernel_dim": 1 << 10,
    "full_attention_interval": 1_000,
    "shared_expert_intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 26,
    "draft_vocab_size": 1 << 26,
    "target_hidden_size": 1 << 20,
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
}
_MAY_BE_NULL = {"num_key_value_heads", "head_dim", "sliding_window", "draft_vocab_size", "target_hidden_size"}
_POSITIVE = ("rms_norm_eps", "rope_theta")


def check_config(config: Mapping[str, Any], path: Path, required: Collection[str] = ()) -> None:
    """Raise UsageError for the first field of ``path`` which is missing or has an impossible value."""
    for name in required:
        if name not in config:
            raise UsageError(f"{path} has no {name}")
    for name, most in _SIZES.items():
        value = config.get(name, 1)
        if value is None and name in _MAY_BE_NULL:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise UsageError(f"{path}: {name} must be a whole number from 1 to {most}, not {_short_repr(value)}")
    for name in _POSITIVE:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UsageError(f"{path}: {name} must be a number above 0, not {_short_repr(value)}")
    layers = config.get("max_window_layers", 0)
    if type(layers) is not int or layers < 0:
        raise UsageError(f"{path}: max_window_layers must be a whole number, not {_short_repr(layers)}")
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise UsageError(f"{path}: layer_types must be a list of names, not {_short_repr(kinds)}")
    check_stop_ids(config, path)


def check_stop_ids(config: Mapping[str, Any], path: Path) -> None:
    ids = config.get("eos_token_id")
    for stop_id in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if type(stop_id) is not int:
            raise UsageError(f"{path}: eos_token_id must be a whole number or a list of them, "
                             f"not {_short_repr(stop_id)}")


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def read_decoder_config(directory: Path, quantised: bool = False) -> DecoderConfig:
    """Read what decoder layers need of config.json; UsageError if it is missing or stages cannot run the model.

    ``quantised`` accepts AWQ and GPTQ checkpoints, which must be sharded before a stage loads them.
    """
    path = directory / "config.json"
    refuse_unless_runnable(directory, quantised)
    fields = text_config(read_json_object(path))
    check_config(fields, path)
    require_family(fields, path)
    config = decoder_config(fields, path)
    refuse_quantised(fields, path, quantised)
    return config


def load_config(directory: Path, quantised: bool = False) -> Any:
    """Read config.json as transformers does; errors as for :func:`read_decoder_config`."""
    from transformers import AutoConfig  # slow to import

    path = directory / "config.json"
    read_decoder_config(directory, quantised)
    raw = read_json_object(path)
    fields = text_config(raw)
    try:
        if "text_config" in raw and "text_config" not in fields:
            config = AutoConfig.for_model(**fields)
            config.name_or_path = str(directory)
        else:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers and huggingface_hub raise many types, even bare Exceptions
        reason = shorten(str(error), 200, placeholder=" …")
        raise UsageError(f"{path} is not a model configuration: {reason}") from error
    _without_storage_dtype(config)
    return config


def _without_storage_dtype(config: Any) -> None:
    """Forget an element type in which nothing computes, such as float8: transformers fails with it.

    In which type weights are stored, their files tell.
    """
    import torch

    if config.dtype not in (None, torch.float32, torch.float16, torch.bfloat16, torch.float64):
        config.dtype = None


def parse_config(fields: Mapping[str, Any], origin: str) -> Any:
    """Make transformers' configuration of the ``fields`` of a config.json; errors as for :func:`load_config`."""
    from transformers import AutoConfig  # slow to import

    require_family(text_config(fields), origin)
    decoder_config(fields, origin)
    config = AutoConfig.for_model(**text_config(fields))
    _without_storage_dtype(config)
    return config

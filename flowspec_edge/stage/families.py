"""The models that stages can run: config.json as transformers reads it, and what it must not ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from flowspec_edge.errors import UsageError
from flowspec_edge.model.experts import separate_experts
from flowspec_edge.model.families import Family, family_of, text_config
from flowspec_edge.model.manifest import DRAFT_TARGET, Manifest, stage_part
from flowspec_edge.model.modeldir import check_config, is_sharded
from flowspec_edge.model.recognise import refuse_quantised, refuse_unless_runnable, require_family
from flowspec_edge.stage.layers import attention
from flowspec_edge.stage.layers.delta_net import recur_over_trees
from flowspec_edge.util.bounded_read import read_json_object

# Rotary embeddings whose angle depends only on the row's position.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# The angle depends on the length of the text: rows cached before it grew would be wrong.
_GROWING_ROPE = ("dynamic", "longrope")


def load_config(model_dir: Path | str, quantised: bool = False) -> Any:
    """transformers' configuration; UsageError if it is missing or stages cannot run the model.

    ``quantised`` accepts AWQ and GPTQ checkpoints, which must be sharded before a stage loads them.
    """
    model_dir = _config_home(Path(model_dir))
    path = model_dir / "config.json"
    refuse_unless_runnable(model_dir, quantised)
    raw = read_json_object(path)
    fields = text_config(raw)
    check_config(fields, path)
    try:
        if "text_config" in raw and "text_config" not in fields:
            config = AutoConfig.for_model(**fields)
            config.name_or_path = str(model_dir)
        else:
            config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except Exception as error:  # transformers and huggingface_hub raise many types, even bare Exceptions
        reason = shorten(str(error), 200, placeholder=" …")
        raise UsageError(f"{path} is not a model configuration: {reason}") from error
    _check(config, path, quantised)
    _without_storage_dtype(config)
    return config


def _without_storage_dtype(config: Any) -> None:
    """Forget an element type in which nothing computes, such as float8: transformers fails with it.

    In which type weights are stored, their files tell.
    """
    if config.dtype not in (None, torch.float32, torch.float16, torch.bfloat16, torch.float64):
        config.dtype = None


def parse_config(fields: Mapping[str, Any], origin: str) -> Any:
    """transformers' configuration from the ``fields`` of a config.json; errors as for :func:`load_config`."""
    config = AutoConfig.for_model(**text_config(fields))
    _check(config, origin, quantised=False)
    _without_storage_dtype(config)
    return config


def _config_home(model_dir: Path) -> Path:
    """In a sharded model, the first part that exists here."""
    if not is_sharded(model_dir):
        return model_dir
    parts = [DRAFT_TARGET, *(Path(stage_part(i)) for i in range(Manifest.read(model_dir).stages))]
    homes = [model_dir / part for part in parts if (model_dir / part / "config.json").is_file()]
    return homes[0] if homes else model_dir / parts[0]


def skeleton(config: Any) -> Any:
    """transformers' decoder on the meta device, with all layers, so that layer indexes are right; experts are
    linears of their own."""
    attention.register()
    try:
        with torch.device("meta"):
            core = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).model
            separate_experts(core)
            recur_over_trees(core)
            return core
    except Exception as error:  # from any module of any family, for values that do not fit together
        reason = shorten(str(error), 200, placeholder=" …")
        raise UsageError(f"transformers cannot make a model of {config.name_or_path}/config.json: {reason}"
                         ) from error


def few_launches(family: Family) -> Callable[[nn.Module], nn.Module]:
    """What makes a loaded layer of a family compute in few kernel launches, and returns it; the family's
    record names it (``Family.layer``)."""
    module, _, name = family.layer.partition(":")
    found: Callable[[nn.Module], nn.Module] = getattr(import_module(module), name)
    return found


def _check(config: Any, path: Path | str, quantised: bool) -> None:
    require_family({"model_type": config.model_type}, path)
    _check_rope(config, path)
    _check_shape(config, path)
    _check_layers(config, path)
    refuse_quantised(config.to_dict(), path, quantised)


def _check_rope(config: Any, path: Path | str) -> None:
    kind = str(config.rope_parameters.get("rope_type", "default"))
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


def _check_shape(config: Any, path: Path | str) -> None:
    heads, kv_heads, family = config.num_attention_heads, config.num_key_value_heads, family_of(config)
    if kv_heads < 1 or heads % kv_heads:
        raise UsageError(f"{path}: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    if config.hidden_act not in ACT2FN:
        raise UsageError(f"{path}: transformers has no activation {config.hidden_act!r}")
    experts = (getattr(config, "num_local_experts", None) or config.num_experts
               ) if family.sparse else 0
    if experts and config.num_experts_per_tok > experts:
        raise UsageError(f"{path}: a row cannot choose {config.num_experts_per_tok} experts of {experts}")
    if family.recurrent and config.linear_num_value_heads % config.linear_num_key_heads:
        raise UsageError(f"{path}: {config.linear_num_value_heads} heads of recurrent layers cannot share "
                         f"{config.linear_num_key_heads} key heads evenly")
    if family.recurrent and config.hidden_act != "silu":
        raise UsageError(f"{path}: the convolution's activation is silu, not {config.hidden_act!r}")


def _check_layers(config: Any, path: Path | str) -> None:
    known = {"full_attention", "linear_attention" if family_of(config).recurrent else "sliding_attention"}
    others = {*(getattr(config, "layer_types", None) or ())} - known
    if others:
        raise UsageError(f"{path}: layers of type {', '.join(sorted(others))} cannot be run, only "
                         f"{' and '.join(sorted(known))}")

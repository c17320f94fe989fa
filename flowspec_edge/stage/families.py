"""A family's decoder: transformers' modules on the meta device, as stages load and run them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from flowspec_edge.errors import UsageError
from flowspec_edge.model.experts import separate_experts
from flowspec_edge.model.families import Family
from flowspec_edge.stage.layers import attention
from flowspec_edge.stage.layers.delta_net import recur_over_trees


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


def embedding_scale(core: Any, dtype: torch.dtype) -> float:
    """Return by what a decoder of :func:`skeleton` multiplies the rows of its embeddings, rounded to ``dtype`` as
    transformers rounds it."""
    return float(torch.tensor(getattr(core.embed_tokens, "scalar_embed_scale", 1.0), device="cpu").to(dtype))


def few_launches(family: Family) -> Callable[[nn.Module], nn.Module]:
    """Import what makes a loaded layer of a family compute in few kernel launches (``Family.layer``), and returns
    the layer."""
    module, _, name = family.layer.partition(":")
    found: Callable[[nn.Module], nn.Module] = getattr(import_module(module), name)
    return found

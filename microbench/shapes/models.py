"""Random layers, draft heads and output matrices in the shapes of published models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from flowspec_edge.drafting.eagle.eagle2 import EagleHead, eagle_config
from flowspec_edge.model.decoder_config import decoder_config
from flowspec_edge.stage.families.decoder import layers_on_meta
from flowspec_edge.stage.families.rotary import Rotary
from flowspec_edge.stage.quant.schemes import scheme
from flowspec_edge.stage.shard import Shard
from flowspec_edge.stage.weights.load import fast_layout
from flowspec_edge.util.tensors import DTYPES
from microbench._common import random_codes


@dataclass(frozen=True)
class Shape:
    """Fields of transformers' config; ``family`` is "llama" or "qwen3"."""

    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    def config(self, layers: int) -> Any:
        fields = {name: value for name, value in asdict(self).items() if name != "family"}
        config_class = Qwen3Config if self.family == "qwen3" else LlamaConfig
        return config_class(**{**fields, "num_hidden_layers": layers, "max_position_embeddings": 8192})


SHAPES = {
    "llama-2-7b": Shape("llama", 4096, 32, 32, 32, 128, 11008, 32000),
    "llama-2-13b": Shape("llama", 5120, 40, 40, 40, 128, 13824, 32000),
    "llama-3.1-8b": Shape("llama", 4096, 32, 32, 8, 128, 14336, 128256),
    "qwen3-8b": Shape("qwen3", 4096, 36, 32, 8, 128, 12288, 151936),
}


def compute_dtype(dtype: str) -> torch.dtype:
    """Return the type of activations and of unquantised weights, for weights in ``dtype``."""
    return torch.bfloat16 if dtype == "int4" else DTYPES[dtype]


def random_stage(shape: Shape, layers: int, dtype: str, device: str) -> Shard:
    config = decoder_config(shape.config(layers).to_dict(), shape.family)
    computed, at = compute_dtype(dtype), torch.device(device)
    modules = tuple(layers_on_meta(config, 0, layers))
    for layer in modules:
        if dtype == "int4":
            _pack(layer, computed, at)
        fill_random(layer, computed, at)
        layer.prepare()
    return Shard(index=1, stages=3, layers=(0, layers), config=config, modules=modules,
                 rotary=Rotary(config, at), embed=None, norm=None, dtype=computed,
                 device=at, digest="")


def random_head(shape: Shape, dtype: torch.dtype, device: str) -> EagleHead:
    """Return an EAGLE-2 head for a model of this shape, with a vocabulary of 16 to save memory."""
    config = eagle_config({
        "vocab_size": 16, "hidden_size": shape.hidden_size, "num_hidden_layers": 1, "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size, "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads, "max_position_embeddings": 8192}, shape.family)
    with torch.device("meta"):
        head = EagleHead(config)
    fill_random(head, dtype, torch.device(device))
    head.prepare()
    return head


def random_matrix(rows: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty(*rows, dtype=dtype, device=device).normal_(0, 0.02)


def fill_random(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace parameters on the meta device, in a checkpoint's layout: random matrices, vectors of ones."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            value = torch.ones(parameter.shape, dtype=dtype, device=device)
            if parameter.ndim == 2:
                value = fast_layout(value.normal_(0, 0.02))
            part.register_parameter(name, nn.Parameter(value, requires_grad=False))
    module.eval()


def _pack(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    int4 = scheme("int4")
    for path, linear in list(layer.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue
        rows, columns = linear.weight.shape
        packed = int4.linear(rows, columns, linear.bias is not None, dtype, device)
        packed.fill(random_codes(int4, rows, columns),
                    None if linear.bias is None else torch.zeros(rows, dtype=dtype))
        parent, _, child = path.rpartition(".")
        setattr(layer.get_submodule(parent), child, packed)

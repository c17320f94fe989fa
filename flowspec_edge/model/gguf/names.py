"""Tensors of GGUF files by the names that checkpoints give them.

Names in GGUF files are those of ``gguf.constants``. Three things are stored otherwise than in a checkpoint: the experts
of a layer are one tensor, llama.cpp's converter puts the rows of Llama's query and key matrices in the order in
which llama.cpp rotates them, and it adds to the weights of Gemma's norms the 1 that transformers adds in every pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flowspec_edge.model.families import FAMILIES
from flowspec_edge.model.gguf.header import GgufTensor

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_ROUTER = "ffn_gate_inp"
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
_ROTATED = ("attn_q", "attn_k")


@dataclass(frozen=True)
class TensorLocation:
    """A checkpoint's tensor in a GGUF file.

    shape   without the experts' dimension
    heads   of the matrix, whose rows llama.cpp's converter permuted; 0: they are in order
    offset  what the converter added to the values
    """

    name: str
    shape: tuple[int, ...]
    type: str
    at: int
    heads: int = 0
    offset: float = 0.0


def tensor_locations(tensors: Iterable[GgufTensor], config: dict[str, Any]) -> Iterator[TensorLocation]:
    """Name each tensor as the checkpoints of ``config``'s family do.

    A tensor without a place in such a model keeps its own name, by which loaders refuse it.
    """
    family = FAMILIES[config["model_type"]]
    stored = family.gguf
    assert stored is not None
    experts, modules = family.experts, _IN_LAYER | dict(stored.modules)
    for tensor in tensors:
        name, heads, offset = tensor.name, 0, 0.0
        stem, _, part = name.rpartition(".")
        match = _LAYER.fullmatch(name)
        if stem.endswith("_norm"):
            offset = stored.norm_offset
        if stem in _WHOLE and part == "weight":
            name = f"{_WHOLE[stem]}.weight"
        elif match is not None:
            layer, inner, part = f"model.layers.{int(match[1])}", match[2], match[3]
            stacked = _EXPERTS.fullmatch(inner)
            if inner in modules:
                name = f"{layer}.{modules[inner]}.{part}"
                if stored.permuted and inner in _ROTATED:
                    heads = config["num_attention_heads" if inner == "attn_q" else "num_key_value_heads"]
            elif experts is not None and inner == _ROUTER:
                name = f"{layer}.{experts.block}.gate.{part}"
            elif experts is not None and stacked is not None and len(tensor.shape) == 3:
                matrix = {"gate": experts.gate, "up": experts.up, "down": experts.down}[stacked[1]]
                size = tensor.shape[1] * tensor.row_bytes
                for expert in range(tensor.shape[0]):
                    yield TensorLocation(f"{layer}.{experts.block}.experts.{expert}.{matrix}.{part}", tensor.shape[1:],
                                         tensor.type.name, tensor.at + expert * size)
                continue
        yield TensorLocation(name, tensor.shape, tensor.type.name, tensor.at, heads, offset)

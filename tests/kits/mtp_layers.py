"""MTP layers: random ones inside tiny checkpoints, and their formulas in numpy, float64, without a cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowspec_edge.drafting.eagle.mtp import mtp_config, mtp_tensors
from kits.draft_heads import Layer, log_softmax, rotate

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def with_mtp(target: Path, seed: int = 3, stacked: bool = False) -> Path:
    """Add a random MTP layer to a checkpoint's one file; ``stacked``: its experts as Qwen3.5 stores them."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
            for name, shape in mtp_tensors(mtp_config(target)).items()}
    path = target / "model.safetensors"
    save_file(load_file(path) | (_stack(made) if stacked else made), path, metadata={"format": "pt"})
    return target


def _stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    plain = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            plain[name] = tensor
    for block, found in experts.items():
        each = [found[i] for i in range(len(found))]
        plain[f"{block}.gate_up_proj"] = torch.stack([torch.cat([own["gate"], own["up"]]) for own in each])
        plain[f"{block}.down_proj"] = torch.stack([own["down"] for own in each])
    return plain


class Mtp(Layer):
    """The layer in ``target``; embeddings and lm_head are given."""

    def __init__(self, target: Path, embedding: Tensor, lm_head: Tensor) -> None:
        config = mtp_config(target)
        weights = {name.removeprefix("mtp."): tensor.double().numpy() for name, tensor in
                   load_file(target / "model.safetensors").items() if name.startswith("mtp.")}
        super().__init__(weights, "layers.0.", config.num_attention_heads, config.num_key_value_heads,
                         config.rms_norm_eps, config.ropes[""]["rope_theta"])
        self.turned = int(config.head_dim * config.ropes[""]["partial_rotary_factor"])
        self.config = config
        self.embedding, self.lm_head = embedding.double().numpy(), lm_head.double().numpy()

    def norm(self, name: str, x: Any) -> Any:
        return x / np.sqrt((x**2).mean() + self.eps) * (1 + self.w[name + ".weight"])

    def turn(self, x: Any, position: int) -> Any:
        """The rotary embedding of the first values of each head."""
        return np.concatenate([rotate(x[:, : self.turned], position, self.theta), x[:, self.turned :]], -1)

    def query(self, x: Any) -> Any:
        joined = self.linear(self.prefix + "self_attn.q_proj", x).reshape(self.heads, -1)
        q, gate = np.split(joined, 2, axis=-1)
        return q, 1 / (1 + np.exp(-gate))

    def gated(self, block: str, x: Any) -> Any:
        gate, up = self.linear(block + "gate_proj", x), self.linear(block + "up_proj", x)
        return self.linear(block + "down_proj", gate / (1 + np.exp(-gate)) * up)

    def mlp(self, x: Any) -> Any:
        block = self.prefix + "mlp."
        if block + "gate.weight" not in self.w:
            return self.gated(block, x)
        shares = np.exp(log_softmax(self.linear(block + "gate", x)))
        best = np.argsort(-shares)[: self.config.num_experts_per_tok]
        total = shares[best].sum() if self.config.normed_weights else 1.0
        routed = sum(shares[e] / total * self.gated(f"{block}experts.{e}.", x) for e in best)
        return routed + self.gated(block + "shared_expert.", x) / (
            1 + np.exp(-self.linear(block + "shared_expert_gate", x)))

    def state(self, known: Any) -> Any:
        return known

    def row(self, inputs: Any) -> Any:
        """Output of the last of ``inputs`` = [(state, token, position)], each seeing those before it."""
        rows = [(self.linear("fc", np.concatenate([
            self.norm("pre_fc_norm_embedding", self.embedding[token]),
            self.norm("pre_fc_norm_hidden", state)])), position) for state, token, position in inputs]
        x = rows[-1][0] + self.attend([(self.norm("layers.0.input_layernorm", r), p) for r, p in rows])
        return self.norm("norm", x + self.mlp(self.norm("layers.0.post_attention_layernorm", x)))

    def logits(self, output: Any) -> Any:
        return self.lm_head @ output

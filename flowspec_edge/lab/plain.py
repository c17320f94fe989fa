"""Plain decoding with transformers' unsharded model: the reference that every strategy must reproduce.

As an independent check, it shares no code with trees and strategies, and with stages only the file reader and, in 16
bits, the order in which attention and products add.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from flowspec_edge.d0.request import FinishReason
from flowspec_edge.lab.stage_attention import register
from flowspec_edge.model.experts import ClampedGate, Experts, Gated
from flowspec_edge.model.families import ExpertNames, family_of
from flowspec_edge.model.manifest import stage_part
from flowspec_edge.model.opened import OpenModel, opened
from flowspec_edge.sampling.restrictions import AnswerRestrictions
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.sampling.sampler import AnswerPenalties, choose
from flowspec_edge.sampling.settings import Penalties, Restrictions
from flowspec_edge.stage.output_head import load_output_head
from flowspec_edge.stage.quant.half import round_linears
from flowspec_edge.stage.shard import load_lm_head
from flowspec_edge.stage.weights import tensor_names
from flowspec_edge.stage.weights.load import (
    fast_layout,
    head_scheme_of,
    load_modules,
    schemes_of,
)
from flowspec_edge.util.linears import PaddedLinear, replace_linears
from flowspec_edge.util.tensors import MIXED, no_loading_bars, parse_dtype
from flowspec_edge.util.threads import threads_worth
from flowspec_edge.util.torchdevice import use_exact_kernels


class PlainDecoder:
    def __init__(self, model_dir: Path, dtype: str = "fp32", device: torch.device | str = "cpu") -> None:
        use_exact_kernels()
        open_model = OpenModel(model_dir)
        self._size = open_model.size
        self.model = transformers_model(open_model, dtype, device)

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int, sampling: Sampling,
                 stop_ids: frozenset[int] = frozenset(), penalties: Penalties | None = None,
                 restrictions: Restrictions | None = None) -> tuple[list[int], FinishReason]:
        """Return the continuation of ``prompt``, without the end-of-sequence id, and why it ended."""
        with threads_worth(self._size):
            return self._generate(prompt, max_new_tokens, sampling, stop_ids, penalties, restrictions)

    def _generate(self, prompt: list[int], max_new_tokens: int, sampling: Sampling, stop_ids: frozenset[int],
                  penalties: Penalties | None, restrictions: Restrictions | None
                  ) -> tuple[list[int], FinishReason]:
        cache = DynamicCache(config=self.model.config)
        tokens: list[int] = []
        penalised = AnswerPenalties(penalties, prompt) if penalties else None
        restricted = AnswerRestrictions(restrictions, prompt, stop_ids) if restrictions else None
        step = torch.tensor([prompt], device=self.model.device)
        while len(tokens) < max_new_tokens:
            logits = self.model(input_ids=step, past_key_values=cache, logits_to_keep=1).logits[0]
            position = np.array([len(prompt) + len(tokens) - 1])
            logits = penalised.applied(logits, [()]) if penalised else logits
            allowed = restricted.allowed((), logits.shape[-1])[None] if restricted else None
            token = int(choose(logits, position, sampling, allowed)[0])
            if token in stop_ids:
                return tokens, "stop"
            tokens.append(token)
            if penalised:
                penalised.extend([token])
            if restricted:
                restricted.extend([token])
            step = torch.tensor([[token]], device=self.model.device)
        return tokens, "length"


def transformers_model(model: OpenModel, dtype: str, device: torch.device | str = "cpu") -> Any:
    """Return transformers' causal language model, which transformers reads itself if it can.

    For "mixed" the values of its matrices are rounded to 16 bits, and everything is computed in float32.
    """
    if dtype == MIXED:
        rounded = load_reference_model(model, "fp32", device)  # whose experts are linears, as the stages' are
        for layers in (rounded.model.layers, nn.ModuleList([rounded.lm_head])):  # embeddings may be lm_head's, and stay
            round_linears(layers)
        return rounded
    if not model.read_by_transformers:
        return load_reference_model(model, dtype, device)
    with no_loading_bars():
        decoder = AutoModelForCausalLM.from_pretrained(model.target, dtype=parse_dtype(dtype), trust_remote_code=False,
                                                       **_attention(parse_dtype(dtype), in_8_bits=False))
    return _padded(decoder.eval().to(device))


def load_reference_model(directory: OpenModel | Path | str, dtype: str, device: torch.device | str = "cpu") -> Any:
    """Load transformers' causal language model, quantised matrices included; errors as for ``load_shard``."""
    torch_dtype, torch_device = parse_dtype(dtype), torch.device(device)
    open_model = opened(directory)
    config, manifest = open_model.parsed_config, open_model.manifest
    in_8_bits = bool(manifest and manifest.kv_cache == "int8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **_attention(torch_dtype, in_8_bits))
        separate_experts(model.model)
    core = model.model
    module = tensor_names.whole_model(core)  # before loading, which joins matrices
    runs = [(0, len(core.layers))]
    if manifest:
        runs = list(manifest.ranges)
    for index, (lo, hi) in enumerate(runs):
        parts: dict[str, nn.Module] = {f"model.layers.{i}": core.layers[i] for i in range(lo, hi)}
        if index == 0:
            parts["model.embed_tokens"] = core.embed_tokens
        if index == len(runs) - 1:
            parts["model.norm"] = core.norm
        with open_model.part(stage_part(index)) as part:
            checkpoint = part.checkpoint
            loaded_names = load_modules(parts, checkpoint, torch_dtype, torch_device, schemes_of(open_model))
        tensor_names.check_no_unexpected(checkpoint.directory, checkpoint.names, loaded_names if manifest else module)
    core.rotary_emb = type(core.rotary_emb)(config=config).to(torch_device)
    if hasattr(core.embed_tokens, "embed_scale"):  # computed, too
        core.embed_tokens.embed_scale = torch.tensor(core.embed_tokens.scalar_embed_scale, device=torch_device)
    if head_scheme_of(open_model) is not None:
        model.lm_head = load_output_head(open_model, dtype, torch_device)
    elif config.tie_word_embeddings and tensor_names.LM_HEAD not in open_model.checkpoint():
        model.lm_head.weight = core.embed_tokens.weight
    else:
        head = load_lm_head(open_model, dtype, torch_device)
        model.lm_head.weight = nn.Parameter(fast_layout(head), requires_grad=False)
    if open_model.generation_config:
        model.generation_config = GenerationConfig.from_pretrained(open_model.target)
    return _padded(model.requires_grad_(False).eval())


def _attention(dtype: torch.dtype, in_8_bits: bool) -> dict[str, str]:
    return {"attn_implementation": register(in_8_bits)} if in_8_bits or dtype != torch.float32 else {}


def _padded(model: Any) -> Any:
    """Pad products as stages do on a CPU in bfloat16."""
    if model.device.type == "cpu" and model.dtype == torch.bfloat16:
        replace_linears(model, PaddedLinear)
    return model


def separated(stacked: Any, names: ExpertNames) -> Experts:
    """Experts like transformers' ``stacked`` ones, on the meta device."""
    shape = ((stacked.hidden_size, stacked.intermediate_size) if names.clamped else
             (stacked.hidden_dim, stacked.intermediate_dim))
    gated = ClampedGate(stacked.alpha, stacked.limit) if names.clamped else Gated(stacked.act_fn)
    return Experts.on_meta(names, *shape, stacked.num_experts, gated)


def separate_experts(core: Any) -> None:
    """Replace the stacked experts of a decoder on the meta device; dense layers stay as they are."""
    names = family_of(core.config).experts
    for layer in core.layers if names else ():
        assert names is not None
        block = layer.mlp
        if hasattr(block, "experts"):
            block.experts = separated(block.experts, names)
        if names.block != "mlp":  # a layer's forward calls ``mlp``; its tensors have the checkpoint's names
            del layer.mlp
            setattr(layer, names.block, block)
            layer.__dict__["mlp"] = block

"""Transformers' own ``generate`` as the reference for tokens that depend on more than the logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flowspec_edge.sampling.rule import Sampling, gumbel


class Noisy(LogitsProcessor):
    """Makes the greedy choice a sample, with the noise that every strategy shares."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.tensor(gumbel(self.seed, ids.shape[1], scores.shape[-1]))
        return torch.log_softmax(scores.double(), -1) + noise


@cache
def target_of(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model / "target", dtype=torch.float32)


@cache
def captured_states(model: Path, text: tuple[int, ...], captured: tuple[int, ...]) -> torch.Tensor:
    """The states of every row of a text after so many layers each: [n, states H]; those after all layers are
    not normed."""
    inputs: list[torch.Tensor] = []
    target = target_of(model)
    hook = target.model.norm.register_forward_pre_hook(lambda norm, given: inputs.append(given[0]))
    with torch.inference_mode():
        hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.cat([(*hidden[:-1], inputs[0])[layer][0] for layer in captured], dim=-1)


def reference_text(model: Path, prompt: Sequence[int], sampling: Sampling, limit: int,
                   steps: Sequence[LogitsProcessor], ends: Sequence[int] | None = None
                   ) -> tuple[list[int], str]:
    """Tokens and finish reason; ``steps`` change the logits before temperature, top-k, top-p and min-p;
    ``ends``: instead of the model's own."""
    target = target_of(model)
    eos = target.config.eos_token_id
    stops = [eos] if ends is None else [*ends]
    every: list[Any] = [*steps]
    if not sampling.greedy:
        every.append(TemperatureLogitsWarper(sampling.temperature))
        every += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        every += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        every += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
        every.append(Noisy(sampling.seed))
    ids = torch.tensor([list(prompt)])
    how = {"do_sample": False, "top_k": None, "max_new_tokens": limit,
           "eos_token_id": stops or None}
    with torch.inference_mode():
        out = target.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=every,
                              pad_token_id=eos, **how)
    tokens: list[int] = out[0, len(prompt):].tolist()
    return (tokens[:-1], "stop") if tokens[-1] in stops else (tokens, "length")

"""Plain decoding with the unsharded model: the reference that every strategy must reproduce.

Uses transformers' own model and cache, one token at a time, and the shared-noise rule for
sampling.  Shares no code with stages, trees or strategies, so it can serve as their check.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from flowspec_edge.runtime.request import FinishReason
from flowspec_edge.sampling import Sampling, choose
from flowspec_edge.tensors import parse_dtype


class PlainDecoder:
    """The whole target in one piece."""

    def __init__(self, model_dir: Path, dtype: str = "fp32") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir / "target", dtype=parse_dtype(dtype))
        self.model.eval()

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int, sampling: Sampling,
                 stop_ids: frozenset[int] = frozenset()) -> tuple[list[int], FinishReason]:
        """The continuation of ``prompt`` and why it ended; the end-of-sequence id is left out."""
        cache = DynamicCache(config=self.model.config)
        tokens: list[int] = []
        step = torch.tensor([prompt])
        while len(tokens) < max_new_tokens:
            logits = self.model(input_ids=step, past_key_values=cache, logits_to_keep=1).logits[0]
            position = np.array([len(prompt) + len(tokens) - 1])
            token = int(choose(logits.float().numpy(), position, sampling)[0])
            if token in stop_ids:
                return tokens, "stop"
            tokens.append(token)
            step = torch.tensor([[token]])
        return tokens, "length"

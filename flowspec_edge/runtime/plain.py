"""Plain decoding with transformers' unsharded model: the reference that every strategy must reproduce.

As an independent check, it shares no code with trees and strategies, and with stages only the file reader.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from flowspec_edge.model.modeldir import ModelDir
from flowspec_edge.runtime.request import FinishReason
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.sampling.sampler import AnswerPenalties, choose
from flowspec_edge.sampling.settings import Penalties
from flowspec_edge.stage.reference_model import load_reference_model
from flowspec_edge.util.tensors import no_loading_bars, parse_dtype
from flowspec_edge.util.torchdevice import use_exact_kernels


class PlainDecoder:
    def __init__(self, model_dir: Path, dtype: str = "fp32", device: torch.device | str = "cpu") -> None:
        use_exact_kernels()
        found = ModelDir(model_dir)
        if found.sharded:
            self.model = load_reference_model(found.stages, dtype, device)
        else:
            with no_loading_bars():
                read = AutoModelForCausalLM.from_pretrained(found.target, dtype=parse_dtype(dtype))
            self.model = read.eval().to(device)

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int, sampling: Sampling,
                 stop_ids: frozenset[int] = frozenset(), penalties: Penalties | None = None
                 ) -> tuple[list[int], FinishReason]:
        """Return the continuation of ``prompt``, without the end-of-sequence id, and why it ended."""
        cache = DynamicCache(config=self.model.config)
        tokens: list[int] = []
        penalised = AnswerPenalties(penalties) if penalties else None
        step = torch.tensor([prompt], device=self.model.device)
        while len(tokens) < max_new_tokens:
            logits = self.model(input_ids=step, past_key_values=cache, logits_to_keep=1).logits[0]
            position = np.array([len(prompt) + len(tokens) - 1])
            logits = penalised.applied(logits, [()]) if penalised else logits
            token = int(choose(logits, position, sampling)[0])
            if token in stop_ids:
                return tokens, "stop"
            tokens.append(token)
            if penalised:
                penalised.extend([token])
            step = torch.tensor([[token]], device=self.model.device)
        return tokens, "length"

"""From a directory to a drafter: the one place that knows the kinds of draft models by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.eagle import EagleDrafter
from flowspec_edge.drafting.eagle_checkpoint import load_head
from flowspec_edge.drafting.lm import LMDrafter
from flowspec_edge.errors import FlowspecError, UsageError

KINDS = ("eagle2", "lm")


def load_drafter(kind: str, model_dir: Path, lm_head: Tensor, embedding: Tensor,
                 dtype: torch.dtype) -> Drafter:
    """Load the draft model of ``model_dir`` for a target with these weights.

    kind       "eagle2" (an EAGLE-1/2 head) or "lm" (a causal LM that transformers can load)
    lm_head    [V, H], the target's; the drafter works on its device
    embedding  [V, H], the target's; used when an EAGLE head brings none of its own
    dtype      of the draft model's weights, cache and arithmetic

    Raises UsageError for an unknown kind or a missing directory, FlowspecError for bad weights.
    """
    if kind == "eagle2":
        head = load_head(model_dir, embedding, dtype).to(lm_head.device)
        if head.config.vocab_size != len(lm_head):
            raise FlowspecError(f"{model_dir}: the head's vocabulary has {head.config.vocab_size} "
                                f"tokens, the target's {len(lm_head)}")
        return EagleDrafter(head, lm_head.to(dtype))
    if kind == "lm":
        if not (model_dir / "config.json").is_file():
            raise UsageError(f"no draft model at {model_dir}: config.json is missing")
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
            model.to(lm_head.device)
        except (OSError, ValueError, RuntimeError) as error:
            raise FlowspecError(f"{model_dir}: the draft model cannot be loaded: "
                                f"{str(error).splitlines()[0]}") from error
        if model.config.vocab_size != len(lm_head):
            raise FlowspecError(f"{model_dir}: the draft model's vocabulary has "
                                f"{model.config.vocab_size} tokens, the target's {len(lm_head)}")
        return LMDrafter(model)
    raise UsageError(f"unknown kind of draft model {kind!r}; there is: {', '.join(KINDS)}")

"""Small language models of transformers as drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowspec_edge.drafting.lm import LMDrafter, load_lm


def lm_drafter(model: Any, path: Path, dtype: torch.dtype = torch.float32) -> LMDrafter:
    """``model`` is written to ``path`` and read from there."""
    model.float().save_pretrained(path)
    return load_lm(path, path, model.config.vocab_size, dtype, torch.device("cpu"))

"""The tensors that a checkpoint must hold, and those that checks ignore."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.weights.located import display_path

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

# Buffers that older releases of transformers saved, and that are now computed from the configuration.
# (Sharding also drops biases of zero that some tools write for quantised linears without a bias.)
_IGNORABLE = (
    re.compile(r"(.*\.)?rotary_emb\.inv_freq"),
    re.compile(r".*\.(self_attn|attn|attention)\.(masked_bias|bias)"),
    # Of checkpoints with more than a language model: what drafts, and what sees.
    re.compile(r"mtp\..*"),
    re.compile(r"model\.visual\..*"),
)


def whole_model(core: Any) -> set[str]:
    """All tensors of a causal language model whose decoder is ``core``."""
    return {*(f"model.{name}" for name in core.state_dict()), LM_HEAD}


def missing(expected: Iterable[str], stored: Iterable[str], tied: bool) -> list[str]:
    """Return the wanted tensors that are not stored, sorted; lm_head may be absent if ``tied``."""
    return sorted(set(expected) - set(stored) - ({LM_HEAD} if tied else set()))


def is_ignorable(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _IGNORABLE)


def check_no_unexpected(directory: Path, stored: Iterable[str], expected: Iterable[str]) -> None:
    """Raise FlowspecError that names a stored tensor which is neither wanted nor ignorable."""
    for name in sorted(set(stored) - set(expected)):
        if not is_ignorable(name):
            raise FlowspecError(f"{display_path(directory)}: no module of the model has a place for tensor {name}: "
                                "the weights are not those of its config.json")

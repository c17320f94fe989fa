"""Which tensors a checkpoint must hold, and which others do no harm.

Knows names only: one place for what every strict check of keys lets pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flowspec_edge.errors import FlowspecError

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

# (Beside these, sharding drops biases of zero that tools write for quantised linears which have none.)
# Buffers that older releases of transformers saved, and that are computed from the configuration today.
HARMLESS = (
    re.compile(r"(.*\.)?rotary_emb\.inv_freq"),
    re.compile(r".*\.(self_attn|attn|attention)\.(masked_bias|bias)"),
)


def whole_model(core: Any) -> set[str]:
    """All tensors of a causal language model whose decoder is ``core``."""
    return {*(f"model.{name}" for name in core.state_dict()), LM_HEAD}


def missing(wanted: Iterable[str], stored: Iterable[str], tied: bool) -> list[str]:
    """Those wanted that are not stored, sorted; where embeddings are tied, lm_head may be absent."""
    return sorted(set(wanted) - set(stored) - ({LM_HEAD} if tied else set()))


def harmless(name: str) -> bool:
    """Whether a stored tensor that nothing wants may be passed over."""
    return any(pattern.fullmatch(name) for pattern in HARMLESS)


def refuse_unexpected(directory: Path, stored: Iterable[str], wanted: Iterable[str]) -> None:
    """FlowspecError that names a stored tensor which nothing wants, unless it is known to do no harm."""
    for name in sorted(set(stored) - set(wanted)):
        if not harmless(name):
            raise FlowspecError(f"{directory}: no module of the model has a place for tensor {name}: "
                                "the weights are not those of its config.json")

"""The tensors that a checkpoint must hold, and those that checks ignore."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.weight_file import SafetensorsFile, WeightFile

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
_WITHIN = "model.language_model."  # a multimodal checkpoint's language model
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


def is_written_otherwise(name: str) -> bool:
    """Whether :func:`use_own_names` changes it."""
    return name.startswith(_WITHIN)


def use_own_names(file: WeightFile) -> None:
    """Name a file's tensors as a decoder's are here: without the place of a language model in a multimodal
    checkpoint, and matrices of their own instead of a layer's stacked experts, [experts, 2 inner, width] for
    gate and up, [experts, width, inner] for down.

    Sources: transformers' conversions of ``qwen3_5_text`` and ``qwen2_moe``; the names in Qwen3.5-35B-A3B.
    """
    if not isinstance(file, SafetensorsFile) or not any(map(is_written_otherwise, file.tensors)):
        return
    for stored in list(filter(is_written_otherwise, file.tensors)):
        name, shape = f"model.{stored.removeprefix(_WITHIN)}", file.info(stored).shape
        stacked = _STACKED.fullmatch(name)
        if stacked is None or len(shape) != 3:
            file.view(name, stored, 0, shape)
        else:
            block, matrices = stacked.groups()
            names = ("gate_proj", "up_proj") if matrices == "gate_up_proj" else ("down_proj",)
            experts, rows, columns = shape[0], shape[1] // len(names), shape[2]
            for i, (expert, matrix) in enumerate(product(range(experts), names)):
                file.view(f"{block}.{expert}.{matrix}.weight", stored, i * rows * columns, (rows, columns))
        del file.tensors[stored]


def whole_model(core: Any) -> set[str]:
    """All tensors of a causal language model whose decoder is ``core``."""
    return {*(f"model.{name}" for name in core.state_dict()), LM_HEAD}


def missing(wanted: Iterable[str], stored: Iterable[str], tied: bool) -> list[str]:
    """The wanted tensors that are not stored, sorted; lm_head may be absent if ``tied``."""
    return sorted(set(wanted) - set(stored) - ({LM_HEAD} if tied else set()))


def is_ignorable(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _IGNORABLE)


def check_no_unexpected(directory: Path, stored: Iterable[str], wanted: Iterable[str]) -> None:
    """FlowspecError that names a stored tensor which is neither wanted nor ignorable."""
    for name in sorted(set(stored) - set(wanted)):
        if not is_ignorable(name):
            raise FlowspecError(f"{directory}: no module of the model has a place for tensor {name}: "
                                "the weights are not those of its config.json")

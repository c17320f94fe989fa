"""The types in which GGUF files store tensors, which the package gguf knows; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from flowspec_edge.errors import UsageError


@dataclass(frozen=True)
class BlockType:
    """How a tensor's values are stored: ``values`` of a row together in ``size`` bytes."""

    name: str
    values: int
    size: int


def library() -> Any:
    """Return the package gguf, which knows the types of blocks; UsageError if it is missing."""
    try:
        return import_module("gguf")
    except ImportError as error:
        raise UsageError("a GGUF file needs the package gguf, which cannot be imported here: in flowspec's clone, "
                         "pip install '.[gguf]'") from error


def can_be_read(kind: BlockType) -> bool:
    """Return whether values of this type can be had: the package knows types of blocks that it does not dequantise."""
    gguf = library()
    try:
        gguf.quants.dequantize(np.zeros((1, kind.size), np.uint8), gguf.GGMLQuantizationType[kind.name])
    except NotImplementedError:  # the package has no other way to ask
        return False
    return True

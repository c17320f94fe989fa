"""A draft model's files: config.json beside one file of weights, and strictness about both.

Knows file names and what can be wrong with them.  Does not know any draft model: the caller says
what it is called in messages and which tensors it has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError, UsageError

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


def read_config(directory: Path, what: str) -> dict[str, Any]:
    """config.json; ``what`` is the model's name with its article ("an EAGLE head").

    UsageError if there is none, FlowspecError if it is not a JSON object.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no {_bare(what)} at {directory}: config.json is missing") from None
    except (OSError, ValueError) as error:
        raise FlowspecError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise FlowspecError(f"{path} must hold a JSON object")
    return raw


def read_weights(directory: Path, what: str) -> dict[str, Tensor]:
    """The tensors as stored; UsageError if there are none, FlowspecError if they are unreadable."""
    safe, pickled = directory / SAFE, directory / PICKLED
    try:
        if safe.exists():
            return safetensors.torch.load_file(safe)
        if pickled.exists():
            return dict(torch.load(pickled, map_location="cpu", weights_only=True))
    except Exception as error:  # both readers raise many kinds for one fact: the file is no good
        name = safe if safe.exists() else pickled
        raise FlowspecError(f"{name} cannot be read as weights: {_first_line(error)}") from error
    raise UsageError(f"no {_bare(what)} at {directory}: neither {SAFE} nor {PICKLED} is there")


def assign(module: nn.Module, weights: dict[str, Tensor], directory: Path, what: str, dtype: torch.dtype
           ) -> None:
    """Put ``weights`` in ``dtype`` in the place of all parameters of ``module``.

    FlowspecError that names a tensor which is missing, unexpected or misshapen.
    """
    wanted = {name: tuple(w.shape) for name, w in module.state_dict().items()}
    for name in wanted:
        if name not in weights:
            raise FlowspecError(f"{directory}: tensor {name} is missing from the {_bare(what)}")
    for name, weight in weights.items():
        if name not in wanted:
            raise FlowspecError(f"{directory}: tensor {name} does not belong in {what}")
        if tuple(weight.shape) != wanted[name]:
            raise FlowspecError(
                f"{directory}: tensor {name} has shape {list(weight.shape)}, "
                f"config.json asks for {list(wanted[name])}"
            )
    module.load_state_dict({name: w.to(dtype) for name, w in weights.items()}, strict=True, assign=True)


def write(directory: Path, config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors in ``dtype``."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: w.detach().to("cpu", dtype).contiguous() for name, w in weights.items()}
    safetensors.torch.save_file(stored, directory / SAFE, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _bare(what: str) -> str:
    return what.split(" ", 1)[1]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

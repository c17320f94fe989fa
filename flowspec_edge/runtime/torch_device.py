"""The torch device that a configuration names, if this machine has it.

Knows what to say where it is missing.  Does not choose one.
"""

from __future__ import annotations

import torch

from flowspec_edge.errors import UsageError


def require_torch_device(name: str) -> torch.device:
    """The device called ``name``: "cpu", "cuda" or "cuda:1".  UsageError in one line for any other name, a
    torch without CUDA, and a GPU that is not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"no torch device {name!r}: use cpu, cuda, or cuda:1 for the second GPU")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise UsageError(f"no {name} here: torch {torch.__version__}, {built}, sees no GPU; install a torch "
                         "for this machine's CUDA, or use cpu")
    if (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no {name} here: there are {torch.cuda.device_count()} GPUs, counted from cuda:0")
    return device

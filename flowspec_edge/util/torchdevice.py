"""Selection of the torch device for ``--device``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowspec_edge.errors import UsageError
from flowspec_edge.util.device_memory import ADVICE, available_bytes, is_out_of_memory

CONTEXT_BYTES = 500 * 10**6  # estimated: memory of CUDA and its libraries in each process that uses them


@dataclass(frozen=True)
class TorchGpu:
    """A GPU in PyTorch's numbering; ``free`` and ``total`` in bytes."""

    name: str
    capability: tuple[int, int]
    free: int
    total: int


def gpus() -> list[TorchGpu]:
    """The GPUs that this PyTorch sees, cuda:0 first; empty on a CPU build."""
    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> TorchGpu:
    properties = torch.cuda.get_device_properties(index)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # the call creates a context, which may not fit on a full GPU
        if not is_out_of_memory(error):
            raise
        free, total = 0, properties.total_memory
    # cudaMemGetInfo does not count page cache that the kernel can reclaim.
    free = max(free, available_bytes(torch.device("cuda", index)) or 0)
    return TorchGpu(properties.name, (properties.major, properties.minor), free, total)


def runs_on(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether kernels run on a GPU: "sm_87" on later minor versions, "compute_90" (PTX) on all later ones."""
    for architecture in built_for:
        kind, _, number = architecture.partition("_")
        digits = "".join(character for character in number if character.isdigit())  # of "90a", too
        if not digits:
            continue
        version = int(digits[:-1] or 0), int(digits[-1])
        if kind == "compute" and version <= capability:
            return True
        if kind == "sm" and version[0] == capability[0] and version[1] <= capability[1]:
            return True
    return False


def pick(requested: str, found: Sequence[TorchGpu], built_for: Sequence[str], needed: int,
         what: str = "the model") -> tuple[str, str]:
    """The torch device for ``requested`` ("auto", "cpu", "cuda" or "cuda:N"), and why a GPU is not used ("").

    ``needed`` is in bytes.  UsageError for a requested GPU that does not exist or cannot run ``what``.
    """
    if requested == "cpu":
        return "cpu", ""
    if requested != "auto":
        index = int(requested.partition(":")[2] or 0)
        if not found:
            raise UsageError(f"--device {requested}: {_no_gpu()}")
        if index >= len(found):
            there = ", ".join(f"cuda:{i} ({gpu.name})" for i, gpu in enumerate(found))
            raise UsageError(f"--device {requested}: there is no such GPU, only {there}")
        if reason := _unfit(index, found[index], built_for, needed, what):
            raise UsageError(f"--device {requested}: {reason}")
        return f"cuda:{index}", ""
    reasons = [_unfit(index, gpu, built_for, needed, what) for index, gpu in enumerate(found)]
    if "" in reasons:
        return f"cuda:{reasons.index('')}", ""
    return "cpu", reasons[0] if reasons else ""


def require(name: str) -> torch.device:
    """"cpu", "cuda" or "cuda:1"; UsageError for another name, no CUDA, or a GPU that does not exist."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"no torch device {name!r}: use cpu, cuda, or cuda:1 for the second GPU")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"no {name} here: {_no_gpu()}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no {name} here: there are {torch.cuda.device_count()} GPUs, counted from cuda:0")
    return device


def use_exact_kernels() -> None:
    """Select exact, stable kernels for this process; idempotent.

    Disables TF32, which an environment variable in NVIDIA's containers enables, and cuDNN's SDPA kernel,
    which replans for each length and which PyTorch may prefer on Hopper and Blackwell.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_cudnn_sdp(False)


def architectures() -> list[str]:
    return list(torch.cuda.get_arch_list())


def _unfit(index: int, gpu: TorchGpu, built_for: Sequence[str], needed: int, what: str) -> str:
    if not runs_on(gpu.capability, built_for):
        version = ".".join(map(str, gpu.capability))
        return (f"this PyTorch has no kernels for cuda:{index} ({gpu.name}, compute capability {version}), "
                f"only for {', '.join(built_for) or 'none'}: install a build for it, or use --device cpu")
    if needed > gpu.free:
        return (f"{what} takes about {needed / 1e9:.1f} GB and cuda:{index} ({gpu.name}) has "
                f"{gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB free: {ADVICE}")
    return ""


def _no_gpu() -> str:
    if torch.version.cuda is None:
        return (f"this PyTorch ({torch.__version__}) is built without CUDA: install a CUDA build of it, or "
                "compute on the CPU (--device cpu, torch_device = \"cpu\")")
    return ("PyTorch sees no GPU: see whether nvidia-smi lists one and CUDA_VISIBLE_DEVICES hides none, or "
            "compute on the CPU (--device cpu, torch_device = \"cpu\")")

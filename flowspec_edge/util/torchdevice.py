"""Torch devices: their selection for ``--device``, and their available memory.

Where memory does not suffice, there is a one-line error.
On Jetson the GPU shares the system's memory and no allocation fails: Linux overcommits and then kills a
process. So an allocation is compared with the available memory first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util import procfs

_MEMINFO = Path("/proc/meminfo")
# Besides torch.OutOfMemoryError: the CPU's allocator, absurd sizes, cuBLAS, CUDA's own memory (a context,
# page-locked buffers), and on Tegra the driver's own allocator (NvMap) and the CUDA allocator, which asks
# NVML for details and fails because NVML does not know the GPU.
_OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation overflowed",
                  "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory",
                  "NVML_SUCCESS == r INTERNAL ASSERT", "NvMapMemAlloc")
ADVICE = ("use --dtype fp16, a model in 4 bits (flowspec models shard --dtype int4), fewer other programs on "
         "the GPU, or --device cpu")
_RESERVE = 128 << 20  # bytes left to the system


def available_bytes(device: torch.device, meminfo: Path = _MEMINFO) -> int | None:
    """Bytes available where the GPU shares the system's memory (Jetson); None elsewhere."""
    return procfs.sizes(meminfo).get("MemAvailable") if _shares_memory(device) else None


def _shares_memory(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.get_device_properties(device).is_integrated)


def _why_on_a_jetson(meminfo: Path) -> str:
    """Return what is free beside what is available, and why CUDA may get neither; "" where it has its own memory."""
    if not (torch.cuda.is_available() and _shares_memory(torch.device("cuda"))):
        return ""
    sizes = procfs.sizes(meminfo)
    free, available = (sizes.get(name, 0) / 1e6 for name in ("MemFree", "MemAvailable"))
    return (f" ({free:.0f} MB are free and {available:.0f} MB available, but CUDA may not get what the page "
            "cache holds, and L4T 36.4.7 and newer may refuse a large piece of free memory)")


def is_out_of_memory(error: BaseException) -> bool:
    return (isinstance(error, torch.OutOfMemoryError | MemoryError)
            or any(text in str(error) for text in _OUT_OF_MEMORY))


@contextmanager
def memory_errors(device: str) -> Iterator[None]:
    """Turn out-of-memory errors within the block into a FlowspecError of one line."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).split(". ")[0].splitlines() or ["an allocation failed"])[0]
        raise FlowspecError(f"{device} is out of memory ({reason}){_why_on_a_jetson(_MEMINFO)}: {ADVICE}"
                            ) from error


@contextmanager
def allocation(purpose: str, nbytes: int, advice: str, available: int | None = None, meminfo: Path = _MEMINFO
               ) -> Iterator[None]:
    """Raise FlowspecError, with ``advice``, if an allocation of ``nbytes`` (0: unknown) does not fit or fails.

    ``available`` comes from ``available_bytes``; None skips the check in advance.
    """
    size = f" ({nbytes / 1e6:.0f} MB)" if nbytes else ""
    if available is not None and nbytes + _RESERVE > available:
        raise FlowspecError(f"no memory for {purpose}{size}: {available / 1e6:.0f} MB are available, of which "
                            f"{_RESERVE / 1e6:.0f} are left to the system; {advice}")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FlowspecError(f"no memory for {purpose}{size}{_why_on_a_jetson(meminfo)}: {advice}") from error


def release(device: torch.device) -> None:
    """Return unused memory to the system; on CUDA this waits for the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


CONTEXT_BYTES = 500 * 10**6  # estimated: memory of CUDA and its libraries in each process that uses them


@dataclass(frozen=True)
class TorchGpu:
    """A GPU in PyTorch's numbering; ``free`` and ``total`` in bytes."""

    name: str
    capability: tuple[int, int]
    free: int
    total: int


def gpus() -> list[TorchGpu]:
    """Return the GPUs that this PyTorch sees, cuda:0 first; empty on a CPU build."""
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


def pick(requested: str, devices: Sequence[TorchGpu], built_for: Sequence[str], needed: int,
         model_text: str = "the model") -> tuple[str, str]:
    """Return the torch device for ``requested`` ("auto", "cpu", "cuda" or "cuda:N"), and why a GPU is not used ("").

    ``needed`` is in bytes.  UsageError for a requested GPU that does not exist or cannot run ``model_text``.
    """
    if requested == "cpu":
        return "cpu", ""
    if requested != "auto":
        index = int(requested.partition(":")[2] or 0)
        if not devices:
            raise UsageError(f"--device {requested}: {_no_gpu()}")
        if index >= len(devices):
            gpu_list = ", ".join(f"cuda:{i} ({gpu.name})" for i, gpu in enumerate(devices))
            raise UsageError(f"--device {requested}: there is no such GPU, only {gpu_list}")
        if reason := _unfit(index, devices[index], built_for, needed, model_text):
            raise UsageError(f"--device {requested}: {reason}")
        return f"cuda:{index}", ""
    reasons = [_unfit(index, gpu, built_for, needed, model_text) for index, gpu in enumerate(devices)]
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


def make_current(device: torch.device | str) -> None:
    """Make this GPU the calling thread's current one.

    Pinned memory and events name no GPU, and would otherwise open a context on cuda:0 too.
    """
    if (torch_device := torch.device(device)).type == "cuda" and torch_device.index is not None:
        torch.cuda.set_device(torch_device)


def use_exact_kernels() -> None:
    """Select exact, stable kernels for this process; idempotent.

    Disables TF32, which an environment variable in NVIDIA's containers enables; sums in 16 bits of products
    that cuBLAS splits, which are less exact than those that it does not split, and may overflow; and cuDNN's
    SDPA kernel, which replans for each length and which PyTorch may prefer on Hopper and Blackwell.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.enable_cudnn_sdp(False)


def architectures() -> list[str]:
    return list(torch.cuda.get_arch_list())


def _unfit(index: int, gpu: TorchGpu, built_for: Sequence[str], needed: int, model_text: str) -> str:
    if not runs_on(gpu.capability, built_for):
        version = ".".join(map(str, gpu.capability))
        return (f"this PyTorch has no kernels for cuda:{index} ({gpu.name}, compute capability {version}), "
                f"only for {', '.join(built_for) or 'none'}: install a build for it, or use --device cpu")
    if needed > gpu.free:
        return (f"{model_text} takes about {needed / 1e9:.1f} GB and cuda:{index} ({gpu.name}) has "
                f"{gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB free: {ADVICE}")
    return ""


def _no_gpu() -> str:
    if torch.version.cuda is None:
        return (f"this PyTorch ({torch.__version__}) is built without CUDA: install a CUDA build of it, or "
                "compute on the CPU (--device cpu, torch_device = \"cpu\")")
    return ("PyTorch sees no GPU: see whether nvidia-smi lists one and CUDA_VISIBLE_DEVICES hides none, or "
            "compute on the CPU (--device cpu, torch_device = \"cpu\")")

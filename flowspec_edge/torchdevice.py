"""Which torch device computes: what ``--device`` means on this machine.

Knows what PyTorch says of its GPUs, and which of them can run a model of so many bytes.  Does not know
models; what needs a GPU's facts alone is a pure function of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from flowspec_edge import procfs
from flowspec_edge.errors import FlowspecError, UsageError

_MEMINFO = Path("/proc/meminfo")
# Beside torch.OutOfMemoryError: the CPU's allocator, sizes beyond any memory, cuBLAS, what CUDA itself takes
# (a context, page-locked memory), and the CUDA allocator on Tegra, which asks NVML for details and fails
# because NVML does not know the GPU.
_OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation overflowed",
                  "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory",
                  "NVML_SUCCESS == r INTERNAL ASSERT")
CONTEXT_BYTES = 500 * 10**6  # estimated: what CUDA and its libraries take in each process that uses them


@dataclass(frozen=True)
class Gpu:
    """A GPU as PyTorch numbers them; ``free`` bytes of ``total`` can be allocated now."""

    name: str
    capability: tuple[int, int]
    free: int
    total: int


def gpus() -> list[Gpu]:
    """The GPUs that this PyTorch sees, cuda:0 first; empty on a CPU build."""
    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # it makes a context, for which a full GPU has no room
        if not is_out_of_memory(error):
            raise
        free, total = 0, properties.total_memory
    # cudaMemGetInfo does not count what the kernel would reclaim from its page cache.
    free = max(free, available_bytes(torch.device("cuda", index)) or 0)
    return Gpu(properties.name, (properties.major, properties.minor), free, total)


def runs_on(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a PyTorch with kernels for ``built_for`` ("sm_87", "compute_90", …) runs on a GPU of this
    compute capability: machine code runs on later minor versions, PTX on everything later."""
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


def pick(asked: str, found: Sequence[Gpu], built_for: Sequence[str], needed: int, what: str = "the model",
         ) -> tuple[str, str]:
    """The torch device for ``asked`` ("auto", "cpu", "cuda" or "cuda:N"), and why it is the CPU although
    there is a GPU (empty otherwise).

    found      the GPUs that are there
    built_for  what PyTorch has kernels for, see :func:`runs_on`
    needed     bytes that ``what`` takes on the device

    UsageError for a GPU that is asked for and is not there or cannot run it.
    """
    if asked == "cpu":
        return "cpu", ""
    if asked != "auto":
        index = int(asked.partition(":")[2] or 0)
        if not found:
            raise UsageError(f"--device {asked}: {_no_gpu()}")
        if index >= len(found):
            there = ", ".join(f"cuda:{i} ({gpu.name})" for i, gpu in enumerate(found))
            raise UsageError(f"--device {asked}: there is no such GPU, only {there}")
        if reason := _unfit(index, found[index], built_for, needed, what):
            raise UsageError(f"--device {asked}: {reason}")
        return f"cuda:{index}", ""
    reasons = [_unfit(index, gpu, built_for, needed, what) for index, gpu in enumerate(found)]
    if "" in reasons:
        return f"cuda:{reasons.index('')}", ""
    return "cpu", reasons[0] if reasons else ""


def require(name: str) -> torch.device:
    """The device that a configuration names: "cpu", "cuda" or "cuda:1".

    UsageError in one line for any other name, a torch without CUDA, and a GPU that is not there.
    """
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
    """Settle which kernels PyTorch uses in this process; safe to call again.

    Products of float32 are computed in float32: an environment variable of NVIDIA's containers asks for TF32.
    scaled_dot_product_attention does not take cuDNN's kernel, which PyTorch may prefer on Hopper and
    Blackwell: it is planned anew for each length, and every pass has another.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_cudnn_sdp(False)


def architectures() -> list[str]:
    """What this PyTorch has GPU kernels for."""
    return list(torch.cuda.get_arch_list())


def available_bytes(device: torch.device, meminfo: Path = _MEMINFO) -> int | None:
    """What can still be allocated where the GPU shares the system's memory, as a Jetson's does; None
    elsewhere."""
    if device.type != "cuda" or not torch.cuda.get_device_properties(device).is_integrated:
        return None
    return procfs.sizes(meminfo).get("MemAvailable")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how PyTorch says that an allocation failed, on CPUs, GPUs and Jetson boards."""
    return (isinstance(error, torch.OutOfMemoryError | MemoryError)
            or any(text in str(error) for text in _OUT_OF_MEMORY))


@contextmanager
def memory_errors(device: str) -> Iterator[None]:
    """Within it, memory that does not suffice is a FlowspecError of one line."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = (str(error).split(". ")[0].splitlines() or ["an allocation failed"])[0]
        raise FlowspecError(f"{device} is out of memory ({said}): {_WAYS}") from error


_WAYS = ("use --dtype fp16, a model in 4 bits (flowspec models shard --dtype int4), fewer other programs on "
         "the GPU, or --device cpu")


def _unfit(index: int, gpu: Gpu, built_for: Sequence[str], needed: int, what: str) -> str:
    """Why the GPU cannot run it; empty if it can."""
    if not runs_on(gpu.capability, built_for):
        version = ".".join(map(str, gpu.capability))
        return (f"this PyTorch has no kernels for cuda:{index} ({gpu.name}, compute capability {version}), "
                f"only for {', '.join(built_for) or 'none'}: install a build for it, or use --device cpu")
    if needed > gpu.free:
        return (f"{what} takes about {needed / 1e9:.1f} GB and cuda:{index} ({gpu.name}) has "
                f"{gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB free: {_WAYS}")
    return ""


def _no_gpu() -> str:
    if torch.version.cuda is None:
        return (f"this PyTorch ({torch.__version__}) is built without CUDA: install a CUDA build of it, or "
                "compute on the CPU (--device cpu, torch_device = \"cpu\")")
    return ("PyTorch sees no GPU: see whether nvidia-smi lists one and CUDA_VISIBLE_DEVICES hides none, or "
            "compute on the CPU (--device cpu, torch_device = \"cpu\")")

"""What explains a GPU's speed and memory: the kernels that torch takes, the price of a launch, large pieces.

``probe.checks`` has a row for each.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter, EagleHead, eagle_config
from flowspec_edge.drafting.load import SharedMemory
from flowspec_edge.errors import FlowspecError, first_line
from flowspec_edge.model.decoder_config import decoder_config
from flowspec_edge.model.families import LLAMA
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.families.decoder import layers_on_meta
from flowspec_edge.stage.families.rotary import Rotary
from flowspec_edge.stage.layers.attention import kernel_of
from flowspec_edge.stage.preparation import choose_graphs, warm_up
from flowspec_edge.stage.shard import Shard
from flowspec_edge.util.graphs import CudaRecorder, KernelChoice
from flowspec_edge.util.tensors import DTYPES
from flowspec_edge.util.torchdevice import release

_LAUNCHES = 1000  # fewer than the 1024 that CUDA queues before the host waits
_RUNS = 5
_HEAD_DIM = 128  # of Llama-3.1-8B
_CAPACITY = 1024
_RESERVE = 128 << 20  # bytes left to the system
_MB = 10**6


def available(device: str, memory: Mapping[str, int]) -> int:
    """Return the bytes that the device can give at most.

    They are MemAvailable of ``memory``, /proc/meminfo, where the GPU shares it, else the GPU's own free memory.
    """
    at = torch.device(device)
    free, total = torch.cuda.mem_get_info(at)
    if torch.cuda.get_device_properties(at).is_integrated:
        free = min(total, memory.get("MemAvailable", 0))
    return int(max(0, free - _RESERVE))


def launch_us(device: str) -> float:
    """Measure the host's microseconds for an in-place addition on 16 x 64 from Python: the median of several runs."""
    x = torch.zeros(16, 64, device=device)
    wait = _waiting(torch.device(device))

    def seconds() -> float:
        wait()
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            x.add_(1.0)
        return time.perf_counter() - start

    with torch.inference_mode():
        return _median_us(seconds)


def graph_launch_us(device: str) -> float:
    """Measure the same additions in one CUDA graph, until the last is done; errors as CUDA's."""
    at = torch.device(device)
    with torch.cuda.device(at), torch.inference_mode():
        x, wait = torch.zeros(16, 64, device=at), _waiting(at)
        x.add_(1.0)  # loads the kernel, which a capture forbids
        wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_LAUNCHES):
                x.add_(1.0)

        def seconds() -> float:
            wait()
            start = time.perf_counter()
            graph.replay()
            wait()
            return time.perf_counter() - start

        return _median_us(seconds)


def _waiting(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def _median_us(seconds: Callable[[], float]) -> float:
    seconds()
    return statistics.median(seconds() for _ in range(_RUNS)) / _LAUNCHES * 1e6


def attention(device: str, dtype: str) -> str:
    kernel = kernel_of(torch.device(device), DTYPES[dtype], _HEAD_DIM).name.lower().replace("_", " ")
    return f"SDPA takes its {kernel} kernel for a segment's mask"


def rms_norm(device: str) -> str:
    if has_kernel("aten::_fused_rms_norm", torch.device(device).type.upper()):
        return "torch has one kernel for it"
    return "torch has no kernel for it (CUDA: from 2.9 on): flowspec takes two launches, torch eight"


def launch(device: str) -> str:
    return f"{launch_us(device):.3g} µs of the host for an addition from Python"


def launch_in_graph(device: str) -> str:
    return f"{graph_launch_us(device):.3g} µs for each of {_LAUNCHES} additions in one CUDA graph"


def layers_in_graphs(device: str) -> str:
    return str(_layers_in_graphs(torch.device(device)))


def draft_passes_in_graphs(device: str) -> str:
    return str(_draft_passes_in_graphs(torch.device(device)))


@torch.inference_mode()
def _layers_in_graphs(device: torch.device) -> KernelChoice:
    """Return what a stage with two layers of a small Llama's shape chooses at its start."""
    config = decoder_config({"model_type": LLAMA.name, "hidden_size": 2048, "intermediate_size": 5632,
                             "num_hidden_layers": 2, "vocab_size": 16, "num_attention_heads": 32,
                             "num_key_value_heads": 8}, "this check")
    layers = layers_on_meta(config, 0, config.num_hidden_layers)
    for layer in layers:
        layer.to(torch.float16).to_empty(device=device).requires_grad_(False)
        for weight in layer.parameters():
            weight.normal_(0, 0.02)
        layer.prepare()
    shard = Shard(index=1, stages=3, layers=(0, 2), config=config, embed=None, norm=None, digest="",
                  modules=tuple(layers), dtype=torch.float16, device=device,
                  rotary=Rotary(config, device))
    engine = StageEngine(shard, _CAPACITY)
    warm_up(engine)
    return choose_graphs(engine, CudaRecorder(device))


@torch.inference_mode()
def _draft_passes_in_graphs(device: torch.device) -> KernelChoice:
    """Return what D0 with a small EAGLE-2 head chooses when it loads it."""
    config = eagle_config({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 1, "vocab_size": 8192,
                           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "bias": False},
                          "the check's head")
    head = EagleHead(config).to(device, torch.float16)
    head.prepare()
    memory = SharedMemory(_CAPACITY, CudaRecorder(device))
    memory.drafters(partial(EagleDrafter, head, head.embed_tokens.weight))
    assert memory.choice is not None
    return memory.choice


def has_kernel(operation: str, key: str) -> bool:
    """Return whether this torch has a kernel of its own for the dispatch key, such as "CUDA"."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))
    except RuntimeError:  # an older torch without the operation
        return False


def piece(device: str, mb: int) -> str:
    """Allocate ``mb`` MB (10^6 bytes) in one piece, and free them again.

    Return "".  Raise FlowspecError if that fails.  Its text is the driver's message about NvMap, else the library's
    error.
    """
    with _capture_stderr() as lines:
        try:
            buffer = torch.empty(mb * _MB, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            why = str(error).split(". ")[0]  # the rest lists every process on the GPU
        except Exception as error:
            why = first_line(error)
        else:
            del buffer
            release(torch.device(device))
            return ""
    raise FlowspecError(next((line for line in lines if "NvMap" in line), "") or why)


@contextmanager
def _capture_stderr() -> Iterator[list[str]]:
    """Yield the lines that this process prints to stderr in the block, from C libraries, too.

    The list is filled at the end of the block.
    """
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        stderr_copy = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()

"""What explains a GPU's speed and memory: the kernels that torch takes, the price of a launch, large pieces.

Facts of the GPU come from child processes, as in ``kernel_check``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend
from transformers import LlamaConfig

from flowspec_edge.boards.gpu_check.kernel_check import guarded, run_in_children
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.boards.probe.system_rules import large_pieces
from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter, EagleHead
from flowspec_edge.drafting.load import SharedMemory
from flowspec_edge.errors import first_line
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.families import skeleton
from flowspec_edge.stage.layers.attention import folded_mask
from flowspec_edge.stage.layers.fused import FusedLayer
from flowspec_edge.stage.preparation import choose_graphs, warm_up
from flowspec_edge.stage.shard import Shard
from flowspec_edge.util import procfs
from flowspec_edge.util.graphs import CudaRecorder, KernelChoice
from flowspec_edge.util.jetson import system as l4t_system
from flowspec_edge.util.tensors import DTYPES
from flowspec_edge.util.torchdevice import release

_LAUNCHES = 1000  # fewer than the 1024 that CUDA queues before the host waits
_RUNS = 5
_ROWS, _HEADS, _KV_HEADS, _HEAD_DIM = 16, 32, 8, 128  # a segment through a layer of Llama-3.1-8B
_CACHED, _CAPACITY = 500, 1024
_GRAPH = "launch in a graph"
_PROBE_S = 60.0  # for a child that asks for pieces of memory
_RESERVE = 128 << 20  # bytes left to the system
_MB = 10**6


def check_gpu_facts(device: str, l4t: str = "", meminfo: Path = Path("/proc/meminfo"),
                    environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """``l4t``: the board's release, "" for other machines."""
    on_gpu = torch.device(device).type == "cuda"
    kinds = (*(f"attention {dtype}" for dtype in DTYPES), "rms_norm", "launch",
             *[_GRAPH, "layers in graphs", "draft passes in graphs"] * on_gpu)
    found = run_in_children(__name__, kinds, device=device)
    found.append(free_memory(meminfo))
    if on_gpu:
        found.append(largest_piece(device, _available(device, meminfo)))
    releases = (replace(finding, found=f"{finding.found}; {finding.advice}") for finding in large_pieces(l4t))
    return [*found, *releases, *allocator(l4t, environment)]


def free_memory(meminfo: Path) -> Finding:
    """MemFree beside MemAvailable: CUDA on a Jetson is reported not to get all that the page cache holds."""
    sizes = procfs.sizes(meminfo)
    if not {"MemFree", "MemAvailable"} <= sizes.keys():
        return Finding("free memory", "unknown", "the system does not say")
    free, available = (sizes[name] / 1e6 for name in ("MemFree", "MemAvailable"))
    found = f"MemFree {free:,.0f} MB, MemAvailable {available:,.0f} MB"
    if free < available / 2:
        found += (": the difference is page cache, which CUDA may not get where it shares this memory; sync; "
                  "echo 3 | sudo tee /proc/sys/vm/drop_caches returns it")
    return Finding("free memory", "ok", found)


def allocator(l4t: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether PyTorch's allocator is set up in a way that fails on a Jetson."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if l4t and "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower():
            yield Finding("allocator", "failed", f"{name} has expandable_segments, with which PyTorch is "
                                                 "reported to fail on a Jetson: take it out")


def largest_piece(device: str, available: int) -> Finding:
    """The largest of ``available`` bytes and its halves that the device gives in one piece."""
    needed = l4t_system().large_pieces.needed_mb
    if available < needed * _MB:
        return Finding("largest piece", "warning",
                       f"only {available // _MB} MB are available: stop what else runs here, and try again")
    halves = takewhile(lambda mb: mb > needed, (available // _MB >> times for times in range(64)))
    sizes = [*map(str, halves), str(needed)]
    tried = run_in_children(__name__, sizes, timeout_s=_PROBE_S, device=device)
    given = next((place for place, finding in enumerate(tried) if finding.ok), len(tried))
    refused = tried[given - 1].found if given else ""
    if given == len(tried):
        return Finding("largest piece", "failed",
                       f"not even {needed} MB at once, which models need: {refused}")
    beyond = f"; {int(sizes[given - 1]):,} MB: {refused}" if given else ", all that is free"
    return Finding("largest piece", "ok", f"{int(sizes[given]):,} MB at once{beyond}")


def _available(device: str, meminfo: Path) -> int:
    """Bytes to begin with: MemAvailable where the GPU shares it, else the GPU's own free memory."""
    at = torch.device(device)
    free, total = torch.cuda.mem_get_info(at)
    if torch.cuda.get_device_properties(at).is_integrated:
        free = min(total, procfs.sizes(meminfo).get("MemAvailable", 0))
    return int(max(0, free - _RESERVE))


def launch_us(device: str) -> float:
    """The host's microseconds for an in-place addition on 16 x 64 from Python: the median of several runs."""
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
    """The same additions in one CUDA graph, until the last is done; errors as CUDA's."""
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


def attempt(kind: str, device: str) -> Finding:
    """``kind``: a fact's name, or a number of MB (10^6 bytes) to ask for at once."""
    if kind.isdigit():
        return _piece(kind, device)
    found = guarded(kind, lambda: Finding(kind, "ok", _said(kind, device)))
    # Whether graphs work is for the operations to judge.
    return replace(found, state="skipped") if kind == _GRAPH and not found.ok else found


def _said(kind: str, device: str) -> str:
    name, _, dtype = kind.partition(" ")
    if name == "attention":
        backend = _sdpa_backend(torch.device(device), DTYPES[dtype])
        return f"SDPA takes its {backend} kernel for a segment's mask"
    if name == "rms_norm":
        if has_kernel("aten::_fused_rms_norm", torch.device(device).type.upper()):
            return "torch has one kernel for it"
        return "torch has no kernel for it (CUDA: from 2.9 on): flowspec takes two launches, torch eight"
    if kind == "launch":
        return f"{launch_us(device):.3g} µs of the host for an addition from Python"
    if kind == "layers in graphs":
        return str(_layers_in_graphs(torch.device(device)))
    if kind == "draft passes in graphs":
        return str(_draft_passes_in_graphs(torch.device(device)))
    return f"{graph_launch_us(device):.3g} µs for each of {_LAUNCHES} additions in one CUDA graph"


@torch.inference_mode()
def _sdpa_backend(device: torch.device, dtype: torch.dtype) -> str:
    """Such as "efficient attention", for the arguments with which a stage's layer calls it."""
    groups = _HEADS // _KV_HEADS
    query = torch.zeros(1, _KV_HEADS, groups * _ROWS, _HEAD_DIM, dtype=dtype, device=device)
    cache = torch.zeros(1, _KV_HEADS, _CAPACITY, _HEAD_DIM, dtype=dtype, device=device)[:, :, :_CACHED]
    mask = folded_mask(np.ones((_ROWS, _CACHED), dtype=bool), groups, dtype, device)
    chosen = torch._fused_sdp_choice(query, cache, cache, mask)
    return SDPBackend(chosen).name.lower().replace("_", " ")


@torch.inference_mode()
def _layers_in_graphs(device: torch.device) -> KernelChoice:
    """What a stage with two layers of a small Llama's shape chooses at its start."""
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=2, vocab_size=16,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    core = skeleton(config)
    for layer in core.layers:
        layer.to(torch.float16).to_empty(device=device).requires_grad_(False)
        for weight in layer.parameters():
            weight.normal_(0, 0.02)
    shard = Shard(index=1, stages=3, layers=(0, 2), config=config, embed=None, norm=None, digest="",
                  modules=tuple(map(FusedLayer, core.layers)), dtype=torch.float16, device=device,
                  rotary=type(core.rotary_emb)(config=config).to(device))
    engine = StageEngine(shard, _CAPACITY)
    warm_up(engine)
    return choose_graphs(engine, CudaRecorder(device))


@torch.inference_mode()
def _draft_passes_in_graphs(device: torch.device) -> KernelChoice:
    """What D0 with a small EAGLE-2 head chooses when it loads it."""
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=1, vocab_size=8192,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=64, bias=False)
    head = EagleHead(config).to(device, torch.float16)
    head.fuse_layer()
    memory = SharedMemory(_CAPACITY, CudaRecorder(device))
    memory.drafters(partial(EagleDrafter, head, head.embed_tokens.weight))
    assert memory.choice is not None
    return memory.choice


def has_kernel(operation: str, key: str) -> bool:
    """Whether this torch has a kernel of its own for the dispatch key, such as "CUDA"."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))
    except RuntimeError:  # an older torch without the operation
        return False


def _piece(size: str, device: str) -> Finding:
    """Ask for so many MB at once, and return them; what the driver prints meanwhile is the reason."""
    with _heard() as lines:
        try:
            piece = torch.empty(int(size) * _MB, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            why = str(error).split(". ")[0]  # the rest lists every process on the GPU
        except Exception as error:
            why = first_line(error)
        else:
            del piece
            release(torch.device(device))
            return Finding(size, "ok")
    driver = next((line for line in lines if "NvMap" in line), "")
    return Finding(size, "failed", driver or why)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """The lines that this process, C's libraries too, prints to stderr in the block; filled at its end."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()

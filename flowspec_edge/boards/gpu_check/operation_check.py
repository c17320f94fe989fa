"""Whether the operations of a stage and of a draft device give the right results on a device.

Operations have the runtime's shapes, and are compared with float64 on the CPU, or value by value where nothing
is rounded.  ``probe.checks`` has a row for each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowspec_edge.boards.gpu_check.computations import Deviation
from flowspec_edge.errors import FlowspecError
from flowspec_edge.sampling import sampler
from flowspec_edge.sampling.rule import Sampling, choose, keys, splitmix64
from flowspec_edge.util.kernels import RmsNorm
from flowspec_edge.util.tensors import DTYPES

_ROWS = (1, 4, 16, 17, 64)
_HEADS, _KV_HEADS, _HEAD_DIM = 8, 2, 64
_CACHED, _CAPACITY = 200, 512  # rows of a cache, in use and allocated
_WIDTH, _VOCABULARY = 256, 32_000
_SEED = 7

_Result = TypeVar("_Result")


def _rounded(error: Callable[[torch.device, torch.dtype], float]) -> Callable[..., Deviation]:
    """Make a check of an operation that rounds to the type of its operands, fp32 unless another one is given."""
    @wraps(error)
    def run(device: str, dtype: str = "fp32") -> Deviation:
        return Deviation(_on(device, lambda at: error(at, DTYPES[dtype])), dtype)
    return run


def _exact(check: Callable[[torch.device], None]) -> Callable[[str], Deviation]:
    """Make a check of an operation from one that raises FlowspecError unless every value is right."""
    @wraps(check)
    def run(device: str) -> Deviation:
        _on(device, check)
        return Deviation(0.0)
    return run


def _on(device: str, run: Callable[[torch.device], _Result]) -> _Result:
    """Run a check on ``device`` as the current GPU, to which streams, events and graphs belong."""
    at = torch.device(device)
    with torch.inference_mode(), torch.cuda.device(at) if at.type == "cuda" else nullcontext():
        return run(at)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _difference(computed: Tensor, expected: Tensor) -> float:
    difference = (computed.cpu().double() - expected).abs().max() / expected.abs().max()
    return float(difference) if bool(difference.isfinite()) else float("inf")


def _require_same(computed: Tensor, expected: Tensor) -> None:
    """Raise FlowspecError if any value differs."""
    differing = int((computed.cpu() != expected).sum())
    if differing:
        raise FlowspecError(f"{differing} of {expected.numel()} values are wrong")


@_rounded
def sdpa(device: torch.device, dtype: torch.dtype) -> float:
    """Check a segment's rows with a float mask, over the first rows of a longer cache."""
    worst = 0.0
    for rows in _ROWS:
        keys, values = (_random(1, _KV_HEADS, _CAPACITY, _HEAD_DIM).to(dtype) for _ in range(2))
        values = values.flip(0, 2)
        folded = rows * (_HEADS // _KV_HEADS)
        query = _random(1, _KV_HEADS, folded, _HEAD_DIM).to(dtype)
        visible = torch.rand(folded, _CACHED, generator=torch.Generator().manual_seed(rows)) < 0.5
        visible[:, 0] = True
        mask = torch.zeros(folded, _CACHED).masked_fill(~visible, -torch.inf)
        scores = query.double() @ keys[:, :, :_CACHED].double().mT / _HEAD_DIM**0.5 + mask.double()
        expected = scores.softmax(-1) @ values[:, :, :_CACHED].double()
        device_keys, device_values = keys.to(device), values.to(device)
        computed = F.scaled_dot_product_attention(query.to(device), device_keys[:, :, :_CACHED],
                                                  device_values[:, :, :_CACHED],
                                                  attn_mask=mask.to(device, dtype)[None, None])
        worst = max(worst, _difference(computed, expected))
    return worst


@_rounded
def rms_norm(device: torch.device, dtype: torch.dtype) -> float:
    x, weight = _random(17, _WIDTH).to(dtype), _random(_WIDTH).to(dtype)
    exact = x.double()
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    return _difference(RmsNorm(weight.to(device), 1e-5)(x.to(device)), expected)


@_rounded
def log_softmax(device: torch.device, dtype: torch.dtype) -> float:
    logits = 4 * _random(16, _VOCABULARY)
    return _difference(logits.to(device).log_softmax(-1), logits.double().log_softmax(-1))


@_exact
def topk(device: torch.device) -> None:
    """Check the order of distinct values, so that only one order is right."""
    values = torch.rand(16, _VOCABULARY, generator=torch.Generator().manual_seed(3)).argsort(-1)
    _require_same(values.float().to(device).topk(16).indices, values.argsort(-1, descending=True)[:, :16])


@_exact
def noise(device: torch.device) -> None:
    positions = np.array([0, 1, 4095, 2**31 + 7])
    expected = splitmix64(keys(_SEED, positions)[:, None], np.arange(_VOCABULARY))
    computed = sampler.device_words(_SEED, positions, _VOCABULARY, device)
    _require_same(computed, torch.from_numpy(expected))


@_exact
def sampling(device: torch.device) -> None:
    logits, positions = 3 * _random(16, _VOCABULARY), np.arange(100, 116)
    for sampling in (Sampling(), Sampling(1.0, seed=_SEED), Sampling(1.0, top_p=0.9, seed=_SEED),
                     Sampling(0.7, 20, 0.8, seed=_SEED)):
        tokens = sampler.choose(logits.to(device), positions, sampling)
        _require_same(torch.from_numpy(tokens), torch.from_numpy(choose(logits.numpy(), positions, sampling)))


@_exact
def index_copy(device: torch.device) -> None:
    cache, rows = _random(_CAPACITY, _WIDTH).half(), _random(64, _WIDTH).half()
    slots = torch.randperm(_CAPACITY, generator=torch.Generator().manual_seed(4))[:64]
    expected = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        expected[slot] = rows[row]
    _require_same(cache.to(device).index_copy_(0, slots.to(device), rows.to(device)), expected)


@_exact
def embedding(device: torch.device) -> None:
    table = _random(_VOCABULARY, 64).half()
    tokens = torch.randint(_VOCABULARY, (64,), generator=torch.Generator().manual_seed(5))
    _require_same(F.embedding(tokens.to(device), table.to(device)), torch.stack([table[t] for t in tokens]))


@_exact
def pinned_copies(device: torch.device) -> None:
    """Check copies in both directions, asynchronous and waited for once."""
    original = _random(64, 4096).half()
    back = torch.empty_like(original).pin_memory()
    back.copy_(original.pin_memory().to(device, non_blocking=True), non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    _require_same(back, original)


@_exact
def events(device: torch.device) -> None:
    x = _random(1024, 1024).to(device)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(4):
        x = x @ x * 1e-3
    after.record()
    after.synchronize()
    if not after.query() or before.elapsed_time(after) <= 0:
        raise FlowspecError("an event that was waited for is not over, or took no time")


@_rounded
def graph(device: torch.device, dtype: torch.dtype) -> float:
    """Check that a captured product reads its inputs at the replay, not at the capture."""
    x, weight = torch.zeros(16, _WIDTH, device=device), _random(_WIDTH, _WIDTH).to(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):  # the first product allocates, which a capture forbids
        torch.mm(x, weight)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.mm(x, weight)
    later = _random(16, _WIDTH)
    x.copy_(later)
    graph.replay()
    return _difference(y, later.double() @ weight.cpu().double())

"""What a stage does on CUDA between loading its weights and being ready: a warm-up, and a choice of kernels.

The first passes pay for the context, cuBLAS and lazily loaded kernels: seconds, in which a peer would
consider the stage dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

from flowspec_edge.errors import FlowspecError, first_line
from flowspec_edge.messages import Int32, Open, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.families.decoder import DecoderLayer
from flowspec_edge.stage.layer_graphs import LayerGraphs
from flowspec_edge.stage.layers.recurrent import GatedDelta
from flowspec_edge.stage.quant.base import QuantLinear
from flowspec_edge.stage.quant.grouped import CudaLinear, GroupedLinear
from flowspec_edge.stage.shard import ROW_STEP, Shard
from flowspec_edge.util.graphs import Clock, KernelChoice, Recorder, choose
from flowspec_edge.util.tensors import from_torch, to_host
from flowspec_edge.util.torchdevice import available_bytes, release

WARM_UP = (1, 16, 64)  # rows: plain decoding, a tree segment, a prompt chunk
RECORDED = tuple(range(ROW_STEP, 65, ROW_STEP))  # rows; a segment rarely has more
EXPANDED = (128, 256, 512)  # rows with which int4 products are tried with expanded weights
_TURNS = 5  # of each
_CLEARLY = 0.9  # of the kernel's time
_TEXT = 256  # rows in the cache while kernels are compared


def shard_of(engine: StageEngine) -> Shard:
    """Return what a stage with weights computes with."""
    assert isinstance(engine.model, Shard)
    return engine.model


@torch.inference_mode()
def warm_up(engine: StageEngine) -> None:
    """Run segments of ``WARM_UP`` rows before the first session, so that the allocator holds what later passes need.

    The last one is at the full length of the caches.  FlowspecError if the memory does not suffice.
    """
    longest = max(sum(WARM_UP), engine.cache_rows)
    for rows in WARM_UP:
        _pass_of(engine, rows, longest - rows if rows == WARM_UP[-1] else 0)()
    engine.reset()


@torch.inference_mode()
def try_prompt_rows(engine: StageEngine, most: int) -> int:
    """Rows of a prompt's segment, up to ``most``, for which the stage has memory at the full length of its caches.

    More than those of :data:`WARM_UP` only on CUDA, where a pass reads the weights once for them: on a CPU a layer
    would take seconds, in which the stage says nothing.  Not with recurrent layers, which compare the rows of a pass
    with one another.
    """
    shard, rows = shard_of(engine), WARM_UP[-1]
    if shard.device.type != "cuda" or any(isinstance(kind, GatedDelta) for kind in shard.kinds):
        return rows
    layer_bytes = max((_row_bytes(engine, layer) for layer in shard.modules), default=0)
    while 2 * rows <= most:
        # Upwards: on a board no allocation fails, but the system kills who takes too much.
        available = available_bytes(shard.device)
        if available is not None and 2 * rows * layer_bytes > available:
            break
        try:
            _pass_of(engine, 2 * rows, max(2 * rows, engine.cache_rows) - 2 * rows)()
        except FlowspecError:  # too little memory
            break
        finally:
            engine.reset()
            release(shard.device)
        rows *= 2
    return rows


def _row_bytes(engine: StageEngine, layer: DecoderLayer) -> int:
    """Return the bytes of a row's activations in a layer, and of its mask."""
    shard = shard_of(engine)
    outputs = _outputs(layer)
    if experts := layer.experts:  # of which a row reads those that it chooses
        outputs -= _outputs(experts) * (len(experts) - shard.config.num_experts_per_tok) // len(experts)
    return (outputs + 3 * shard.hidden_size + engine.cache_rows) * shard.dtype.itemsize


def _outputs(module: torch.nn.Module) -> int:
    return sum(part.out_features for part in module.modules() if isinstance(part, (torch.nn.Linear, QuantLinear)))


@torch.inference_mode()
def choose_products(engine: StageEngine, clock: Clock = time.perf_counter) -> str:
    """Measure from how many rows on products of int4 weights are faster with expanded weights, and set that number.

    Call it after :func:`warm_up`; it concerns CUDA alone. Returns a line for the log, or "". After any failure the
    kernel computes all rows.
    """
    linears = [module for layer in shard_of(engine).modules for module in _products(layer)
               if isinstance(module, CudaLinear)]
    return choose_expanded(linears, clock) if linears else ""


@torch.inference_mode()
def choose_expanded(linears: Sequence[CudaLinear], clock: Clock = time.perf_counter) -> str:
    """Return the same for some matrices, of which the largest is measured."""
    try:
        linears = [linear for linear in linears if linear.knows_layout]
        if not linears:
            return "int4 weights stay: their layout on this GPU is not the one that is known"
        largest = max(linears, key=lambda linear: linear.out_features * linear.in_features)
        first, times = expanding_pays(largest, clock)
    except Exception as error:  # of PyTorch, the compiler of kernels, the driver
        return f"int4 weights stay: they cannot be expanded: {first_line(error)}"
    for linear in linears:
        linear.expands_from = first
    measured = ", ".join(f"{rows} rows take {kernel:.1f} ms by the kernel, {expanded:.1f} expanded"
                         for rows, (kernel, expanded) in times.items())
    return f"int4 weights are expanded from {first} rows on: {measured}" if first else f"int4 weights stay: {measured}"


def expanding_pays(linear: GroupedLinear, clock: Clock) -> tuple[int | None, dict[int, tuple[float, float]]]:
    """Return the least of ``EXPANDED`` rows from which on expanding is clearly faster, None: never.

    And milliseconds with the kernel and with expanded weights, medians, by rows.
    """
    device = linear.get_buffer("scales_zeros").device
    times: dict[int, tuple[float, float]] = {}
    for rows in EXPANDED:
        x = torch.ones(rows, linear.in_features, dtype=linear.dtype, device=device)
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(_TURNS + 1):
            for index, product in enumerate((linear.product, linear.expanded_product)):
                start = clock()
                to_host([product(x)[:1]])
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if turn:
                    seconds[index].append(clock() - start)
        times[rows] = (1e3 * median(seconds[0]), 1e3 * median(seconds[1]))
    slower = [rows for rows, (kernel, expanded) in times.items() if expanded > _CLEARLY * kernel]
    return min((rows for rows in EXPANDED if rows > max(slower, default=0)), default=None), times


def _products(layer: torch.nn.Module) -> list[GroupedLinear]:
    return [module for module in layer.modules() if isinstance(module, GroupedLinear)]


@torch.inference_mode()
def choose_graphs(engine: StageEngine, record: Recorder, clock: Clock = time.perf_counter) -> KernelChoice:
    """Choose for ``RECORDED`` rows whether the layers run as graphs.

    After :func:`warm_up`, before the first session.
    """
    shard = shard_of(engine)
    if not shard.modules:
        return KernelChoice(reason="there are no layers to record")

    def prepare(rows: int, graphs: LayerGraphs, recorded: bool, turn: int) -> Callable[[], bytes]:
        engine.graphs = {rows: graphs} if recorded else {}
        return _pass_of(engine, rows, _TEXT + turn)  # so that no pass has the results of the one before

    engine.graphs, choice = choose("layers", RECORDED, lambda rows: record_layers(shard, rows, record), prepare, clock)
    engine.reset()
    return choice


def record_layers(shard: Shard, rows: int, record: Recorder) -> LayerGraphs:
    """Record a shard's layers for ``rows`` rows."""
    hidden = torch.zeros(rows, shard.hidden_size, dtype=shard.dtype, device=shard.device)
    slots = torch.zeros(rows, dtype=torch.int64, device=shard.device)
    rotations = {turn: shard.rotary(slots, turn, shard.dtype) for turn in dict.fromkeys(shard.turns)}
    return LayerGraphs(shard.modules, shard.turns, hidden, rotations, record)


def _pass_of(engine: StageEngine, rows: int, text: int) -> Callable[[], bytes]:
    """Return a function that computes a pass in a new session, and returns the results' bytes.

    The pass has ``rows`` uncommitted rows behind ``text`` rows of zeros.
    """
    engine.reset()
    engine.open(Open(session=0, epoch=0, capacity=text + rows, tentative=rows))
    cache = engine.cache_of(0)
    assert cache is not None
    cache.fill(text)
    segment = engine.admit(_chain(engine, text, rows))
    assert segment is not None

    def run() -> bytes:
        [(_, result, *_)] = engine.compute([segment])
        return b"" if result.hidden is None else result.hidden.array.tobytes()

    return run


def _chain(engine: StageEngine, first: int, rows: int) -> Segment:
    """Tokens or hidden states that depend on ``first``, the number of rows before them."""
    shard, numbers = shard_of(engine), _numbers(first, rows)
    embeds = shard.embed is not None
    states = (first + torch.arange(rows * shard.hidden_size)).view(rows, -1).sin().to(shard.dtype)
    return Segment(
        session=0, epoch=0, run=0, first=first, stop=first + rows, numbers=numbers, positions=numbers,
        base=first, bits=np.packbits(np.tri(rows, dtype=np.uint8), axis=1, bitorder="little"),
        tokens=numbers % shard.config.vocab_size if embeds else None,
        hidden=None if embeds else from_torch(states), committed=_numbers(0, first), text=rows > WARM_UP[-1])


def _numbers(first: int, count: int) -> Int32:
    return np.arange(first, first + count, dtype=np.int32)

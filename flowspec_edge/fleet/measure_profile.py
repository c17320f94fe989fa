"""A device's profile, measured on the machine it runs on.

Knows which figure comes from where, and how those that cannot be measured here are estimated.  Does
not know files or terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from flowspec_edge import torchdevice
from flowspec_edge.config import (
    Conditions,
    DraftCost,
    Host,
    Link,
    LmHeadCost,
    Memory,
    ModelShape,
    Profile,
    StageCurve,
)
from flowspec_edge.fleet.board import Board, read_board
from flowspec_edge.fleet.linktest import LinkMeasure, measure_link
from flowspec_edge.fleet.measure_d0 import (
    STRATEGIES,
    DraftDeviceTimes,
    MadeUpTarget,
    MeasuredDevice0,
    Target,
    measure_device0,
)
from flowspec_edge.fleet.measure_fit import deviations, fit_stage, rounded
from flowspec_edge.fleet.measure_link import Hop, measure_hop
from flowspec_edge.fleet.measure_memory import Room, read_gpu, read_rate, room, used_mb
from flowspec_edge.fleet.measure_stage import (
    CAPACITY_BEYOND,
    CONTEXTS,
    Case,
    StageProcess,
    choose_cuts,
    sample,
)
from flowspec_edge.fleet.measure_worker import MeasuredWorker
from flowspec_edge.fleet.memory import ModelBytes, model_bytes
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.runtime.workerconfig import Dtype
from flowspec_edge.tensors import parse_dtype
from flowspec_edge.text import Tokenizer
from flowspec_edge.transport.zmq_links import ZmqTransport

Report = Callable[[str, float], None]  # what is being measured, and the share of it that is done

_TEXT = '''def read_lines(path):
    """Return the lines of a text file without their ends."""
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\\n") for line in file]


def count_words(lines):
    """Count how often each word occurs."""
    counts = {}
    for line in lines:
'''
_MOST_PROMPT = 128
_WHOLE_SHARE = 0.4  # of the usable memory, for a target in D0's process
_LM_SHARE = 6  # the target is so many times as large as a draft model that is not there
_SPD_LAYERS = 2
_TREE_ROWS = 10  # of a pass that expands a level of a tree
_PEER_S = 1.0


@dataclass(frozen=True)
class Effort:
    """How much is done: contexts that are tried, seconds for the stages, requests and their tokens."""

    contexts: tuple[int, ...] = CONTEXTS
    stage_s: float = 30.0
    requests: int = 5
    new_tokens: int = 64
    exchanges: int = 300


QUICK = Effort(contexts=(64, 512), stage_s=2.0, requests=2, new_tokens=32, exchanges=80)


@dataclass(frozen=True)
class Wish:
    """What to measure; ``threads`` 0 leaves torch its own number, ``peer`` is (host, port)."""

    name: str
    model: ModelDir
    dtype: Dtype
    device: str
    threads: int
    peer: tuple[str, int] | None
    date: str


@dataclass(frozen=True)
class Measurement:
    """A profile, and how well its curve fits the times that were measured, case by case."""

    profile: Profile
    deviations: list[float]  # fitted / measured - 1


def measure_profile(wish: Wish, effort: Effort, report: Report) -> Measurement:
    """Measure this machine; takes one to two minutes, or what ``effort`` says.

    UsageError for a device that is not there, FlowspecError if memory does not suffice, a process
    is lost, or the peer does not answer.
    """
    torchdevice.require(wish.device)
    peer = None
    if wish.peer:  # first: whoever forgot to start it should not wait
        report("link", 0.0)
        peer = measure_link(*wish.peer, _PEER_S)
    if wish.threads:
        torch.set_num_threads(wish.threads)
    model = model_bytes(str(wish.model.path), wish.dtype)
    free = room(read_board(), read_gpu(wish.device))
    report("memory", 0.0)
    rate = read_rate(wish.device, free.usable_mb)
    report("loopback", 0.0)
    hop = measure_hop(model.hidden_width, wish.dtype, effort.exchanges)
    stages, process_mb = _stages(wish, effort, model, free, report)
    # Of a round trip two hops are not the stage's, nor is our own part in the codec's work.
    own = {case: max(0.01 * ms, ms - 2 * hop.latency_ms - hop.codec_ms) for case, ms in stages.items()}
    curve = fit_stage(own)
    times = _device0(wish, effort, model, free, report)
    board = read_board()  # again: warm by now
    draft, made_up = _draft_cost(times, curve, model)
    link = Link(mbps=rounded(peer.mbps if peer else hop.mbps),
                latency_ms=rounded(peer.latency_ms if peer else hop.latency_ms))
    profile = Profile(
        name=wish.name, kind="device", provenance="measured", summary=_summary(wish, board),
        source=_source(stages, times, made_up, peer, hop, wish),
        model=ModelShape(layers=model.layers, hidden_width=model.hidden_width,
                         bytes_per_value=model.bytes_per_value, layer_mb=rounded(model.layer / 1e6)),
        stage=curve, draft=draft, link=link,
        lm_head=LmHeadCost(ms=rounded(times.lm_head), row_ms=rounded(times.row)),
        host=Host(bookkeeping_ms=rounded(times.bookkeeping)),
        memory=Memory(total_mb=float(round(free.total_mb)), usable_mb=float(round(free.usable_mb)),
                      process_mb=float(round(process_mb)), gb_per_s=rounded(rate)),
        conditions=_conditions(wish, board))
    return Measurement(profile, deviations(curve, own).tolist())


def _stages(wish: Wish, effort: Effort, model: ModelBytes, free: Room, report: Report
            ) -> tuple[dict[Case, float], float]:
    """Milliseconds of round trips, and what a worker takes beside weights and cache, in MB."""
    report("stages", 0.0)
    limit = wish.model.max_positions - CAPACITY_BEYOND
    contexts = [c for c in effort.contexts if c <= limit] or [max(1, min(limit, effort.contexts[0]))]
    before = used_mb(read_board(), read_gpu(wish.device))
    with ExitStack() as undo:
        transport = ZmqTransport()
        undo.callback(transport.close)
        stages = [StageProcess(transport, undo, wish.model.target, cut, wish.dtype, wish.device, wish.threads)
                  for cut in choose_cuts(model, free.usable_mb)]
        for stage in stages:
            stage.worker.ready()
        times = sample(stages, contexts, effort.stage_s, lambda share: report("stages", share))
        layer = model.layer + model.kv_row * (contexts[-1] + CAPACITY_BEYOND)
        kept = sum(model.embedding + stage.layers * layer for stage in stages) / 1e6
        if wish.device == "cpu":  # what the processes say of themselves is not disturbed by others
            taken = sum(stage.worker.resident_mb() or 0.0 for stage in stages) - kept
        else:
            taken = used_mb(read_board(), read_gpu(wish.device)) - before - kept
    return {case: seconds * 1e3 for case, seconds in times.items()}, max(1.0, taken / len(stages))


def _device0(wish: Wish, effort: Effort, model: ModelBytes, free: Room, report: Report) -> DraftDeviceTimes:
    report("draft device", 0.0)
    whole = model.target_weights + model.d0_weights <= free.usable_mb * 1e6 * _WHOLE_SHARE
    kinds = [kind for kind in STRATEGIES if wish.model.draft(kind)]
    new_tokens = min(effort.new_tokens, max(2, wish.model.max_positions // 2))
    prompt = Tokenizer(wish.model).encode(_TEXT)[:max(1, min(_MOST_PROMPT, wish.model.max_positions // 2))]
    with ExitStack() as undo:
        target: Target = MadeUpTarget(model.hidden_width, parse_dtype(wish.dtype))
        if whole:
            transport = ZmqTransport()
            undo.callback(transport.close)
            target = worker = MeasuredWorker(transport, undo, wish.model.target, 1, wish.dtype, wish.device,
                                             wish.threads)
            worker.ready()
        device0 = MeasuredDevice0(wish.model.path, wish.dtype, wish.device, kinds, target)
        return measure_device0(device0, kinds, prompt, new_tokens, effort.requests, whole,
                               lambda share: report("draft device", share))


def _draft_cost(times: DraftDeviceTimes, curve: StageCurve, model: ModelBytes) -> tuple[DraftCost, list[str]]:
    """The passes; and which of them are estimates, from the time that the target's bytes take."""
    def layers(count: float, rows: int) -> float:
        return count * curve.milliseconds(rows) + times.lm_head + times.row * rows

    estimates = {
        "eagle2": layers(model.draft / model.layer, _TREE_ROWS),
        "lm": layers(model.layers / _LM_SHARE, 1),
        "spd": layers(_SPD_LAYERS, _TREE_ROWS),
    }
    ms = {kind: rounded(times.passes.get(kind, estimate)) for kind, estimate in estimates.items()}
    return (DraftCost(pass_ms=ms["eagle2"], lm_pass_ms=ms["lm"], spd_pass_ms=ms["spd"],
                      row_ms=rounded(times.node)),
            [kind for kind in estimates if kind not in times.passes])


def _summary(wish: Wish, board: Board) -> str:
    parts = [board.title or "an unnamed machine", f"{wish.model.name} in {wish.dtype} on {wish.device}"]
    if wish.threads:
        parts.append(f"{wish.threads} thread{'s' if wish.threads > 1 else ''}")
    return "; ".join(parts)


def _source(stages: Mapping[Case, float], times: DraftDeviceTimes, made_up: Sequence[str],
            peer: LinkMeasure | None, hop: Hop, wish: Wish) -> str:
    """What was done, in the words of a profile's ``source``."""
    layers = " and ".join(str(n) for n in sorted({case.layers for case in stages}))
    contexts = ", ".join(str(n) for n in sorted({case.context for case in stages}))
    words = {"eagle2": "EAGLE head", "lm": "small draft model", "spd": "SPD's module"}
    text = ["Measured by flowspec device profile.  The curve is the least-squares fit of round trips "
            f"of segments to workers of {layers} layers over {contexts} cached tokens, less two hops."]
    if len({case.layers for case in stages}) == 1:
        text.append("With one number of layers, what every segment costs is in the layers' time.")
    text.append("D0's figures are those of real requests to a worker with the whole target: all that D0 is "
                "awake for."
                if times.whole else
                "The target does not fit beside the draft models: D0's figures are those of requests with "
                "hidden states by chance.")
    if made_up:
        text.append(f"The model has no {' and no '.join(words[kind] for kind in made_up)}: that pass is "
                    "an estimate, the bytes of a module of the usual size (a layer and its input matrix; a "
                    "sixth of the target; two layers) at the target's pace, and lm_head.")
    text.append("Every time is a mean without the longest tenth.")
    text.append("The link is that to the peer." if peer else
                "The link is this machine's loopback, not a network.")
    if peer:
        text.append(f"(Between two processes here a hop takes {hop.latency_ms:.3g} ms.)")
    return "  ".join(text)


def _conditions(wish: Wish, board: Board) -> Conditions:
    known: dict[str, Any] = {} if board.temperature_c is None else {"temperature_c": board.temperature_c}
    peer = f"{wish.peer[0]}:{wish.peer[1]}" if wish.peer else "loopback"
    return Conditions(
        date=wish.date, machine=board.title, model=wish.model.name, dtype=wish.dtype, device=_device(wish),
        threads=torch.get_num_threads(), power_mode=board.power_mode, clocks_mhz=board.clocks_mhz, peer=peer,
        **known)


def _device(wish: Wish) -> str:
    if wish.device == "cpu":
        return wish.device
    return f"{wish.device}: {torch.cuda.get_device_name(wish.device)}"

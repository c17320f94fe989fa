"""Measures the profile of the device that this process runs on, and estimates what cannot be measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowspec_edge.boards.gpu_check.gpu_facts import launch_us
from flowspec_edge.boards.links.linktest import LinkMeasure, measure_link
from flowspec_edge.boards.measurement.draft_device import (
    DraftDeviceTimes,
    MeasuredDraftDevice,
    measure_draft_device,
    measured_kinds,
)
from flowspec_edge.boards.measurement.fit import SegmentCase, fit_stage, relative_errors, rounded
from flowspec_edge.boards.measurement.kernels import measure_int4
from flowspec_edge.boards.measurement.link import LoopbackHop, measure_hop
from flowspec_edge.boards.measurement.memory import DeviceMemory, device_memory, read_gpu, read_rate, used_mb
from flowspec_edge.boards.measurement.stage import (
    CAPACITY_BEYOND,
    CONTEXTS,
    MeasuredStage,
    MeasuredWorker,
    choose_stage_counts,
    sample,
)
from flowspec_edge.boards.planning.model_size import ModelBytes, model_bytes
from flowspec_edge.boards.probe.board import BoardInfo, read_board
from flowspec_edge.device_profile import (
    GRAPH_LAYER_LAUNCHES,
    OUTPUT_LAUNCHES,
    SEGMENT_LAUNCHES,
    SPARSE_GRAPH_LAYER_LAUNCHES,
    Conditions,
    DraftCost,
    HostCost,
    LaunchCost,
    LinkCost,
    LmHeadCost,
    Memory,
    ModelShape,
    Profile,
    StageCurve,
    pass_titles,
)
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, timed_kinds
from flowspec_edge.model.manifest import ComputeDtype
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.transport.zmq_links import ZmqTransport
from flowspec_edge.util import torchdevice

ProgressCallback = Callable[[str, float], None]  # (what is measured, share done)

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
_TARGET_SHARE = 0.4  # of the usable memory, for the whole target next to D0's models
_LM_SHARE = 6  # assumed ratio of the target's size to a missing draft model's
_TREE_ROWS = 10  # rows of a pass that expands a level of a tree
_PEER_S = 1.0


@dataclass(frozen=True)
class Effort:
    """The extent of a measurement; ``stage_s``: seconds for the stages."""

    contexts: tuple[int, ...] = CONTEXTS
    stage_s: float = 30.0
    requests: int = 5
    new_tokens: int = 64
    exchanges: int = 300
    kernels: bool = True  # whether products with int4 weights are timed


QUICK = Effort(contexts=(64, 512), stage_s=2.0, requests=2, new_tokens=32, exchanges=80, kernels=False)


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure; ``threads`` 0 keeps torch's default; ``peer`` is (host, port)."""

    name: str
    model: OpenModel
    dtype: ComputeDtype
    device: str
    threads: int
    peer: tuple[str, int] | None
    date: str


@dataclass(frozen=True)
class MeasuredProfile:
    profile: Profile
    relative_errors: list[float]  # fitted / measured - 1


def measure_profile(options: ProfileOptions, effort: Effort, report: ProgressCallback) -> MeasuredProfile:
    """Measure a profile of this device, which takes one to two minutes with the default ``effort``.

    Raise UsageError for a missing device.  Raise FlowspecError if memory is short, a process ends, or the peer fails.
    """
    torchdevice.require(options.device)
    peer = None
    if options.peer:  # first, so that a peer that does not answer fails at once
        report("link", 0.0)
        peer = measure_link(*options.peer, _PEER_S)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = model_bytes(str(options.model.path), options.dtype)
    free = device_memory(read_board(), read_gpu(options.device))
    report("memory", 0.0)
    rate = read_rate(options.device, free.usable_mb)
    report("loopback", 0.0)
    hop = measure_hop(model.hidden_width, options.dtype, effort.exchanges)
    stages, process_mb, graphs = _stages(options, effort, model, free, report)
    launch = None if options.device == "cpu" else LaunchCost(
        us=rounded(launch_us(options.device)),
        layer=model.layer_launches if not graphs else SPARSE_GRAPH_LAYER_LAUNCHES if model.experts
        else GRAPH_LAYER_LAUNCHES, experts=model.experts or None, chosen=model.experts_per_token or None)
    # A round trip includes two hops and this process's codec work, which are not the stage's, and the
    # launches that virtual time charges beside the stage's curve.
    stage_times = {case: max(0.01 * ms, ms - 2 * hop.latency_ms - hop.codec_ms) for case, ms in stages.items()}
    if launch:
        stage_times = {case: launch.without(ms, SEGMENT_LAUNCHES) for case, ms in stage_times.items()}
    curve = fit_stage(stage_times)
    int4 = measure_int4(options.device, options.dtype) if effort.kernels else None
    times = _draft_device(options, effort, model, free, report)
    if launch:
        launch = launch.model_copy(update={"pass_graphs": times.graphs})
        times = replace(times, lm_head=launch.without(times.lm_head, OUTPUT_LAUNCHES),
                        passes={kind: launch.without(ms, launch.per_pass(kind)[1])
                                for kind, ms in times.passes.items()})
    board = read_board()  # again: temperature and clocks under load
    draft, estimated = _draft_cost(times, curve, model)
    link = LinkCost(mbps=rounded(peer.mbps if peer else hop.mbps),
                latency_ms=rounded(peer.latency_ms if peer else hop.latency_ms))
    profile = Profile(
        name=options.name, kind="device", provenance="measured", summary=_summary(options, board),
        source=_source(stages, times, estimated, peer, hop, launch),
        model=ModelShape(layers=model.layers, hidden_width=model.hidden_width,
                         bytes_per_value=model.bytes_per_value, layer_mb=rounded(model.layer / 1e6)),
        stage=curve, draft=draft, link=link, int4=int4, launch=launch,
        lm_head=LmHeadCost(ms=rounded(times.lm_head), row_ms=rounded(times.row)),
        host=HostCost(bookkeeping_ms=rounded(times.bookkeeping)),
        memory=Memory(total_mb=float(round(free.total_mb)), usable_mb=float(round(free.usable_mb)),
                      process_mb=float(round(process_mb)), gb_per_s=rounded(rate)),
        conditions=_conditions(options, board))
    return MeasuredProfile(profile, relative_errors(curve, stage_times).tolist())


def _stages(options: ProfileOptions, effort: Effort, model: ModelBytes, free: DeviceMemory,
            report: ProgressCallback) -> tuple[dict[SegmentCase, float], float, bool]:
    """Measure stages with different numbers of layers.

    Return round trips in milliseconds, a worker's memory besides weights and cache in MB, and whether all stages
    run their layers as CUDA graphs.
    """
    report("stages", 0.0)
    limit = options.model.max_positions - CAPACITY_BEYOND
    contexts = [c for c in effort.contexts if c <= limit] or [max(1, min(limit, effort.contexts[0]))]
    before = used_mb(read_board(), read_gpu(options.device))
    with ExitStack() as cleanup:
        transport = ZmqTransport()
        cleanup.callback(transport.close)
        stages = [MeasuredStage(transport, cleanup, options.model.target, count, options.dtype,
                                options.device, options.threads)
                  for count in choose_stage_counts(model, free.usable_mb)]
        for stage in stages:
            stage.worker.ready()
        times = sample(stages, contexts, effort.stage_s, lambda share: report("stages", share))
        layer = model.layer + model.kv_row * (contexts[-1] + CAPACITY_BEYOND)
        weights_mb = sum(stage.layers * layer for stage in stages) / 1e6
        if options.device == "cpu":  # resident sets are independent of other processes
            process_mb = sum(stage.worker.resident_mb() or 0.0 for stage in stages) - weights_mb
        else:
            process_mb = used_mb(read_board(), read_gpu(options.device)) - before - weights_mb
        graphs = all(stage.worker.runs_graphs for stage in stages)
    return {case: seconds * 1e3 for case, seconds in times.items()}, max(1.0, process_mb / len(stages)), graphs


def _draft_device(options: ProfileOptions, effort: Effort, model: ModelBytes, free: DeviceMemory,
                  report: ProgressCallback) -> DraftDeviceTimes:
    report("draft device", 0.0)
    real_target = model.target_weights + model.d0_weights <= free.usable_mb * 1e6 * _TARGET_SHARE
    kinds = [kind.name for kind in measured_kinds() if options.model.draft(kind.name)]
    half = options.model.max_positions // 2
    new_tokens = min(effort.new_tokens, max(2, half))
    prompt = Tokenizer(options.model).encode(_TEXT)[:max(1, min(_MOST_PROMPT, half))]
    stages = 1 if real_target else model.layers  # of which the first is measured: a single layer
    with ExitStack() as cleanup:
        transport = ZmqTransport()
        cleanup.callback(transport.close)
        target = MeasuredWorker(transport, cleanup, options.model.target, stages, options.dtype,
                                options.device, options.threads)
        target.ready()
        device = MeasuredDraftDevice(options.model.path, options.dtype, options.device, target)
        return measure_draft_device(device, kinds, prompt, new_tokens, effort.requests, real_target,
                                    lambda share: report("draft device", share))


def _draft_cost(times: DraftDeviceTimes, curve: StageCurve, model: ModelBytes) -> tuple[DraftCost, list[str]]:
    def layers(count: float, rows: int) -> float:
        return count * curve.milliseconds(rows) + times.lm_head + times.row * rows

    estimates = {
        "pass_ms": layers(model.draft / model.layer, _TREE_ROWS),
        "lm_pass_ms": layers(model.layers / _LM_SHARE, 1),
        **{kind.charged_as: layers(kind.layers, _TREE_ROWS) for kind in timed_kinds()},
    }
    measured = {DRAFT_KINDS[kind].charged_as: ms for kind, ms in times.passes.items()}
    costs = {name: rounded(ms) for name, ms in (estimates | measured).items()}
    return (DraftCost.model_validate({**costs, "row_ms": rounded(times.node)}),
            [name for name in estimates if name not in measured])


def _summary(options: ProfileOptions, board: BoardInfo) -> str:
    parts = [board.title or "an unnamed machine",
             f"{options.model.name} in {options.dtype} on {options.device}"]
    if options.threads:
        parts.append(f"{options.threads} thread{'s' if options.threads > 1 else ''}")
    return "; ".join(parts)


def _source(stages: Mapping[SegmentCase, float], times: DraftDeviceTimes, estimated: Sequence[str],
            peer: LinkMeasure | None, hop: LoopbackHop, launch: LaunchCost | None) -> str:
    layers = " and ".join(str(n) for n in sorted({case.layers for case in stages}))
    contexts = ", ".join(str(n) for n in sorted({case.context for case in stages}))
    text = ["Measured by flowspec device profile.  The curve is the least-squares fit of round trips "
            f"of segments to workers of {layers} layers over {contexts} cached tokens, less two hops."]
    if len({case.layers for case in stages}) == 1:
        text.append("With a single number of layers, the overhead of a segment is part of the layers' time.")
    text.append("D0's figures come from real requests to a worker with the whole target and include all the "
                "time that D0 is awake."
                if times.real_target else
                "The target does not fit beside the draft models: D0's figures come from real requests to a "
                "worker with its first layer alone, whose states stand in for the last one's.")
    if estimated:
        titles, kinds = pass_titles(), "".join(f"; {kind.layers} layers" for kind in timed_kinds())
        text.append(f"The model has no {' and no '.join(titles[name] for name in estimated)}: that pass is "
                    "an estimate, the bytes of a module of the usual size (a layer and its input matrix; a "
                    f"sixth of the target{kinds}) at the target's rate, plus lm_head.")
    if launch:
        text.append("The price of a launch is that of an in-place addition from Python; the launches that "
                    "are charged by it are not in the other times.")
    text.append("Every time is a mean without the longest tenth.")
    text.append("The link is that to the peer." if peer else
                "The link is this machine's loopback, not a network.")
    if peer:
        text.append(f"(Between two processes here a hop takes {hop.latency_ms:.3g} ms.)")
    return "  ".join(text)


def _conditions(options: ProfileOptions, board: BoardInfo) -> Conditions:
    temperature: dict[str, Any] = {} if board.temperature_c is None else {"temperature_c": board.temperature_c}
    device = options.device
    if device != "cpu":
        device += f": {torch.cuda.get_device_name(device)}"
    return Conditions(
        date=options.date, machine=board.title, model=options.model.name, dtype=options.dtype, device=device,
        threads=torch.get_num_threads(), power_mode=board.power_mode, clocks_mhz=board.clocks_mhz,
        peer=f"{options.peer[0]}:{options.peer[1]}" if options.peer else "loopback", **temperature)

"""Loads a worker's part of the model; importing this module imports transformers, which takes seconds."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from flowspec_edge.d0.capacity import tentative_rows
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.lab.emulation.collectives import EmulatedGroup, GroupCharge
from flowspec_edge.lab.emulation.durations import Charge, Emulation, stage_charge
from flowspec_edge.messages import Hello
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.preparation import choose_graphs, warm_up
from flowspec_edge.stage.shard import Shard, load_shard
from flowspec_edge.stage.tensor_parallel.engine import TensorEngine
from flowspec_edge.stage.tensor_parallel.process_group import GlooGroup, ProcessGroup
from flowspec_edge.stage.tensor_parallel.shard import load_tensor_shard
from flowspec_edge.strategies.params import Params
from flowspec_edge.util.graphs import CudaRecorder
from flowspec_edge.util.torchdevice import make_current

log = logging.getLogger(__name__)


def load_engine(config: WorkerConfig, emulation: Emulation | None
                ) -> tuple[StageEngine, Hello, Charge | None]:
    """Return the engine with the stage's shard and the memory of its caches, warmed up on CUDA, the Hello
    that describes it, and the emulated time of its passes."""
    if config.threads:
        torch.set_num_threads(config.threads)
    make_current(config.device)
    rank, stages = config.stage - 1, config.stages
    weights = OpenModel(Path(config.model))
    charge: Charge | None = (
        stage_charge(emulation.devices, config.parallelism, config.stage) if emulation else None)
    shard: Shard
    if config.parallelism == "pipeline":
        shard = load_shard(weights, rank, stages, config.dtype, config.device)
        engine = StageEngine(shard, config.cache_rows, config.requests, tentative_rows(Params(), stages))
        if shard.device.type == "cuda":
            warm_up(engine)
            log.info("V%d: %s", config.stage, choose_graphs(engine, CudaRecorder(shard.device)))
    else:
        group: ProcessGroup = GlooGroup(rank, stages, config.group, config.interface, config.group_within_s)
        if emulation and emulation.links == "real":
            profile = emulation.devices.stages[rank]
            wide = group = EmulatedGroup(group, profile, weights.layers)
            charge = GroupCharge(wide, profile, overlaps=config.parallelism == "galaxy")
        rank_shard = load_tensor_shard(weights.target, config.parallelism, group, config.dtype, config.device)
        shard, engine = rank_shard, TensorEngine(rank_shard, group, config.cache_rows)
    return engine, Hello(config.instance, config.stage, stages, shard.layers, shard.digest), charge

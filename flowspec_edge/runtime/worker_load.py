"""What a worker computes with: its part of the model, in the engine that its configuration wants.

Knows which engine goes with which way of sharing the model, and what an emulation puts round it.
Imports torch and transformers, which take seconds: a worker imports this when its configuration has
been found right, a nursery before it forks.
"""

from __future__ import annotations

from pathlib import Path

import torch

from flowspec_edge.messages import Hello
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.runtime.emulated_group import EmulatedGroup, GroupCharge
from flowspec_edge.runtime.emulation import Charge, EmulatedEngine, Emulation, charge_of
from flowspec_edge.runtime.engine import Engine
from flowspec_edge.runtime.workerconfig import WorkerConfig
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import Shard, load_config, load_shard
from flowspec_edge.stage.tensor_engine import TensorEngine
from flowspec_edge.stage.tensor_group import GlooGroup, Group
from flowspec_edge.stage.tensor_shard import load_tensor_shard
from flowspec_edge.stage.warmup import warm_up


def load_engine(config: WorkerConfig, emulation: Emulation | None) -> tuple[Engine, Hello]:
    """Load the shard: the engine that runs it, and how the stage introduces itself.  On CUDA a pipeline's
    stage is warm by then."""
    if config.threads:
        torch.set_num_threads(config.threads)
    rank, stages = config.stage - 1, config.stages
    weights = ModelDir(Path(config.model)).stages
    charge: Charge | None = (
        charge_of(emulation.devices, config.parallelism, config.stage) if emulation else None)
    shard: Shard
    engine: Engine
    if config.parallelism == "pipeline":
        shard = load_shard(weights, rank, stages, config.dtype, config.device)
        if shard.device.type == "cuda":
            warm_up(shard)
        engine = StageEngine(shard)
    else:
        group: Group = GlooGroup(rank, stages, config.group, config.interface, config.group_within_s)
        if emulation and emulation.links == "real":
            profile = emulation.devices.stages[rank]
            wide = group = EmulatedGroup(group, profile, load_config(weights).num_hidden_layers)
            charge = GroupCharge(wide, profile, overlaps=config.parallelism == "galaxy")
        rank_shard = load_tensor_shard(weights, config.parallelism, group, config.dtype, config.device)
        shard, engine = rank_shard, TensorEngine(rank_shard, group)
    if emulation and charge:
        engine = EmulatedEngine(engine, charge, emulation.devices.layers[rank],
                                breaks_off=not config.tensor_parallel)
    return engine, Hello(config.instance, config.stage, stages, shard.layers, shard.digest)

"""Loads a worker's part of the model; importing this module imports torch, which takes seconds."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from flowspec_edge.d0.capacity import tentative_rows
from flowspec_edge.d0.prompt_chunks import MOST
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.messages import Hello
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.preparation import choose_graphs, choose_products, try_prompt_rows, warm_up
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.strategies.params import Params
from flowspec_edge.util.graphs import CudaRecorder
from flowspec_edge.util.torchdevice import make_current

log = logging.getLogger(__name__)


def load_engine(config: WorkerConfig) -> tuple[StageEngine, Hello]:
    """Load the stage's engine, and return it with the Hello that describes it.

    The engine has the stage's shard and the memory of its caches, and is warmed up on CUDA.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    make_current(config.device)
    shard = load_shard(OpenModel(Path(config.model)), config.stage - 1, config.stages, config.dtype,
                       config.device)
    each = tentative_rows(Params(), config.stages)
    engine = StageEngine(shard, config.cache_rows, config.requests, each)
    if shard.device.type == "cuda":
        warm_up(engine)
        if products := choose_products(engine):
            log.info("V%d: %s", config.stage, products)
        log.info("V%d: %s", config.stage, choose_graphs(engine, CudaRecorder(shard.device)))
    text = config.cache_rows - config.requests * each if config.cache_rows else MOST
    rows = try_prompt_rows(engine, min(text, MOST))
    return engine, Hello(config.instance, config.stage, config.stages, shard.layers, shard.digest, rows=rows)

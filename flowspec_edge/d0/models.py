"""D0's models: lm_head, and draft models that are loaded on first use."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch

from flowspec_edge.d0.draft_sessions import DraftSessions
from flowspec_edge.d0.lm_head import LmHead
from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.load import SharedMemory, load_drafters, needs_embedding
from flowspec_edge.messages import Tap
from flowspec_edge.model.candidates import candidates_for
from flowspec_edge.model.opened import OpenModel, opened
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.layers.kinds import layer_kinds
from flowspec_edge.stage.output_head import load_output_head
from flowspec_edge.stage.quant.schemes import quantise_linears
from flowspec_edge.stage.shard import find_embedding, stage_ranges
from flowspec_edge.stage.weights.load import draft_scheme_of
from flowspec_edge.strategies.params import Params
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest
from flowspec_edge.util.graphs import CudaRecorder, Recorder
from flowspec_edge.util.tensors import from_torch
from flowspec_edge.util.torchdevice import allocation, make_current, use_exact_kernels

log = logging.getLogger(__name__)

_TIMED_PASSES = 6
_MEMORY_ADVICE = "end other programs, take a smaller draft model, or let D0 compute on the CPU (torch_device)"


class DraftModels(DraftSessions):
    def __init__(self, model: OpenModel | Path, dtype: str = "fp32", device: torch.device | str = "cpu",
                 slow: Callable[[], AbstractContextManager[None]] = nullcontext, cache_rows: int = 0,
                 record: Recorder | None = None, loaded: Callable[[int], None] = lambda sizes: None) -> None:
        """Take a model for D0; draft models are loaded when requests first name them.

        device      torch device for lm_head and the draft models; the tree stays on the CPU
        slow        entered while a draft model is loaded and makes its first passes
        cache_rows  on CUDA: rows for a draft model's caches, of all sessions, which are allocated when it is
                    loaded; 0: each session's grow
        record      records draft passes over them; None: as CUDA graphs
        loaded      called when a draft model has been loaded, with the number of its ``graph_sizes``

        ``kinds``: of the layers on the stages.
        """
        self._slow = slow
        self._rows, self._record, self._loaded = cache_rows, record, loaded
        self.graph_sizes: dict[str, int] = {}  # numbers of rows for which passes are graphs, by kind
        use_exact_kernels()
        make_current(device)
        self._model = opened(model)
        self._dtype = dtype
        self._scheme = draft_scheme_of(self._model)
        # Compares every file of a sharded model: those of draft models, which are loaded later, too.
        with allocation("lm_head on the draft device", 0, _MEMORY_ADVICE):
            self._lm_head = LmHead(load_output_head(self._model, dtype, device))
        # Refuses a model that stages cannot run.
        self.kinds = layer_kinds(self._model.decoder)
        super().__init__(self._lm_head, self._model, self._model.max_positions)
        count = self._model.manifest.candidates if self._model.manifest else 0
        self._candidates = candidates_for(count, self._lm_head.vocabulary, self._lm_head.hidden_size)
        self._drafters: dict[str, Callable[[], Drafter]] = {}
        if self._lm_head.head.device.type == "cuda":
            self._lm_head.warm_up()

    def depths(self, stages: int) -> tuple[int, ...]:
        return tuple(hi for _, hi in stage_ranges(self._model, stages, allow_empty=True))

    def pass_seconds(self, kind: str) -> float:
        """Measure a pass over one row on this machine: the fastest of a few."""
        drafter = self._drafter(kind, Params())
        with self._slow():
            drafter.reset(Sampling(), "draft", 1.0)
            head = self._lm_head.head
            state = torch.zeros(1, head.hidden_size, dtype=head.dtype, device=head.device)
            for layer in drafter.taps:
                drafter.tap(Tap(0, 0, 0, layer, np.zeros(1, np.int32), from_torch(state)))
            drafter.commit([0], None)
            drafter.commit([0], state, [0])
            request = DraftRequest(0, (DraftNode(0, -1, 0, 1),), 1)
            seconds = []
            for child in range(1, _TIMED_PASSES + 1):
                start = time.perf_counter()
                drafter.expand(request)
                seconds.append(time.perf_counter() - start)
                request = DraftRequest(0, (DraftNode(child, child - 1, 0, child + 1),), 1)
            return min(seconds[1:])  # the first one reads the text

    def drafter(self, kind: str) -> Drafter:
        if kind not in self._drafters:
            with self._slow(), allocation(f"the draft model {kind}", 0, _MEMORY_ADVICE):
                head = self._lm_head.head
                embedding = (find_embedding(self._model, self._dtype, head.device)
                             if needs_embedding(kind, self._model) else None)
                in_4_bits = (partial(quantise_linears, scheme=self._scheme, device=head.device)
                             if self._scheme else lambda module: None)
                memory = self._shared_memory()
                self._drafters[kind] = load_drafters(kind, self._model, head, embedding, self._dtype,
                                                     self._model.layers, in_4_bits, memory, self._candidates)
            if memory and memory.choice:
                log.info("D0, %s: %s", kind, memory.choice)
                self.graph_sizes[kind] = len(memory.choice.ms)
            self._loaded(self.graph_sizes.get(kind, 0))
        return self._drafters[kind]()

    def _shared_memory(self) -> SharedMemory | None:
        device = self._lm_head.head.device
        if not self._rows or (device.type != "cuda" and self._record is None):
            return None
        return SharedMemory(self._rows, self._record or CudaRecorder(device))

"""The draft device's models: lm_head, the drafter, and the making of a coordinator.

Knows what lies in a model directory on D0.  Does not know where the stages are or how time runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.load import load_drafters
from flowspec_edge.drafting.merged import MergedDrafter
from flowspec_edge.drafting.ngram import NgramDrafter
from flowspec_edge.errors import UsageError
from flowspec_edge.manifest import DRAFT
from flowspec_edge.messages import Tap
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.runtime.coordinator import Coordinator
from flowspec_edge.runtime.lm_head import LmHead
from flowspec_edge.runtime.prefixes import Reuse
from flowspec_edge.runtime.request import Request
from flowspec_edge.sampling import Sampling
from flowspec_edge.stage.memory import claim
from flowspec_edge.stage.shard import find_embedding, load_config, load_lm_head, part_of, stage_ranges
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import draft_kind, strategy_class
from flowspec_edge.tensors import from_torch
from flowspec_edge.torchdevice import use_exact_kernels
from flowspec_edge.tree.requests import DraftNode, DraftRequest

_TIMED_PASSES = 6
_NEED_LESS = "end other programs, take a smaller draft model, or let D0 compute on the CPU (torch_device)"


class DraftDevice:
    """What D0 holds for all requests; a draft model is loaded when a strategy first wants it."""

    def __init__(self, model_dir: Path, dtype: str = "fp32", device: torch.device | str = "cpu") -> None:
        """``device`` computes: it holds lm_head and the draft models; the tree stays on the CPU."""
        use_exact_kernels()
        self._model = ModelDir(model_dir)
        self._dtype = dtype
        part_of(model_dir, DRAFT)  # of a sharded model every file is checked
        with claim("lm_head on the draft device", 0, _NEED_LESS):
            self._lm_head = LmHead(load_lm_head(self._model.target, dtype, device))
        load_config(self._model.target)  # refuses what stages cannot run
        self._limit = self._model.max_positions
        self._drafters: dict[str, Callable[[], Drafter]] = {}

    def drafts_alike(self, one: Request, other: Request) -> bool:
        """Whether a drafter that answered one of them knows how to draft for the other; UsageError when
        one cannot be run on this model."""
        return self._drafts(one) == self._drafts(other)

    def _drafts(self, request: Request) -> tuple[object, ...]:
        params = request.params
        kind = draft_kind(strategy_class(request.strategy), params, self._model)
        looks_up = kind == "ngram" or (kind is not None and params.ngram)
        return (kind, looks_up, *((params.ngram_max, params.ngram_min) if looks_up else ()))

    def coordinator(self, request: Request, stages: int, clock: Callable[[], float], session: int,
                    passes: Callable[[str], float], slot: Callable[[int], float] | None = None,
                    epoch: int = 0, before: Coordinator | None = None, reuse: Reuse | None = None
                    ) -> Coordinator:
        """D0's side of one request; UsageError when it cannot be run on this model.

        ``passes`` says how many passes of a kind of draft model fit into a full segment's way
        through the pipeline and back, ``slot`` what a segment of so many rows takes in the slowest stage
        and over a link, if that is known; ``before`` is the request's coordinator that lost its stages,
        ``reuse`` what to begin with if there is none, of a request that drafted alike.
        """
        chosen = strategy_class(request.strategy)
        length = len(request.prompt) + request.max_new_tokens
        if length > self._limit:
            raise UsageError(
                f"the prompt has {len(request.prompt)} tokens and {request.max_new_tokens} more are "
                f"asked for, but the model stops at {self._limit}; shorten the prompt or lower "
                "--max-new-tokens"
            )
        vocabulary = self._lm_head.vocabulary
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise UsageError(f"the prompt has a token id outside the vocabulary of {vocabulary}")
        kind = draft_kind(chosen, request.params, self._model)
        drafter = reuse.prefix.drafter if reuse else None
        ranking = request.sampling, request.params.rank, request.params.tau
        if reuse and drafter and not drafter.rewind(reuse.rows + 1, *ranking):
            reuse = drafter = None
        if kind and drafter is None:
            drafter = self._drafter(kind, request.params)
        kept, after = (reuse.rows, reuse.prefix.session) if reuse else (0, -1)
        depths = tuple(hi for _, hi in stage_ranges(self._model.stages, stages, allow_empty=True))
        pipeline = Pipeline(stages, depths, passes(kind) if kind else 1.0, slot)
        return Coordinator(request, lambda ledger: chosen(request.params, ledger, pipeline), drafter,
                           self._lm_head, clock, session, epoch, before=before, kept=kept, after=after)

    def pass_seconds(self, kind: str) -> float:
        """How long a pass over one row takes here: the fastest of a few."""
        drafter = self._drafter(kind, Params())
        drafter.reset(Sampling(), "draft", 1.0)
        state = self._lm_head.weight.new_zeros(1, self._lm_head.weight.shape[1])
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
        return min(seconds[1:])  # the first one takes in the text

    def _drafter(self, kind: str, params: Params) -> Drafter:
        """A drafter of this kind for one request, with the look-up that ``params`` ask for; the weights
        are loaded once."""
        looked_up = NgramDrafter(params.ngram_max, params.ngram_min)
        if kind == "ngram":
            return looked_up
        if kind not in self._drafters:
            with claim(f"the draft model {kind}", 0, _NEED_LESS):
                embedding = find_embedding(self._model.target, self._dtype, self._lm_head.weight.device)
                self._drafters[kind] = load_drafters(kind, self._model.parts, self._lm_head.weight,
                                                     embedding, self._dtype, self._model.layers)
        drafter = self._drafters[kind]()
        return MergedDrafter(drafter, looked_up) if params.ngram else drafter

"""The draft device's models: lm_head, the drafter, and the making of a coordinator.

Knows what lies in a model directory on D0.  Does not know where the stages are or how time runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.load import load_drafter
from flowspec_edge.errors import UsageError
from flowspec_edge.messages import Payload
from flowspec_edge.runtime.coordinator import Coordinator
from flowspec_edge.runtime.request import Request
from flowspec_edge.stage.shard import load_config, load_embedding, load_lm_head
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.tensors import to_torch


class DraftDevice:
    """What D0 holds for all requests; a drafter is loaded when a strategy first wants it."""

    def __init__(self, model_dir: Path, dtype: str = "fp32") -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._lm_head = load_lm_head(model_dir / "target", dtype)
        self._limit = int(load_config(model_dir / "target").max_position_embeddings)
        self._drafters: dict[str, Drafter] = {}

    def head(self, hidden: Payload) -> NDArray[np.float32]:
        """lm_head: post-norm hidden states [n, H] to logits, float32 [n, V]."""
        with torch.inference_mode():
            rows = to_torch(hidden).to(self._lm_head)
            return (rows @ self._lm_head.mT).float().cpu().numpy()

    def coordinator(self, request: Request, stages: int, clock: Callable[[], float],
                    session: int, epoch: int = 0) -> Coordinator:
        """D0's side of one request; UsageError when it cannot be run on this model."""
        chosen = strategy_class(request.strategy)
        length = len(request.prompt) + request.max_new_tokens
        if length > self._limit:
            raise UsageError(
                f"the prompt has {len(request.prompt)} tokens and {request.max_new_tokens} more are "
                f"asked for, but the model stops at {self._limit}; shorten the prompt or lower "
                "--max-new-tokens"
            )
        vocabulary = self._lm_head.shape[0]
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise UsageError(f"the prompt has a token id outside the vocabulary of {vocabulary}")
        drafter = self._drafter(chosen.drafter) if chosen.drafter else None
        return Coordinator(request, lambda ledger: chosen(request.params, ledger, stages), drafter,
                           self.head, clock, session, epoch)

    def _drafter(self, kind: str) -> Drafter:
        if kind not in self._drafters:
            embedding = load_embedding(self._model_dir / "target", self._dtype)
            self._drafters[kind] = load_drafter(kind, self._model_dir, self._lm_head, embedding, self._dtype)
        return self._drafters[kind]

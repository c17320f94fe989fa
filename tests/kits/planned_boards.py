"""Boards and models of round numbers, for the planner's tests."""

from __future__ import annotations

from typing import Any

from flowspec_edge.boards.inventory import Role
from flowspec_edge.boards.planning.model_size import ModelBytes
from flowspec_edge.boards.planning.planned_draft import PlannedDraft
from flowspec_edge.boards.planning.planner import CandidateBoard, SplitProblem
from flowspec_edge.device_profile import (
    DraftCost,
    LinkCost,
    LmHeadCost,
    Memory,
    ModelShape,
    Profile,
    StageCurve,
)
from flowspec_edge.model.draft_kinds import EAGLE2

MB = 10**6
D0_MB = 180  # what D0's process takes beyond a stage's, in profiles/jetson/process.toml


def profile(layer_ms: float = 6.0, usable_mb: float = 6000, process_mb: float = 500, overhead_ms: float = 0.0,
            mbps: float = 1000, latency_ms: float = 0.2, lm_head_ms: float = 4.0, name: str = "board",
            **shape: Any) -> Profile:
    """A device that takes ``layer_ms`` a layer of up to 64 rows."""
    model = {"layers": 32, "hidden_width": 4096, "bytes_per_value": 2, "layer_mb": 400.0, **shape}
    return Profile(
        name=name, summary="for tests", kind="device", provenance="estimated", source="made up",
        model=ModelShape(**model),
        stage=StageCurve(layers=1, rows=[64, 128], ms=[layer_ms, 2 * layer_ms], overhead_ms=overhead_ms),
        draft=DraftCost(pass_ms=10, lm_pass_ms=30, spd_pass_ms=15), lm_head=LmHeadCost(ms=lm_head_ms),
        link=LinkCost(mbps=mbps, latency_ms=latency_ms),
        memory=Memory(total_mb=2 * usable_mb, usable_mb=usable_mb, process_mb=process_mb))


def board(name: str = "a", role: Role = "auto", **figures: Any) -> CandidateBoard:
    """A board with :func:`profile`'s figures."""
    return CandidateBoard(name, profile(**figures), role)


def size(layers: int = 32, layer_mb: float = 400, embedding_mb: float = 250, draft_mb: float = 800,
         kv_row: int = 16_000, hidden_width: int = 4096) -> ModelBytes:
    """A model in fp16 of so many MB; ``draft_mb``: the head without embeddings; ``embedding_mb``: lm_head."""
    return ModelBytes(
        name="model", dtype="fp16", layers=layers, hidden_width=hidden_width, vocabulary=32_000,
        max_positions=4096, layer=round(layer_mb * MB),
        layer_values=round(layer_mb * MB) // 2,
        norm=2 * hidden_width, lm_head=round(embedding_mb * MB),
        draft=round(draft_mb * MB), draft_lm_head=round(embedding_mb * MB),
        head_bits="16bit", kv_cache="16bit",
        kv_row=kv_row, draft_kv_row=kv_row, from_weights=False,
        planned=PlannedDraft(EAGLE2, "here"))


def problem(of: ModelBytes | None = None, context: int = 2048, tentative: int = 1024,
            rows: int = 16) -> SplitProblem:
    """A segment of 16 rows on a model of 7B, unless said otherwise."""
    return SplitProblem(of or size(), context, tentative, rows)

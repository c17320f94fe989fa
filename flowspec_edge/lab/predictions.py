"""Predicts the tokens/s of a plan and of one board alone, in virtual time.

The tokens come from a real model and its draft model, or from a recording of what they said; a prediction holds for
models of equal acceptance rate.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from statistics import fmean
from threading import Thread

from flowspec_edge.boards.planning.one_board import SingleBoardEstimate, plain_tokens_per_second, rate_text
from flowspec_edge.boards.planning.planned_draft import charged_as
from flowspec_edge.boards.planning.planner import CandidateBoard, PipelinePlan, SplitProblem
from flowspec_edge.boards.planning.scaling import at_context
from flowspec_edge.d0.request import Request, Stats
from flowspec_edge.device_profile import LinkCost, Profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.drivers.virtual.recording import Recording
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.interpreter import guarded_starts

STRATEGIES = ("flowspec_plus", "flowspec", "chunk_pp", "pipedec", "speculative", "autoregressive")
ALONE = ("speculative", "autoregressive")  # in which D0 and V1 never compute at the same time
_NO_LINK = LinkCost(mbps=1e9, latency_ms=0.0)  # D0 and V1 on one board
Advance = Callable[[str], None]  # called before each request with its strategy


class Workers:
    """Processes that simulate over recordings at the same time, with the figures of one.

    They are forked, so that they have the recordings, and import nothing.  Make them before this process starts
    threads.
    """

    def __init__(self, recordings: Sequence[Recording], processes: int) -> None:
        self._recordings = recordings
        self._pool = ProcessPoolExecutor(processes, get_context("fork"), initializer=_begin, initargs=(recordings,))
        with guarded_starts():
            self._pool.submit(int).result()  # starts all of them

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def stats(self, devices: Devices, recording: Recording, right_children: float, requests: Sequence[Request]
              ) -> Iterator[Stats]:
        """Simulate every request by itself.  FlowspecError if a process was killed."""
        index = next(i for i, loaded in enumerate(self._recordings) if loaded is recording)
        pending = [self._pool.submit(_simulate, devices, index, right_children, request) for request in requests]
        try:
            for future in pending:
                yield future.result()
        except BrokenExecutor as error:
            raise FlowspecError("a process that simulates was killed: if memory ran out, end other programs") from error


_worker_recordings: Sequence[Recording] = ()


def _begin(recordings: Sequence[Recording]) -> None:
    global _worker_recordings
    _worker_recordings = recordings
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, which ends these
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process with its parent, since a command that is killed ends no process of its own."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _simulate(devices: Devices, recording: int, right_children: float, request: Request) -> Stats:
    cluster = VirtualCluster(_worker_recordings[recording], len(devices.stages), devices, right_children=right_children)
    return cluster.generate(request).stats


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one strategy on planned boards.

    speedup   over Chunk-PP among the same predictions
    tokens_per_second_calibrated  with a head as fallible as a published one (``VirtualCluster``'s
                                  ``right_children``), if that was run
    by_kind                       tokens/s by kind of text, if the requests are of several kinds
    first_token_s                 until the first token, on average, after prompts of ``prompt_tokens``
    """

    strategy: str
    tokens_per_second: float
    tokens_per_turn: float
    speedup: float | None = None
    tokens_per_second_calibrated: float | None = None
    by_kind: dict[str, float] | None = None
    first_token_s: float | None = None
    prompt_tokens: float | None = None


def predict(plan: PipelinePlan, strategies: Sequence[str], source: Path | Recording, requests: Sequence[Request],
            advance: Advance = lambda _: None, right_children: float = 1.0, kinds: Sequence[str] = (),
            workers: Workers | None = None) -> list[Prediction]:
    """Predict the strategies' figures on the plan's boards, at the plan's context.

    ``source``, a model's directory or a recording, only gives the tokens, with the draft model that the requests
    name; times and bytes are the plan's. ``kinds``: of the requests' texts, or none.
    """
    size, context = plan.problem.size, plan.problem.context
    devices = Devices(
        _drafting(at_context(plan.d0.profile, size, context), plan.problem, requests),
        tuple(at_context(stage.board.profile, size, context) for stage in plan.stages),
        tuple(float(hi - lo) for lo, hi in (stage.layers for stage in plan.stages)), "the plan",
        plan.predicted_prompt_rows)
    return _run(devices, strategies, source, requests, advance, right_children, kinds, workers)


def predict_alone(board: CandidateBoard, problem: SplitProblem, source: Path | Recording,
                  requests: Sequence[Request],
                  advance: Advance = lambda _: None, strategies: Sequence[str] = ALONE,
                  workers: Workers | None = None) -> list[Prediction]:
    scaled = _drafting(at_context(board.profile, problem.size, problem.context), problem, requests)
    devices = single_board(board, scaled, problem)
    return _run(devices, strategies, source, requests, advance, workers=workers)


def single_board(board: CandidateBoard, profile: Profile, problem: SplitProblem) -> Devices:
    """Return a board that is D0 and V1 with all layers, with the times of ``profile``."""
    profile = profile.model_copy(update={"link": _NO_LINK})
    layers = problem.size.layers
    return Devices(profile, (profile,), (float(layers),), board.name,
                   problem.prompt_rows_that_fit(board, layers, drafts=True))


def _drafting(d0: Profile, problem: SplitProblem, requests: Sequence[Request]) -> Profile:
    """Return ``d0`` with the time of what is planned to draft, whatever the requests draft with."""
    return charged_as(d0, problem.size.planned.kind, requests[0].params.draft)


def _run(devices: Devices, strategies: Sequence[str], source: Path | Recording, requests: Sequence[Request],
         advance: Advance, right_children: float = 1.0, kinds: Sequence[str] = (), workers: Workers | None = None
         ) -> list[Prediction]:
    all_requests = [replace(request, strategy=name) for name in strategies for request in requests]
    if workers and isinstance(source, Recording):
        simulated = workers.stats(devices, source, right_children, all_requests)
    else:
        cluster = VirtualCluster(source, len(devices.stages), devices, right_children=right_children)
        simulated = (cluster.generate(request).stats for request in all_requests)
    predictions = []
    for name in strategies:
        stats = []
        for _ in requests:
            advance(name)
            stats.append(next(simulated))
        speeds = [s.tokens_per_second for s in stats if s.tokens_per_second is not None]
        turns = [s.alt for s in stats if s.alt is not None]
        if not (speeds and turns):
            raise FlowspecError(f"{name}: no answer to the plan's prompts has a second token, so none has a "
                                "speed; predict with another model's text")
        predictions.append(Prediction(name, fmean(speeds), fmean(turns), by_kind=_by_kind(stats, kinds),
                                      first_token_s=fmean(s.ttft_s for s in stats),
                                      prompt_tokens=fmean(len(request.prompt) for request in requests)))
    return with_speedup(predictions)


def _by_kind(stats: Sequence[Stats], kinds: Sequence[str]) -> dict[str, float] | None:
    """Mean tokens/s by kind of text, of answers that have a speed; None without kinds."""
    by_kind: dict[str, list[float]] = {}
    for stat, kind in zip(stats, kinds, strict=bool(kinds)):
        if stat.tokens_per_second is not None:
            by_kind.setdefault(kind, []).append(stat.tokens_per_second)
    return {kind: fmean(speeds) for kind, speeds in by_kind.items()} or None


def with_speedup(predictions: Sequence[Prediction]) -> list[Prediction]:
    base = next((p.tokens_per_second for p in predictions if p.strategy == "chunk_pp"), None)
    return [replace(p, speedup=p.tokens_per_second / base if base else None) for p in predictions]


def compare(board: CandidateBoard, problem: SplitProblem, alone: Sequence[Prediction], boards: int,
            pipeline: Sequence[Prediction]) -> SingleBoardEstimate:
    """Compare the best prediction for one board with the best for a pipeline of ``boards`` boards.

    ``pipeline`` is empty if no pipeline fits.
    """
    best = max(alone, key=lambda p: p.tokens_per_second)
    others = max(pipeline, key=lambda p: p.tokens_per_second, default=None)
    enough = others is None or best.tokens_per_second >= others.tokens_per_second
    text = f"{board.name} alone makes {rate_text(best.tokens_per_second, 2)} tokens/s with {best.strategy}"
    if others is not None:
        text += (f", the plan's {boards} boards {rate_text(others.tokens_per_second, 2)} with "
                 f"{others.strategy}")
    return SingleBoardEstimate(
        board.name, f"one board is enough: {text}" if enough else text,
        plain_tokens_per_second(board, problem), best.strategy, best.tokens_per_second, enough)

"""Sampling and ranking at real vocabularies, against PyTorch's own kernels on the same array.

    python -m microbench.sampling [cpu|cuda]

Ratios of the time of ``sampler`` to that of ``torch.log_softmax`` (for ranking with ``topk``), both at their
fastest of many runs; on a CPU with one thread.  By default the noise of the positions is cached, as in
decoding, where draft passes have used it before.  "Cold" means new positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.boards.measurement.memory import seconds_of
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.sampling.sampler import choose, rank_children

VOCABULARIES = (32_000, 151_936)
ROWS, NODES, CHILDREN = 16, 10, 10
SPREADS = (1.0, 3.0, 8.0)  # standard deviations of the logits: uncertain, usual, confident
_TURNS = 25
SAMPLINGS = {
    "greedy": Sampling(),
    "T 1": Sampling(1.0, seed=1),
    "T 1, top-p 0.9": Sampling(1.0, top_p=0.9, seed=1),
    "T 0.7, top-k 20, top-p 0.8": Sampling(0.7, top_k=20, top_p=0.8, seed=1),
}


def fastest(works: dict[str, Callable[[], object]], device: torch.device, turns: int = _TURNS
            ) -> dict[str, float]:
    """Return the milliseconds of each, the fastest of ``turns``.

    The turns are interleaved, so that disturbances affect all alike.
    """
    best = dict.fromkeys(works, float("inf"))
    for _ in range(turns):
        for name, work in works.items():
            best[name] = min(best[name], 1e3 * seconds_of(work, str(device)))
    return best


def choosing(logits: Tensor) -> dict[str, Callable[[], object]]:
    """Return the work to time on target logits [n, V]."""
    positions = np.arange(len(logits))
    ever_new = count(1000, len(logits))
    works: dict[str, Callable[[], object]] = {"log_softmax": lambda: torch.log_softmax(logits, -1)}
    for name, sampling in SAMPLINGS.items():
        works[name] = lambda s=sampling: choose(logits, positions, s)  # type: ignore[misc]
    works["T 1, cold"] = lambda: choose(logits, positions + next(ever_new), SAMPLINGS["T 1"])
    return works


def ranking(logits: Tensor) -> dict[str, Callable[[], object]]:
    """Return the work to time on draft logits [n, V]."""
    positions, sampling = np.arange(len(logits)), SAMPLINGS["T 1"]
    ever_new = count(100_000, len(logits))
    return {
        "log_softmax + topk": lambda: (torch.log_softmax(logits, -1), logits.topk(CHILDREN)),
        "rank, greedy": lambda: rank_children(logits, positions, CHILDREN, Sampling(), "draft"),
        "rank, noise": lambda: rank_children(logits, positions, CHILDREN, sampling, "noise"),
        "rank, noise, cold": lambda: rank_children(logits, positions + next(ever_new), CHILDREN, sampling,
                                                   "noise"),
    }


def main() -> None:
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        for vocabulary in VOCABULARIES:
            for spread in SPREADS:
                logits = spread * torch.randn(ROWS, vocabulary, device=device)
                for works in (choosing(logits), ranking(logits[:NODES])):
                    first, *others = fastest(works, device).items()
                    print(f"V {vocabulary:,}, spread {spread:g}: {first[0]} {first[1]:.2f} ms; "
                          + ", ".join(f"{name} {ms / first[1]:.2f} x" for name, ms in others))


if __name__ == "__main__":
    main()

"""Sampling and ranking at real vocabularies, beside PyTorch's own kernels on the same array.

Each row of the table is a ratio in one run: what ``sampler`` takes over what ``torch.log_softmax`` (for
ranking: and ``topk``) takes, both at their fastest of many turns.  *Warm*: the noise of these positions is
known, as in a running answer, where the draft passes have ranked with it.  *Cold*: every position is
new.  Run it with ``python -m flowspec_edge.bench.micro_sampling [cpu|cuda]``; on a CPU with one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import count

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.sampler import choose, rank_children
from flowspec_edge.sampling import Sampling

VOCABULARIES = (32_000, 151_936)
ROWS, NODES, CHILDREN = 16, 10, 10
SPREADS = (1.0, 3.0, 8.0)  # standard deviations of the logits: flat text, usual text, sure text
_TURNS = 25
SAMPLINGS = {
    "greedy": Sampling(),
    "T 1": Sampling(1.0, seed=1),
    "T 1, top-p 0.9": Sampling(1.0, top_p=0.9, seed=1),
    "T 0.7, top-k 20, top-p 0.8": Sampling(0.7, top_k=20, top_p=0.8, seed=1),
}


def fastest(works: dict[str, Callable[[], object]], device: torch.device, turns: int = _TURNS
            ) -> dict[str, float]:
    """Milliseconds of each, the fastest of ``turns``; they take turns, so that whatever else the machine
    does hits them alike."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(turns):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def choosing(logits: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed over rows of target logits [n, V]."""
    positions = np.arange(len(logits))
    ever_new = count(1000, len(logits))
    works: dict[str, Callable[[], object]] = {"log_softmax": lambda: torch.log_softmax(logits, -1)}
    for name, sampling in SAMPLINGS.items():
        works[name] = lambda s=sampling: choose(logits, positions, s)  # type: ignore[misc]
    works["T 1, cold"] = lambda: choose(logits, positions + next(ever_new), SAMPLINGS["T 1"])
    return works


def ranking(logits: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed over rows of draft logits [n, V]."""
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
    """Print the table."""
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

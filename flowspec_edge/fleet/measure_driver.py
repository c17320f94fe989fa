"""What D0's process takes for an output beside the coordinator's work: sockets, polling, waking up.

Runs plain decoding over a real stage process, and the same steps without one (``measure_d0``), both in
the processor time of D0's thread, which neither waiting nor other processes lengthen.  The difference
is the driver's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from flowspec_edge.fleet.measure_clock import typical
from flowspec_edge.fleet.measure_d0 import MeasuredDevice0
from flowspec_edge.runtime.processes import ProcessCluster
from flowspec_edge.runtime.request import Request

_PLAIN = "autoregressive"
_FEW = 2  # tokens of a request that is all beginning and end


def measure_driver(device0: MeasuredDevice0, model_dir: Path, dtype: str, threads: int, prompt: Sequence[int],
                   new_tokens: int, repeats: int) -> float:
    """Seconds an output.  ``device0`` holds the whole target on the CPU, and so will a child process."""
    if new_tokens <= _FEW:
        return 0.0
    real, alone = [], []
    with ProcessCluster(model_dir, 1, dtype, threads=threads or None) as cluster:

        def spent(tokens: int) -> float:
            start = time.thread_time()
            cluster.generate(Request(prompt, _PLAIN, tokens))
            return time.thread_time() - start

        for repeat in range(repeats + 1):
            taken = (spent(new_tokens) - spent(_FEW)) / (new_tokens - _FEW)
            tally = device0.run(None, prompt, new_tokens, time.thread_time)
            if repeat and tally.books:
                real.append(taken)
                alone.append((sum(tally.books) + sum(tally.own_head)) / len(tally.books))
    return max(0.0, typical(real) - typical(alone)) if real else 0.0

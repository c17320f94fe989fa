"""How many threads torch computes with on a CPU, unless the user says so with OMP_NUM_THREADS or --threads.

The threads of one product wait for one another, and they wait actively. So more threads than cores are slower
than fewer, and the product of a small matrix takes longer with two threads than with one: far longer beside
other work, where each product waits until the system runs all of its threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

# Bytes of a model whose matrices are not worth a second thread.  A model of 540 MB (576 wide, fp32) makes 8.6 tokens/s
# with one thread.  With two it makes 7.7 on two idle cores, and 2.9 if another program is busy.
_SMALL = 6 * 10**8


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def share_of_cores(processes: int, model_bytes: int | None = None) -> int | None:
    """Return the threads for each of ``processes`` that compute at once; None if the user has chosen.

    ``model_bytes``: the size of the model; None for one that may be large.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    if model_bytes is not None and model_bytes < _SMALL:
        return 1
    return max(1, cores() // processes)


@contextmanager
def threads_worth(model_bytes: int) -> Iterator[None]:
    """Let this thread's products within the block use one thread if the model is small, else as many as before."""
    with one_thread() if model_bytes < _SMALL else nullcontext():
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Let this thread's operations within the block use one thread, unless the user has chosen a number."""
    import torch  # imported here: a command's errors need the number of cores, and no torch

    before = torch.get_num_threads()
    if share_of_cores(1) is None or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Counts the kernels that a piece of work launches, by the operations that PyTorch dispatches.

On a small board each launch takes tens of microseconds of CPU time, which dominates short work on its GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that only describe or allocate memory.
FREE = frozenset({
    "view", "_unsafe_view", "_reshape_alias", "expand", "slice", "select", "unsqueeze", "squeeze",
    "transpose", "t", "permute", "as_strided", "detach", "alias", "lift_fresh", "split", "split_with_sizes",
    "unbind", "unfold", "narrow", "diagonal", "empty", "empty_strided", "empty_like", "new_empty",
    "new_empty_strided", "resize_", "_local_scalar_dense"})
# Composed of other operations on a CPU, one kernel on a GPU.
WHOLE = frozenset({torch.ops.aten.scaled_dot_product_attention.default, torch.ops.aten.rms_norm.default})


class Launches(TorchDispatchMode):
    """The launches of a pass; ``counted``: operations that launch a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in WHOLE:
            with self:  # in inference mode composite operations arrive here undecomposed
                if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return result
        if (name := func.overloadpacket.__name__) not in FREE:
            self.counted[name] += 1
        return func(*args, **kwargs)


def launches(work: Callable[[], object]) -> int:
    mode = Launches()
    with mode:
        work()
    return sum(mode.counted.values())


def cuda_launches(work: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                            torch.profiler.ProfilerActivity.CUDA],
                                acc_events=True) as profile:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages()
               if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")))

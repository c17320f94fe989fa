"""How many kernels a piece of work launches, counted by the operations that PyTorch dispatches.

On a small board's CPU each launch costs tens of microseconds, so their number is what a GPU waits for where
little is to be computed.  Counts on any device; on a CPU it is what a GPU would have to launch, but for
operations that are fused on one of them only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that only describe memory, or get some.
FREE = frozenset({
    "view", "_unsafe_view", "_reshape_alias", "expand", "slice", "select", "unsqueeze", "squeeze",
    "transpose", "t", "permute", "as_strided", "detach", "alias", "lift_fresh", "split", "split_with_sizes",
    "unbind", "unfold", "narrow", "diagonal", "empty", "empty_strided", "empty_like", "new_empty",
    "new_empty_strided", "resize_", "_local_scalar_dense"})
# Made of other operations on a CPU, one kernel on a GPU.
WHOLE = frozenset({torch.ops.aten.scaled_dot_product_attention.default, torch.ops.aten.rms_norm.default})


class Launches(TorchDispatchMode):
    """Within it, ``counted`` has the operations that launch a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in WHOLE:
            with self:  # in inference mode what is made of other operations comes here whole
                if (made := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return made
        if (name := func.overloadpacket.__name__) not in FREE:
            self.counted[name] += 1
        return func(*args, **kwargs)


def launches(work: Callable[[], object]) -> int:
    """Of one run of ``work``."""
    with Launches() as mode:
        work()
    return sum(mode.counted.values())


def cuda_launches(work: Callable[[], object]) -> int:
    """Of one run of ``work``, as CUDA's own tracing counts them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                            torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages()
               if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")))

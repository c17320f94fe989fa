"""A strict "cuda" device for a CPU build of PyTorch: device faults, waits, races and launches without a GPU.

A C++ extension (``extension/``) registers a device guard, an allocator and a fallback for the dispatch key
CUDA, which a CPU build leaves empty.  So ``torch.device("cuda")`` works, the package's own
``device.type == "cuda"`` branches run, and every kernel is the CPU's.  As on a GPU, or more strictly,

- an operation that mixes CUDA and CPU tensors raises (numbers and indices excepted),
- fresh memory is NaN, and so is an asynchronous download until its event, stream or device is waited for,
- a change of a pending upload's source, or a second use of a pending download's target, raises "RACE",
- attention and int4's products raise where a stride, layout or dtype is not as their kernels demand,
- launches, copies, waits and allocations are told with the function of the package that caused them.

Not covered: CUDA graphs, bitsandbytes' nf4 and fp4, the kernels' own rounding and speed, memory that runs
out, ``torch.load`` of what was saved on a GPU.  An operation is one launch even where CUDA needs two or three
for it (``topk``).

It has to be there before anything is computed, in child processes too, so it has a pytest of its own:

    .venv/bin/python tests/strictdevice tests/strictdevice/test_device.py    # any arguments of pytest
    make test-strict                                                         # everything that CI runs on it

A test that needs it is marked ``@pytest.mark.strict``, and left out elsewhere:

    from strictdevice import allocations, counting

    with counting(fused_rms=False) as log:    # rms_norm composed, as in PyTorch 2.8; True: one kernel (2.9)
        layer(x.to("cuda"))
    assert log.launches == {"mm": 7, "silu": 1}    # a Counter by operation; .total() is their number
    assert not log.waits                           # events: kind, name, nbytes, place and trail

    with allocations() as made:
        ...
    assert not [event for event in made.events if event.place.startswith("stage/layers/kv_cache.py")]
    assert made.peak < 1 << 20    # bytes; made.kept: by how much the memory in use has grown
"""

from strictdevice.log import WAITS, Allocations, Event, Log, allocations, counting

__all__ = ["WAITS", "Allocations", "Event", "Log", "allocations", "counting", "installed"]


def installed() -> bool:
    from strictdevice import log

    return log.extension is not None

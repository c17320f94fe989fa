"""The profile of a board that was not measured, from its memory and its processor: an estimate.

As in the package's own profiles of Jetsons, times are bytes over the bandwidth that the memory is taken to
reach, and operations over the rate of the processor.  Both are those of slow machines: a board that is faster
than its estimate gets too few layers, one that is slower would hold up all others.
"""

from __future__ import annotations

from pathlib import Path

from flowspec_edge.boards.inventory import DeviceEntry, Inventory, device_profile
from flowspec_edge.device_profile import (
    Conditions,
    DraftCost,
    LinkCost,
    LmHeadCost,
    Memory,
    ModelShape,
    Profile,
    StageCurve,
)
from flowspec_edge.model.draft_kinds import timed_kinds
from flowspec_edge.util.jetson import process_memory

MEASURE = "flowspec device profile --cluster"
_UNKNOWN_MB = 8000.0  # the memory of a board that does not say
_USABLE = 0.7  # of the memory: 5,500 of 7,990 MB on an Orin Nano without a desktop
_GPU = (55.0, 10_000.0)  # GB/s and 10^9 operations a second: an Orin Nano 8 GB at 15 W, the slowest known
_CPU_GB_PER_S = 20.0  # of two cores and more, as measured for the profile cpu-2core
_CORE = (10.0, 20.0)  # GB/s and 10^9 operations a second of one core, without other work
_CPU_SEGMENT_MS = 1.7  # of a segment, whatever its layers, by the same profile
_UNKNOWN_CORES = 1
# Of Llama-2-7B in fp16: MB of a layer, of lm_head, of a draft model with 1.1B parameters; 10^9 operations of a row.
_LAYER, _LM_HEAD, _SMALL, _ROW = 405.0, 262.0, 2200.0, 0.404


def board_profile(inventory: Inventory, device: DeviceEntry, path: Path) -> tuple[Profile, str]:
    """Return the profile that the board's entry in the file ``path`` names, or an estimate.

    The second value says what the estimate rests on, and is "" for a complete profile.

    Raise UsageError if the entry names a profile that does not exist.
    """
    profile = device_profile(device, path)
    if profile and profile.memory:
        return profile, ""
    estimate, basis = estimated(device, inventory.torch_device(device))
    if profile is None:
        return estimate, basis
    return profile.model_copy(update={"memory": estimate.memory}), f"its profile has no [memory]: {basis}"


def is_known(device: DeviceEntry, path: Path) -> bool:
    """Return whether the file says anything of the board's speed or memory."""
    facts = (device.memory_mb, device.cores, device_profile(device, path))
    return any(value is not None for value in facts)


def estimated(device: DeviceEntry, torch_device: str) -> tuple[Profile, str]:
    """Estimate a profile, and say in words what it rests on."""
    on_gpu = torch_device.startswith("cuda")
    cores = device.cores or _UNKNOWN_CORES
    gb_per_s, rate = _GPU if on_gpu else (min(_CPU_GB_PER_S, _CORE[0] * cores), _CORE[1] * cores)
    total = device.memory_mb or _UNKNOWN_MB
    memory = process_memory()
    process = memory.cuda if on_gpu else memory.cpu
    layer = _LAYER / gb_per_s
    bound = max(1.0, layer / (_ROW / rate * 1e3))  # rows up to which the memory is slower
    basis = (f"{'' if device.memory_mb else 'unknown memory taken as '}{total:,.0f} MB, "
             + ("a GPU no faster than an Orin Nano's" if on_gpu else
                f"{'' if device.cores else 'an unknown CPU taken as '}{cores} core{'s' if cores > 1 else ''}"))
    passes = {"pass_ms": _LAYER + _LM_HEAD, "lm_pass_ms": _SMALL,
              **{kind.charged_as: kind.layers * _LAYER + _LM_HEAD for kind in timed_kinds()}}
    profile = Profile(
        name=device.name, kind="device", provenance="estimated", summary=f"ESTIMATED from {basis}",
        source=f"Estimated by flowspec from {basis}: bytes over {gb_per_s:g} GB/s and operations over "
               f"{rate:g} GFLOPS.  Measure it with: {MEASURE}",
        model=ModelShape(layers=32, hidden_width=4096, bytes_per_value=2, layer_mb=_LAYER),
        stage=StageCurve(layers=1, rows=[bound, 2 * bound], ms=[layer, 2 * layer],
                         overhead_ms=0.0 if on_gpu else _CPU_SEGMENT_MS),
        draft=DraftCost.model_validate({name: gigabytes / gb_per_s for name, gigabytes in passes.items()}),
        lm_head=LmHeadCost(ms=_LM_HEAD / gb_per_s), link=LinkCost(mbps=1000, latency_ms=0.2),
        memory=Memory(total_mb=total, usable_mb=_USABLE * total, process_mb=process, gb_per_s=gb_per_s),
        conditions=Conditions(device="cuda" if on_gpu else "cpu"))
    return profile, basis

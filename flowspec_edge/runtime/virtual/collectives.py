"""The cost of tensor parallelism in virtual time: shared compute, and the collectives of each layer.

Every collective is charged as a ring, also gloo's all-reduce: in a step each device sends one tile, an N-th
of the padded rows, to the next one and waits for its own, as in Galaxy's ``stage.tensor_connect``.
"""

from __future__ import annotations

from flowspec_edge.device_profile import Profile
from flowspec_edge.strategies.base import Parallelism

_BLOCKS = 2  # a layer's attention and its MLP


def tile_bytes(profile: Profile, rows: int, devices: int) -> int:
    """Bytes of one tile's hidden states; the rows are padded to a multiple of the devices."""
    return -(-rows // devices) * profile.model.hidden_width * profile.model.bytes_per_value


def rings_of(profile: Profile) -> int:
    """Rings in a pass: each block of a layer begins with one and ends with one."""
    return profile.model.layers * _BLOCKS * 2


def step_seconds(profile: Profile, rows: int, devices: int) -> float:
    """One step of a ring: a tile over the link, and the profile's fixed cost of a step."""
    occupied, latency = profile.link_seconds(tile_bytes(profile, rows, devices))
    return occupied + latency + profile.collective.step_ms * 1e-3


def tensor_seconds(profile: Profile, parallelism: Parallelism, rows: int, devices: int,
                   context: int = 0) -> float:
    """Time of ``rows`` rows through all layers on ``devices``, with ``context`` tokens cached.

    Megatron-LM: two all-reduces per layer, 2 (N - 1) steps each, after the compute. Galaxy: two all-gathers
    and two reduce-scatters per layer, each on N tiles of equal work, with N - 1 steps that overlap with the
    work on a tile; one last all-gather collects the rows.
    """
    layers = profile.model.layers
    compute = profile.stage_seconds(rows, layers, context, devices)
    if devices == 1 or not rows:
        return compute
    step = step_seconds(profile, rows, devices)
    if parallelism == "megatron":
        return compute + layers * _BLOCKS * 2 * (devices - 1) * step
    rings = rings_of(profile)
    tile = compute / (rings * devices)
    return rings * (tile + (devices - 1) * max(step, tile)) + (devices - 1) * step


def tensor_bytes(profile: Profile, parallelism: Parallelism, rows: int, devices: int) -> int:
    """Bytes that all devices together send for ``rows`` rows."""
    if not rows:
        return 0
    ring = devices * (devices - 1) * tile_bytes(profile, rows, devices)
    rings = rings_of(profile) + (parallelism == "galaxy")
    return rings * ring

"""What tensor parallelism costs in virtual time: compute that is shared, rings that are not.

Knows a profile, how often Megatron-LM and Galaxy communicate in a layer, and that every collective
is a ring: in a step each device sends one tile, an N-th of the padded rows, to the next one and
waits for it.  Does not know who is charged, nor how the ranks really run (``stage.tensor_connect``
makes the very steps that are charged here for Galaxy; gloo's all-reduce is charged as a ring).
"""

from __future__ import annotations

from flowspec_edge.config import Profile
from flowspec_edge.strategies.base import Parallelism

_BLOCKS = 2  # a layer's attention and its MLP: each is entered and left once


def tile_bytes(profile: Profile, rows: int, devices: int) -> int:
    """Hidden states of one tile: the rows are padded to a multiple of the devices."""
    return -(-rows // devices) * profile.model.hidden_width * profile.model.bytes_per_value


def rings_of(profile: Profile) -> int:
    """Rings in a pass: each block of a layer is entered with one and left with one."""
    return profile.model.layers * _BLOCKS * 2


def step_seconds(profile: Profile, rows: int, devices: int) -> float:
    """One step of a ring: a tile over the link, and what a collective's step costs beside."""
    occupied, latency = profile.link_seconds(tile_bytes(profile, rows, devices))
    return occupied + latency + profile.collective.step_ms * 1e-3


def tensor_seconds(profile: Profile, parallelism: Parallelism, rows: int, devices: int,
                   context: int = 0) -> float:
    """How long ``devices`` devices together take for ``rows`` rows through all layers, with
    ``context`` tokens in their caches.

    Megatron-LM: two all-reduces a layer, 2 (N - 1) steps each, after the compute.  Galaxy: two
    all-gathers and two reduce-scatters a layer; each works on N tiles, and each of its N - 1 steps
    is hidden behind the work on a tile or the other way round.  All tiles of a layer are taken to be
    equal work.  A last all-gather brings the rows together.
    """
    layers = profile.model.layers
    compute = profile.stage_seconds(rows, layers, context) / devices
    if devices == 1 or not rows:
        return compute
    step = step_seconds(profile, rows, devices)
    if parallelism == "megatron":
        return compute + layers * _BLOCKS * 2 * (devices - 1) * step
    rings = rings_of(profile)
    tile = compute / (rings * devices)
    return rings * (tile + (devices - 1) * max(step, tile)) + (devices - 1) * step


def tensor_bytes(profile: Profile, parallelism: Parallelism, rows: int, devices: int) -> int:
    """What all devices together send for ``rows`` rows."""
    if not rows:
        return 0
    ring = devices * (devices - 1) * tile_bytes(profile, rows, devices)
    rings = rings_of(profile) + (parallelism == "galaxy")
    return rings * ring

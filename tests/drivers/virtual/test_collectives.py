"""The cost of tensor parallelism against a simulation of every device, tile and transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from flowspec_edge.device_profile import CollectiveCost, LinkCost, Profile, load_profile
from flowspec_edge.drivers.virtual.devices import tensor_bytes, tensor_seconds
from flowspec_edge.strategies.base import Parallelism

BASE = load_profile("paper-7b")


def profile(mbps: float, step_ms: float = 3.5, latency_ms: float = 0.2, layers: int = 3) -> Profile:
    """The testbed with another link, and few layers: the simulation is slow."""
    return BASE.model_copy(update={
        "link": LinkCost(mbps=mbps, latency_ms=latency_ms), "collective": CollectiveCost(step_ms=step_ms),
        "model": BASE.model.model_copy(update={"layers": layers})})


@dataclass
class Ring:
    """Devices that each compute one thing and send one tile at a time; times in seconds."""

    profile: Profile
    rows: int
    devices: int
    computing: list[float] = field(init=False)  # when each device has computed what it was given
    sent: int = 0  # bytes

    def __post_init__(self) -> None:
        self.computing = [0.0] * self.devices
        padded = self.rows
        while padded % self.devices:
            padded += 1
        p = self.profile.model
        self.tile = padded // self.devices * p.hidden_width * p.bytes_per_value

    def transfer(self, at: float) -> float:
        """A tile that leaves at ``at`` has been taken in by the next device."""
        self.sent += self.tile
        wire = self.tile * 8 / (self.profile.link.mbps * 1e6)
        return at + wire + (self.profile.link.latency_ms + self.profile.collective.step_ms) / 1e3

    def compute(self, seconds: float) -> None:
        self.computing = [t + seconds for t in self.computing]

    def all_reduce(self) -> None:
        """Each tile's sum goes round once and its result once more; a device sends one tile a step."""
        for _ in range(2 * (self.devices - 1)):
            leaving = list(self.computing)  # a step begins for a device when it has the tile before
            self.computing = [self.transfer(leaving[(d - 1) % self.devices]) for d in range(self.devices)]

    def all_gather(self, tile_seconds: float) -> None:
        """A tile at hand is sent on and worked on at the same time."""
        n = self.devices
        ready = list(self.computing)  # when the tile at hand is here, and the work before it done
        for _ in range(n - 1):
            worked = [t + tile_seconds for t in ready]
            arrived = [self.transfer(ready[(d - 1) % n]) for d in range(n)]
            ready = [max(worked[d], arrived[d]) for d in range(n)]
        self.computing = [t + tile_seconds for t in ready]

    def reduce_scatter(self, tile_seconds: float) -> None:
        """A tile's sum travels while the next device works out its own share of it."""
        n = self.devices
        total = [t + tile_seconds for t in self.computing]  # when the sum so far can leave
        for _ in range(n - 1):
            share = [t + tile_seconds for t in total]
            arrived = [self.transfer(total[(d - 1) % n]) for d in range(n)]
            total = [max(share[d], arrived[d]) for d in range(n)]
        self.computing = total


def simulate(p: Profile, kind: Parallelism, rows: int, devices: int) -> tuple[float, int]:
    """Seconds and bytes of one segment."""
    ring = Ring(p, rows, devices)
    curve = p.stage  # of p.stage.layers layers; linear between its two corners and beyond
    slope = (curve.ms[1] - curve.ms[0]) / (curve.rows[1] - curve.rows[0])
    layer = (curve.ms[0] + max(0.0, rows - curve.rows[0]) * slope) / 1e3 / curve.layers
    for _ in range(p.model.layers):
        for _ in ("attention", "MLP"):
            if kind == "megatron":
                ring.compute(layer / devices / 2)
                ring.all_reduce()
            else:
                ring.all_gather(layer / devices / 4 / devices)
                ring.reduce_scatter(layer / devices / 4 / devices)
    if kind == "galaxy":
        ring.all_gather(0.0)
    return max(ring.computing), ring.sent


@pytest.mark.parametrize("kind", ["megatron", "galaxy"])
@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("mbps", [125.0, 1000.0, 40_000.0])
def test_every_transfer_simulated(kind: Parallelism, devices: int, mbps: float) -> None:
    """Fast links without a step's cost hide behind the compute; slow ones do not."""
    for rows in (1, 2, 16, 81, 128):
        for step_ms, latency_ms in ((3.5, 0.2), (0.0, 0.0)):
            p = profile(mbps, step_ms, latency_ms)
            seconds, sent = simulate(p, kind, rows, devices)
            assert tensor_seconds(p, kind, rows, devices) == pytest.approx(seconds)
            assert tensor_bytes(p, kind, rows, devices) == sent


@pytest.mark.parametrize("kind", ["megatron", "galaxy"])
def test_nothing_costs_nothing(kind: Parallelism) -> None:
    assert tensor_seconds(BASE, kind, 0, 4) == 0.0
    assert tensor_bytes(BASE, kind, 0, 4) == 0
    assert tensor_bytes(BASE, kind, 81, 1) == 0


# Tokens/s by Mbps: FlowSpec paper, figure 5 (Llama-2-7B, MT-bench, T = 0).
PAPER: dict[Parallelism, dict[float, float]] = {
    "megatron": {125: 0.96, 250: 1.59, 500: 2.0, 1000: 2.25},
    "galaxy": {125: 0.79, 250: 1.22, 500: 1.79, 1000: 2.34},
}


def tokens_per_second(kind: Parallelism, mbps: float, step_ms: float) -> float:
    """Rounds of 4.9 tokens: five draft passes, 81 rows over four devices and back, lm_head."""
    p = profile(mbps, step_ms, layers=32)
    back = 81 * 4096 * 2 * 8 / (mbps * 1e6) + 5 * 0.2e-3
    return 4.9 / (5 * p.draft_seconds("eagle2") + tensor_seconds(p, kind, 81, 4) + back + p.lm_head.ms / 1e3)


def test_the_profiles_step_is_the_one_that_fits_the_paper() -> None:
    def misfit(step_ms: float) -> float:
        return sum(math.log(tokens_per_second(kind, mbps, step_ms) / paper) ** 2
                   for kind, row in PAPER.items() for mbps, paper in row.items())

    steps = [0.5 * i for i in range(1, 20)]
    assert min(steps, key=misfit) == BASE.collective.step_ms
    for kind, row in PAPER.items():
        assert tokens_per_second(kind, 1000, BASE.collective.step_ms) == pytest.approx(row[1000], rel=0.02)
        assert tokens_per_second(kind, 125, BASE.collective.step_ms) == pytest.approx(row[125], rel=0.15)

"""Processes on this machine that take the time of a profile's devices: what the cluster is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec_edge.d0.jobs import Job
from flowspec_edge.drivers.processes.addresses import Placement
from flowspec_edge.drivers.processes.spec import Here
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.lab.emulation.durations import Emulation, Links, wait_until
from flowspec_edge.lab.emulation.links import EmulatedTransport
from flowspec_edge.transport.keys import KeyPair

FILE = "emulation.json"  # beside the stages' configurations


@dataclass(frozen=True)
class ProfileEmulator:
    """Emulates a device by a profile; implements ``drivers.processes.emulator.Emulator``."""

    emulation: Emulation
    program: str = __package__

    @property
    def sparse(self) -> bool:
        return self.emulation.devices.sparse

    def prepare(self, directory: Path) -> None:
        self.emulation.save(directory / FILE)

    def transport(self, instances: Sequence[str], pair: KeyPair | None, unencrypted: bool) -> EmulatedTransport:
        return EmulatedTransport(self.emulation, 0, instances, pair, unencrypted)

    def finish(self, job: Job, start: float) -> float:
        return wait_until(start, self.emulation.devices.job_seconds(job))

    def slot_seconds(self, rows: int) -> float:
        return self.emulation.devices.occupied_seconds(rows)

    @property
    def most_prompt_rows(self) -> int:
        return self.emulation.devices.most_prompt_rows

    def prompt_seconds(self, rows: int, context: int, /) -> float:
        return self.emulation.devices.prompt_seconds(rows, context)

    def draft_passes(self, kind: str, rows: int) -> float:
        devices = self.emulation.devices
        return devices.latency_seconds(rows, "pipeline") / max(devices.d0.draft_seconds(kind), 1e-9)


def emulated(devices: Devices, links: Links = "made", network: Placement | None = None) -> Here:
    """Return the place of processes that take the time of ``devices``; arguments as of ``Emulation`` and ``Here``."""
    return Here(network, ProfileEmulator(Emulation(devices, links)))

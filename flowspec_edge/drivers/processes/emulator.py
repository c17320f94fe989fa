"""What a cluster of processes is given to take the time of other devices (``lab.emulation``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from flowspec_edge.d0.jobs import Job
from flowspec_edge.transport.keys import KeyPair
from flowspec_edge.transport.zmq_links import ZmqTransport


class Emulator(Protocol):
    @property
    def program(self) -> str:
        """The package that runs a stage, as ``forkserver.STAGE``."""

    @property
    def sparse(self) -> bool:
        """Whether rows choose experts."""

    def prepare(self, directory: Path) -> None:
        """Write what the stages' processes read, beside their configurations."""

    def transport(self, instances: Sequence[str], pair: KeyPair | None, unencrypted: bool) -> ZmqTransport:
        """Return D0's transport; ``instances``: the stages' identities, V1's first."""

    def finish(self, job: Job, start: float) -> float:
        """Wait until the time of D0's work since ``start`` (time.perf_counter) is over.

        Return by how many seconds it was late.
        """

    def slot_seconds(self, rows: int) -> float:
        """Return a segment's time in the slowest stage, with the link after it."""

    @property
    def most_prompt_rows(self) -> int:
        """Rows of a prompt's segment at most."""

    def prompt_seconds(self, rows: int, context: int, /) -> float:
        """Return the same for a prompt's segment, with ``context`` tokens in the caches."""

    def draft_passes(self, kind: str, rows: int) -> float:
        """Return how many draft passes fit into the time of ``rows`` rows through all stages."""

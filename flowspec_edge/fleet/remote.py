"""Slow links between the boards of a real cluster, and how fast they really are.

Knows which links the pipeline uses, and that all boards are put back as they were.  Does not know
how one board is (``shaping_device``).
"""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.commands import failure
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.fleet.linktest import LinkMeasure
from flowspec_edge.fleet.shaping_device import DeviceShaping
from flowspec_edge.fleet.ssh import python_for, runner_for

_LINKTEST = ["-m", "flowspec_edge.fleet.linktest"]
_PEER_S = 60  # after which a peer that nobody asked ends by itself


@dataclass(frozen=True, slots=True)
class LinkRate:
    """One link of the pipeline, measured, or why it could not be."""

    source: str  # names of devices
    target: str
    measure: LinkMeasure | None
    error: str = ""


class RemoteShaping:
    """The links of a cluster's boards as slow as wanted; a context manager that restores all of them.

    Each board restores itself if nothing is heard for ``restore_after_s`` seconds: a step that takes
    longer has to call :meth:`renew` meanwhile.
    """

    def __init__(self, inventory: Inventory, restore_after_s: int = 300) -> None:
        """Nothing is done yet."""
        self._inventory = inventory
        self._boards = [
            DeviceShaping(runner_for(inventory, device), inventory.interface(device),
                          inventory.protected_ports(), restore_after_s)
            for device in inventory.device]
        self._undo = ExitStack()

    def start(self) -> None:
        """Check every board and arm its dead-man, before any is shaped; FlowspecError names the board."""
        try:
            for board in self._boards:
                board.start()
                self._undo.callback(board.restore)
        except BaseException:
            self.restore()
            raise

    def apply(self, mbps: float | None) -> None:
        """Every board sends at ``mbps`` (10^6 bits a second, Ethernet frames) at most; None: as before."""
        for board in self._boards:
            board.apply(mbps)

    def renew(self) -> None:
        """Put all dead-men off; FlowspecError if one has struck, so that its board is not shaped."""
        for board in self._boards:
            board.renew()

    def measure(self, seconds: float = 1.0) -> list[LinkRate]:
        """Every link of the pipeline in its direction: D0 to V1, V1 to V2, … VN to D0."""
        ring = [self._inventory.draft, *self._inventory.verify, self._inventory.draft]
        return [measure_between(self._inventory, source, target, seconds)
                for source, target in pairwise(ring)]

    def restore(self) -> None:
        """Put every board back as it was; safe to call twice.

        All are tried; then FlowspecError for one that could not be told.  It restores itself.
        """
        self._undo.close()

    def __enter__(self) -> RemoteShaping:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def measure_between(inventory: Inventory, source: DeviceEntry, target: DeviceEntry,
                    seconds: float) -> LinkRate:
    """Measure the link from ``source`` to ``target``; what went wrong is in the answer."""
    try:
        return LinkRate(source.name, target.name, _measured(inventory, source, target, seconds))
    except FlowspecError as error:
        return LinkRate(source.name, target.name, None, str(error))


def _measured(inventory: Inventory, source: DeviceEntry, target: DeviceEntry, seconds: float) -> LinkMeasure:
    port, address = str(inventory.cluster.peer_port), resolve(target)
    far, near = runner_for(inventory, target), runner_for(inventory, source)
    serve = far.command([python_for(inventory, target), *_LINKTEST, "serve", address, port,
                         "--measurements", "1", "--seconds", str(_PEER_S)])
    with subprocess.Popen(serve, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, start_new_session=True) as peer:
        assert peer.stdout is not None
        try:
            if not peer.stdout.readline():  # it says so as soon as it listens
                _, said = peer.communicate()
                raise FlowspecError(f"{far.where}: {failure('linktest', serve, peer.returncode, said)}")
            text = near.run([python_for(inventory, source), *_LINKTEST, "measure", address, port,
                             "--seconds", str(seconds)])
        finally:
            peer.terminate()  # over ssh the far end goes on, but for no longer than it was told
    found = json.loads(text)
    return LinkMeasure(found["latency_ms"], found["mbps"])

"""Shapes and measures the links between the boards of a real cluster."""

from __future__ import annotations

import inspect
import json
import select
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.commands import failure, python_for, runner_for
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.network import tcp_linktest
from flowspec_edge.fleet.network.addresses import network_address
from flowspec_edge.fleet.network.device_shaping import DeviceShaping
from flowspec_edge.fleet.network.linktest import LinkMeasure

_PEER_S = 60  # lifetime of a peer without a measurement
_PLAIN_PEER_S = 20  # the same for a plain TCP peer


@dataclass(frozen=True, slots=True)
class LinkRate:
    source: str  # device names
    target: str
    measure: LinkMeasure | None  # None: it failed
    error: str = ""


class RemoteShaping:
    """Restores all boards on exit; each restores itself after ``restore_after_s`` s without ``renew``."""

    def __init__(self, inventory: Inventory, restore_after_s: int = 300) -> None:
        self._inventory = inventory
        self._boards = [
            DeviceShaping(runner_for(inventory, device), inventory.interface(device),
                          inventory.protected_ports(), restore_after_s)
            for device in inventory.device]
        self._undo = ExitStack()

    def start(self) -> None:
        """Check every board and arm its restore timer before shaping any."""
        try:
            for board in self._boards:
                board.start()
                self._undo.callback(board.restore)
        except BaseException:
            self.restore()
            raise

    def apply(self, mbps: float | None) -> None:
        """Limit every board to ``mbps`` (10^6 bit/s of Ethernet frames); None: unshaped."""
        for board in self._boards:
            board.apply(mbps)

    def renew(self) -> None:
        """Restart all restore timers; FlowspecError if one has expired."""
        for board in self._boards:
            board.renew()

    def measure(self, seconds: float = 1.0) -> list[LinkRate]:
        """Every link of the pipeline: D0 to V1, V1 to V2, … VN to D0."""
        ring = [self._inventory.draft, *self._inventory.verify, self._inventory.draft]
        return [measure_between(self._inventory, source, target, seconds)
                for source, target in pairwise(ring)]

    def restore(self) -> None:
        """Restore every board, then FlowspecError for one that cannot be reached; idempotent."""
        self._undo.close()

    def __enter__(self) -> RemoteShaping:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def measure_between(inventory: Inventory, source: DeviceEntry, target: DeviceEntry,
                    seconds: float, plain: bool = False) -> LinkRate:
    """Over TCP (``tcp_linktest``) if ``plain``, else ZeroMQ (``linktest``); an error is in the result."""
    try:
        return LinkRate(source.name, target.name, _measured(inventory, source, target, seconds, plain))
    except FlowspecError as error:
        return LinkRate(source.name, target.name, None, str(error))


def _measured(inventory: Inventory, source: DeviceEntry, target: DeviceEntry, seconds: float,
              plain: bool) -> LinkMeasure:
    port, address = str(inventory.cluster.peer_port), network_address(inventory, target)
    far, near = runner_for(inventory, target), runner_for(inventory, source)
    program = inspect.getsource(tcp_linktest) if plain else ""

    def end(device: DeviceEntry, what: str, wait_s: float) -> list[str]:
        own = ([inventory.cluster.board_python, "-s", "-"] if plain else
               [python_for(inventory, device), "-m", "flowspec_edge.fleet.network.linktest"])
        return [*own, what, address, port, "--seconds", str(wait_s)]

    serve = far.command([*end(target, "serve", _PLAIN_PEER_S if plain else _PEER_S),
                         *(() if plain else ("--measurements", "1"))])
    with subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, start_new_session=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        try:
            with suppress(BrokenPipeError):  # its stderr has the reason
                peer.stdin.write(program)
                peer.stdin.close()
            if not select.select([peer.stdout], [], [], _PEER_S)[0]:
                raise FlowspecError(f"{far.where}: link test: the board does not begin within {_PEER_S} s: "
                                    "see whether it hangs (uptime, dmesg)")
            if not peer.stdout.readline():  # it prints a line once it listens
                peer.stdin = None  # closed
                _, said = peer.communicate(timeout=_PEER_S)
                raise FlowspecError(f"{far.where}: {failure('link test', serve, peer.returncode, said)}")
            text = near.run(end(source, "measure", seconds), program)
        finally:
            peer.kill()  # over ssh, the remote program runs on until its deadline
    return LinkMeasure(**json.loads(text))

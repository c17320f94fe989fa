"""Measures the link between two boards of a cluster, from one to the other."""

from __future__ import annotations

import inspect
import json
import select
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from flowspec_edge.boards.commands import failure, python_for, runner_for
from flowspec_edge.boards.inventory import DeviceEntry, Inventory
from flowspec_edge.boards.links import tcp_linktest
from flowspec_edge.boards.links.addresses import network_address
from flowspec_edge.boards.links.linktest import LinkMeasure
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.interpreter import module_command

_PEER_S = 60  # lifetime of a peer without a measurement
_PLAIN_PEER_S = 20  # the same for a plain TCP peer


@dataclass(frozen=True, slots=True)
class LinkRate:
    source: str  # device names
    target: str
    measure: LinkMeasure | None  # None: it failed
    error: str = ""


def measure_between(inventory: Inventory, source: DeviceEntry, target: DeviceEntry,
                    seconds: float, plain: bool = False) -> LinkRate:
    """Measure a link over TCP (``tcp_linktest``) if ``plain``, else over ZeroMQ (``linktest``).

    An error is in the result.
    """
    try:
        return LinkRate(source.name, target.name, _measured(inventory, source, target, seconds, plain))
    except FlowspecError as error:
        return LinkRate(source.name, target.name, None, str(error))


def _measured(inventory: Inventory, source: DeviceEntry, target: DeviceEntry, seconds: float,
              plain: bool) -> LinkMeasure:
    port, address = str(inventory.cluster.peer_port), network_address(inventory, target)
    far, near = runner_for(inventory, target), runner_for(inventory, source)
    program = inspect.getsource(tcp_linktest) if plain else ""

    def end(device: DeviceEntry, action: str, wait_s: float) -> list[str]:
        runner = ([inventory.cluster.board_python, "-I", "-"] if plain else
                  module_command("flowspec_edge.boards.links.linktest",
                                      python=python_for(inventory, device)))
        return [*runner, action, address, port, "--seconds", str(wait_s)]

    serve = far.announced([*end(target, "serve", _PLAIN_PEER_S if plain else _PEER_S),
                         *(() if plain else ("--measurements", "1"))])
    with subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, start_new_session=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        try:
            far.await_begin(peer.stdout.fileno())
            with suppress(BrokenPipeError):  # its stderr has the reason
                peer.stdin.write(program)
                peer.stdin.close()
            if not select.select([peer.stdout], [], [], _PEER_S)[0]:
                raise FlowspecError(f"{far.device_name}: link test: the board does not begin within {_PEER_S} s: "
                                    "see whether it hangs (uptime, dmesg)")
            if not peer.stdout.readline():  # it prints a line once it listens
                peer.stdin = None  # closed
                _, errors = peer.communicate(timeout=_PEER_S)
                raise FlowspecError(f"{far.device_name}: {failure('link test', serve, peer.returncode, errors)}")
            text = near.run(end(source, "measure", seconds), program)
        finally:
            peer.kill()  # over ssh, the remote program runs on until its deadline
    return LinkMeasure(**json.loads(text))

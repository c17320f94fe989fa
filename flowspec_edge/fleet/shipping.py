"""Each board its own part of a sharded model: sent over ssh, verified there, never half.

Knows which boards are to have what, and that all are served at once.  Does not know what one of them lacks
(``shipment``), how bytes travel (``shipping_link``, ``shipping_lan``) nor how they lie on a board
(``shipping_store``).

A plain ssh pipe, not rsync: the board hashes what it writes, so that nothing is read twice, and rsync
took 1.5 times as long for a new file.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet import shipping_store
from flowspec_edge.fleet.commands import LocalRunner, Runner
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.places import MODELS, model_dir
from flowspec_edge.fleet.shipment import OnBytes, Shipment
from flowspec_edge.fleet.shipping_link import ShippingLink
from flowspec_edge.fleet.shipping_neighbours import Neighbours, large
from flowspec_edge.fleet.ssh import SshRunner, is_here
from flowspec_edge.manifest import Manifest
from flowspec_edge.modeldir import MANIFEST


@dataclass(frozen=True)
class Shipped:
    """What became of one board.

    parts         that it was to get
    bytes_sent    from here
    bytes_copied  from other boards
    copied_from   their names
    changed       whether a whole file there is other than before
    error         one line, which names the board; "" if its parts are whole
    notes         lines about what went another way than it should, but went
    """

    board: str
    parts: tuple[str, ...]
    bytes_sent: int = 0
    bytes_copied: int = 0
    copied_from: tuple[str, ...] = ()
    changed: bool = False
    error: str = ""
    notes: tuple[str, ...] = ()


def ship(model: Path, boards: Sequence[tuple[DeviceEntry, str]], inventory: Inventory, python: str, *,
         verify: bool = False, progress: OnBytes = lambda board, done, total: None,
         models: str = MODELS) -> list[Shipped]:
    """Bring the manifest and the named parts of ``model`` to the boards, to all at once.

    boards  (board, part); one that is to have several parts is named several times
    python  the interpreter on the boards that has flowspec
    verify  read again what was found right before
    models  where models lie on the boards

    One entry a board, in the order in which they are named first.  What has arrived stays: the next call
    goes on where this one ended, and sends nothing where all is there.  UsageError if ``model`` is not a
    sharded model, or has no such part; what is wrong with a board is in its entry.
    """
    manifest = Manifest.read(model)
    text = (model / MANIFEST).read_text(encoding="utf-8")
    named: dict[str, Shipment] = {}
    for device, part in boards:
        named.setdefault(device.name, Shipment(model, device, inventory, python, models)).add(
            part, manifest.part(part).files)
    shipments = list(named.values())
    devices = {shipment.device.name: shipment.device for shipment in shipments}
    name = model_name(manifest.request)
    wanted = large(file for shipment in shipments for file in shipment.files.values())

    with ThreadPoolExecutor(max(1, len(shipments))) as pool:
        try:
            list(pool.map(lambda shipment: shipment.open(name, verify, wanted), shipments))
            able = [shipment for shipment in shipments if not shipment.error]
            neighbours = Neighbours({shipment.device.name: shipment.held for shipment in able},
                                    {shipment.device.name: large(shipment.missing) for shipment in able})
            list(pool.map(lambda shipment: shipment.fill(neighbours, devices, text, progress), able))
        except BaseException:  # Ctrl-C: the threads wait for the boards, and we for the threads
            for shipment in shipments:
                shipment.end()
            raise
        finally:
            for shipment in shipments:
                shipment.close()
    return [Shipped(shipment.device.name, tuple(shipment.parts), shipment.sent, shipment.copied,
                    tuple(sorted(shipment.sources)), shipment.changed, shipment.error, tuple(shipment.notes))
            for shipment in shipments]


def would_ship(model: Path, boards: Sequence[tuple[DeviceEntry, str]], inventory: Inventory, *,
               models: str = MODELS) -> list[Shipped]:
    """What :func:`ship` would do, by looking: nothing is touched, and nothing of ours has to be there yet.

    ``bytes_sent``: that would come to the board, from wherever.
    """
    manifest = Manifest.read(model)
    parts: dict[str, list[str]] = {}
    devices = {device.name: device for device, _ in boards}
    for device, part in boards:
        parts.setdefault(device.name, []).append(part)

    def one(board: str) -> Shipped:
        files = [(file.path, file.size, file.sha256)
                 for part in parts[board] for file in manifest.part(part).files]
        call = (f"print(json.dumps(lacking(Path({models!r}), {model_name(manifest.request)!r}, "
                f"[File(*file) for file in {files!r}])))")
        device, asked = devices[board], tuple(parts[board])
        try:
            runner: Runner = LocalRunner(board) if is_here(device) else SshRunner(inventory, device)
            count, new = json.loads(runner.run([inventory.cluster.board_python, "-"],
                                               f"{inspect.getsource(shipping_store)}\n{call}\n"))
        except FlowspecError as error:
            return Shipped(board, asked, error=str(error))
        except (ValueError, TypeError):
            return Shipped(board, asked, error=f"{board}: {inventory.cluster.board_python} gave no answer: "
                                               "see whether board_python in the cluster file is a Python")
        return Shipped(board, asked, bytes_sent=count, changed=new)

    with ThreadPoolExecutor(max(1, len(parts))) as pool:
        return list(pool.map(one, parts))


@dataclass(frozen=True)
class Pruned:
    """What became of one board: "MODEL/PART" of each part that went; ``error`` as in :class:`Shipped`."""

    board: str
    removed: tuple[str, ...]
    error: str


def prune(boards: Sequence[tuple[DeviceEntry, Collection[tuple[str, str]]]], inventory: Inventory,
          python: str, *, models: str = MODELS) -> list[Pruned]:
    """Remove those parts of models from the boards that nobody needs.

    boards  (board, what to keep there as (a manifest's request, part))

    One entry a board; ``python`` and ``models`` as of :func:`ship`.
    """
    def one(board: tuple[DeviceEntry, Collection[tuple[str, str]]]) -> Pruned:
        device, keep = board
        try:
            with ShippingLink(inventory, device, python) as link:
                removed = link.ask("prune", root=models, keep=[f"{model_name(request)}/{part}"
                                                               for request, part in keep])["removed"]
        except FlowspecError as error:
            return Pruned(device.name, (), str(error))
        return Pruned(device.name, tuple(removed), "")

    with ThreadPoolExecutor(max(1, len(boards))) as pool:
        return list(pool.map(one, boards))


def model_name(request: str) -> str:
    """A model's directory below the others', by its manifest's request."""
    return Path(model_dir(request)).name

"""Each board its own part of a sharded model: sent over ssh, verified there, never half.

Knows which files a board is to have, what it lacks, and when that is enough.  Does not know how bytes
travel (``shipping_link``) nor how they lie on a board (``shipping_store``).

A plain ssh pipe, not rsync: the board hashes what it writes, so that nothing is read twice, and rsync
took 1.5 times as long for a new file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.places import MODELS, model_dir
from flowspec_edge.fleet.shipping_link import ShippingLink
from flowspec_edge.manifest import Manifest, PartFile, sha256_of
from flowspec_edge.modeldir import MANIFEST

OnBytes = Callable[[str, int, int], None]
"""Called with a board's name, how many bytes it has got in this call, and how many it is to get in all;
from several threads, one a board."""


@dataclass(frozen=True)
class Shipped:
    """What became of one board.

    parts       that it was to get
    bytes_sent  from here
    changed     whether a whole file there is other than before
    error       one line, which names the board; "" if its parts are whole
    """

    board: str
    parts: tuple[str, ...]
    bytes_sent: int
    changed: bool
    error: str


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
    shipments: dict[str, _Shipment] = {}
    for device, part in boards:
        shipments.setdefault(device.name, _Shipment(model, device)).add(part, manifest.part(part).files)

    def one(shipment: _Shipment) -> Shipped:
        error = ""
        try:
            with ShippingLink(inventory, shipment.device, python) as link:
                shipment.run(link, models, manifest.request, text, verify, progress)
        except FlowspecError as failed:
            error = str(failed)
        return Shipped(shipment.device.name, tuple(shipment.parts), shipment.sent, shipment.changed, error)

    with ThreadPoolExecutor(max(1, len(shipments))) as pool:
        try:
            return list(pool.map(one, shipments.values()))
        except BaseException:  # Ctrl-C: the threads wait for the boards, and we for the threads
            for shipment in shipments.values():
                shipment.end()
            raise


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
                removed = link.ask("prune", root=models, keep=[f"{_name(request)}/{part}"
                                                               for request, part in keep])["removed"]
        except FlowspecError as error:
            return Pruned(device.name, (), str(error))
        return Pruned(device.name, tuple(removed), "")

    with ThreadPoolExecutor(max(1, len(boards))) as pool:
        return list(pool.map(one, boards))


class _Shipment:
    """What one board is to get."""

    def __init__(self, model: Path, device: DeviceEntry) -> None:
        self.device = device
        self.parts: list[str] = []
        self.files: dict[str, PartFile] = {}
        self.sent, self.changed, self.error = 0, False, ""
        self._model = model
        self._link: ShippingLink | None = None
        self._ended = False
        self._offsets: dict[str, int] = {}  # of what is missing

    def add(self, part: str, files: Sequence[PartFile]) -> None:
        """This part, too."""
        self.parts.append(part)
        self.files |= {file.path: file for file in files}

    def run(self, link: ShippingLink, models: str, request: str, text: str, verify: bool,
            progress: OnBytes) -> None:
        """All of it; FlowspecError that names the board."""
        self._link = link
        if self._ended:
            link.end()
        self._open(link, models, request, verify)
        self._send(link, progress)
        self.changed |= link.ask("finish", manifest=text)["changed"]

    def end(self) -> None:
        """From another thread: let :meth:`run` fail soon."""
        self._ended = True
        if self._link is not None:
            self._link.end()

    def _open(self, link: ShippingLink, models: str, request: str, verify: bool) -> None:
        answer = link.ask("open", root=models, name=_name(request), verify=verify,
                          files=[[file.path, file.size, file.sha256] for file in self.files.values()])
        self._offsets = answer["missing"]
        self.changed = bool(answer["linked"])
        needed = sum(self.files[path].size - offset for path, offset in self._offsets.items())
        if needed > answer["free"]:
            raise FlowspecError(f"{link.where}: no room in {models}: {_size(needed)} are to be written and "
                                f"{_size(answer['free'])} are free: make room there, and run this again")

    def _send(self, link: ShippingLink, progress: OnBytes) -> None:
        done, total = 0, sum(self.files[path].size - offset for path, offset in self._offsets.items())

        def count(sent: int) -> None:
            nonlocal done
            done += sent
            self.sent += sent
            progress(self.device.name, done, total)

        for path, offset in self._offsets.items():
            file, source = self.files[path], self._model / path
            if link.put(path, source, offset, file.size, count):
                self.changed = True
                continue
            if sha256_of(source) != file.sha256:
                raise FlowspecError(f"{source} has been altered: its sha256 is not the one in {MANIFEST}; "
                                    "shard the model again")
            total += file.size
            # Its beginning, which had been there before, was not what it should have been.
            if not offset or not link.put(path, source, 0, file.size, count):
                raise FlowspecError(f"{link.where}: {path} does not arrive as it was sent: see to the "
                                    "board's disk and memory (dmesg), and run this again")
            self.changed = True


def _name(request: str) -> str:
    """A model's directory, by its manifest's request."""
    return Path(model_dir(request)).name


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"

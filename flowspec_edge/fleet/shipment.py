"""What one board gets of a model, file by file.

Knows what the board lacks, where each file comes from, and what to do when it does not arrive as it
should.  Does not know the other boards but for who has which file (``shipping_neighbours``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.fleet.shipping_link import ShippingLink
from flowspec_edge.fleet.shipping_neighbours import Neighbours
from flowspec_edge.manifest import PartFile, sha256_of
from flowspec_edge.modeldir import MANIFEST

OnBytes = Callable[[str, int, int], None]
"""Called with a board's name, how many bytes it has got in this call, and how many it is to get in all;
from several threads, one a board."""


class Shipment:
    """One board; :meth:`open` and :meth:`fill` in a thread of its own, and what comes of them here.

    error  one line, which names the board; once there is one nothing more is done
    """

    def __init__(self, model: Path, device: DeviceEntry, inventory: Inventory, python: str, models: str
                 ) -> None:
        self.device = device
        self.parts: list[str] = []
        self.files: dict[str, PartFile] = {}
        self.held: list[str] = []
        self.sent, self.copied, self.sources, self.changed = 0, 0, set[str](), False
        self.error, self.notes = "", list[str]()
        self._model, self._models, self._inventory, self._python = model, models, inventory, python
        self._link: ShippingLink | None = None
        self._ended = False
        self._offsets: dict[str, int] = {}  # of what is missing
        self._devices: Mapping[str, DeviceEntry] = {}
        self._progress: OnBytes = lambda board, done, total: None
        self._total = 0

    def add(self, part: str, files: Sequence[PartFile]) -> None:
        """This part, too."""
        self.parts.append(part)
        self.files |= {file.path: file for file in files}

    @property
    def missing(self) -> list[PartFile]:
        """What the board lacks, at least in part."""
        return [self.files[path] for path in self._offsets]

    def open(self, name: str, verify: bool, wanted: Sequence[str]) -> None:
        """Ask the board what it has of the model in its directory ``name``, and which files of ``wanted``."""
        try:
            self._link = link = ShippingLink(self._inventory, self.device, self._python)
            if self._ended:
                link.end()
            answer = link.ask("open", root=self._models, name=name, verify=verify, wanted=wanted,
                              files=[[file.path, file.size, file.sha256] for file in self.files.values()])
            self._offsets, self.held, self.changed = answer["missing"], answer["held"], bool(answer["linked"])
            self._total = sum(file.size - self._offsets[file.path] for file in self.missing)
            if self._total > answer["free"]:
                raise FlowspecError(
                    f"{link.where}: no room in {self._models}: {_size(self._total)} are to be written and "
                    f"{_size(answer['free'])} are free: make room there, and run this again")
        except FlowspecError as error:
            self.error = str(error)

    def fill(self, neighbours: Neighbours, devices: Mapping[str, DeviceEntry], manifest: str,
             progress: OnBytes) -> None:
        """Get everything there, what others wait for first; ``manifest`` at the end.

        ``devices``: the neighbours' entries, by name.
        """
        name, self._devices, self._progress = self.device.name, devices, progress
        assert self._link is not None
        try:
            for file in sorted(self.missing, key=lambda file: neighbours.waits(name, file.sha256)):
                if not self._copied(self._link, neighbours, file):
                    self._put(self._link, file)
                self.changed = True
                neighbours.arrived(name, file.sha256)
            self.changed |= self._link.ask("finish", manifest=manifest)["changed"]
        except FlowspecError as error:
            self.error = str(error)
        finally:
            neighbours.gone(name)

    def end(self) -> None:
        """From another thread: let the others fail soon."""
        self._ended = True
        if self._link is not None:
            self._link.end()

    def close(self) -> None:
        """At the end, whatever has become of it."""
        if self._link is not None:
            self._link.close()

    def _copied(self, link: ShippingLink, neighbours: Neighbours, file: PartFile) -> bool:
        """Whether it came from a neighbour; if there is one and it did not, a note says why."""
        source = neighbours.source(self.device.name, file.sha256)
        if source is None:
            return False
        with neighbours.port(source):
            why = self._fetch(link, source, file)
        if why:
            self.notes.append(f"{link.where}: {file.path} came from here, not from {source}: {why}")
        else:
            self.sources.add(source)
        return not why

    def _fetch(self, link: ShippingLink, source: str, file: PartFile) -> str:
        """Let the board fetch the rest of a file from ``source``; why that failed, "" if it did not."""
        device = self._devices[source]
        done = self._offsets[file.path]
        mine = link.ask("key")["key"]
        # Not root's: it talks to the network, and models are there for all to read.
        with ShippingLink(self._inventory, device, self._python, root=False) as far:
            try:
                address = f"tcp://{resolve(device)}:{self._inventory.cluster.peer_port}"
                theirs = far.ask("serve", root=self._models, sha256=file.sha256, offset=done, address=address,
                                 key=mine)["key"]
            except FlowspecError as error:
                return str(error)
            answer = link.ask("fetch", path=file.path, offset=done, address=address, key=theirs)
            while "whole" not in answer:
                self._count_copied(answer["size"] - done)
                done = answer["size"]
                answer = link.hear()
        if answer["whole"]:
            self._count_copied(file.size - done)
            return ""
        self._offsets[file.path] = answer["size"]
        self._total += done - answer["size"]  # what has come, and has to come again
        return str(answer["why"])

    def _put(self, link: ShippingLink, file: PartFile) -> None:
        source, offset = self._model / file.path, self._offsets[file.path]
        if link.put(file.path, source, offset, file.size, self._count_sent):
            return
        if sha256_of(source) != file.sha256:
            raise FlowspecError(f"{source} has been altered: its sha256 is not the one in {MANIFEST}; "
                                "shard the model again")
        self._total += file.size
        # Its beginning, which had been there before, was not what it should have been.
        if not offset or not link.put(file.path, source, 0, file.size, self._count_sent):
            raise FlowspecError(f"{link.where}: {file.path} does not arrive as it was sent: see to the "
                                "board's disk and memory (dmesg), and run this again")

    def _count_sent(self, count: int) -> None:
        self.sent += count
        self._progress(self.device.name, self.sent + self.copied, self._total)

    def _count_copied(self, count: int) -> None:
        self.copied += count
        self._progress(self.device.name, self.sent + self.copied, self._total)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"

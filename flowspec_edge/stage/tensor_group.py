"""What tensor-parallel ranks send one another while they compute: sums and shifts round a ring.

Knows torch.distributed's gloo process group, and how its failures are told.  Does not know layers,
sessions or who the ranks are.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flowspec_edge.errors import PeerLost, UsageError


class Pending(Protocol):
    """A shift under way."""

    def wait(self) -> Tensor:
        """The tensor of the rank before, once all of it is here and ours has left."""


class Group(Protocol):
    """All ranks of a model; every rank makes the same calls in the same order."""

    rank: int
    size: int

    @property
    def bytes_sent(self) -> int:
        """By this rank; of an all-reduce, what one round a ring takes."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, of one shape and dtype; ``x`` may be overwritten."""

    def shift(self, x: Tensor) -> Pending:
        """Begin to send ``x`` to the next rank and to receive as much from the one before.

        ``x`` must not change until the shift is over.
        """


class GlooGroup:
    """A :class:`Group` over TCP.  The ranks meet at the first call, so that each may load its part
    of the model in its own time; PeerLost when one of them is gone or silent for too long."""

    def __init__(self, rank: int, size: int, rendezvous: str, interface: str = "",
                 within: float = 60.0) -> None:
        """rendezvous  "file:///path", a file that all ranks share and that is not there yet, or
                    "tcp://host:port", where rank 0 will listen; not needed by a rank alone
        interface   network interface to listen on; empty leaves it to gloo
        within      seconds to wait for the other ranks, at the first call and at every other

        UsageError if this build of PyTorch has no gloo.
        """
        if size > 1 and not (dist.is_available() and dist.is_gloo_available()):
            raise UsageError(f"PyTorch {torch.__version__} was built without gloo, which tensor-parallel "
                             "ranks need: install another build, or use a pipeline")
        self.rank = rank
        self.size = size
        self.bytes_sent = 0
        self._rendezvous = rendezvous
        self._interface = interface
        self._within = timedelta(seconds=within)
        self._process_group: Any = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """See :class:`Group`."""
        if self.size == 1:
            return x
        self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size
        mine = x.cpu().contiguous()
        try:
            self._joined().allreduce([mine]).wait()
        except RuntimeError as error:
            raise _lost(self, error) from error
        return mine.to(x.device)

    def shift(self, x: Tensor) -> Pending:
        """See :class:`Group`."""
        outgoing = x.cpu().contiguous()
        incoming = torch.empty_like(outgoing)
        self.bytes_sent += x.nbytes
        try:
            group = self._joined()
            works = (group.send([outgoing], (self.rank + 1) % self.size, 0),
                     group.recv([incoming], (self.rank - 1) % self.size, 0))
        except RuntimeError as error:
            raise _lost(self, error) from error
        return _Shift(self, works, outgoing, incoming, x.device)

    def _joined(self) -> Any:
        """gloo's process group; not torch.distributed's global one, of which a process has one."""
        if self._process_group is None:
            from torch.distributed.rendezvous import rendezvous  # not in builds without gloo

            if self._interface:
                os.environ["GLOO_SOCKET_IFNAME"] = self._interface
            store, _, _ = next(rendezvous(self._rendezvous, self.rank, self.size, timeout=self._within))
            store.set_timeout(self._within)
            self._process_group = dist.ProcessGroupGloo(store, self.rank, self.size, self._within)
        return self._process_group


@dataclass
class _Shift:
    """gloo's two halves of a shift, and the memory they use."""

    group: GlooGroup
    works: tuple[Any, Any]
    outgoing: Tensor
    incoming: Tensor
    device: torch.device

    def wait(self) -> Tensor:
        """See :class:`Pending`."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise _lost(self.group, error) from error
        return self.incoming.to(self.device)


def _lost(group: GlooGroup, error: RuntimeError) -> PeerLost:
    """gloo's complaint, without the source line before it and the advice after it."""
    reason = re.sub(r"^\[[^\]]*\]\s*", "", " ".join(str(error).split())).partition(". ")[0]
    return PeerLost(f"tensor-parallel rank {group.rank + 1} of {group.size} waits for the others in vain: "
                    f"{reason}")

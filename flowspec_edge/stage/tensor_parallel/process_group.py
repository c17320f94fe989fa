"""Collectives between tensor-parallel ranks over torch.distributed's gloo."""

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


class PendingShift(Protocol):
    def wait(self) -> Tensor:
        """The previous rank's tensor, once it is complete and this rank's own has been sent."""


class ProcessGroup(Protocol):
    """All ranks of a model; every rank makes the same calls in the same order."""

    rank: int
    size: int

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank; an all-reduce counts as one over a ring."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, of one shape and dtype; may overwrite ``x``."""

    def shift(self, x: Tensor) -> PendingShift:
        """Start sending ``x``, which must not change, to the next rank and receiving from the previous."""


class GlooGroup:
    """TCP, connected at the first call.  PeerLost when a rank is gone or does not answer in time."""

    def __init__(self, rank: int, size: int, rendezvous: str, interface: str = "",
                 timeout: float = 60.0) -> None:
        """rendezvous  "file:///path", a shared file that does not exist yet, or "tcp://host:port" of rank 0
        interface   network interface to listen on; "": gloo's choice
        timeout     timeout of every call in seconds

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
        self._timeout = timedelta(seconds=timeout)
        self._process_group: Any = None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size
        mine = x.cpu().contiguous()
        try:
            self._connected().allreduce([mine]).wait()  # ends after the group's timeout
        except RuntimeError as error:
            raise _lost(self, error) from error
        return mine.to(x.device)

    def shift(self, x: Tensor) -> PendingShift:
        outgoing = x.cpu().contiguous()
        incoming = torch.empty_like(outgoing)
        self.bytes_sent += x.nbytes
        try:
            group = self._connected()
            works = (group.send([outgoing], (self.rank + 1) % self.size, 0),
                     group.recv([incoming], (self.rank - 1) % self.size, 0))
        except RuntimeError as error:
            raise _lost(self, error) from error
        return _Shift(self, works, outgoing, incoming, x.device)

    def _connected(self) -> Any:
        if self._process_group is None:
            from torch.distributed.rendezvous import rendezvous  # not in builds without gloo

            if self._interface:
                os.environ["GLOO_SOCKET_IFNAME"] = self._interface
            store, _, _ = next(rendezvous(self._rendezvous, self.rank, self.size, timeout=self._timeout))
            store.set_timeout(self._timeout)
            self._process_group = dist.ProcessGroupGloo(store, self.rank, self.size, self._timeout)
        return self._process_group


@dataclass
class _Shift:
    group: GlooGroup
    works: tuple[Any, Any]
    outgoing: Tensor
    incoming: Tensor
    device: torch.device

    def wait(self) -> Tensor:
        try:
            for work in self.works:
                work.wait()  # ends after the group's timeout
        except RuntimeError as error:
            raise _lost(self.group, error) from error
        return self.incoming.to(self.device)


def _lost(group: GlooGroup, error: RuntimeError) -> PeerLost:
    reason = re.sub(r"^\[[^\]]*\]\s*", "", " ".join(str(error).split())).partition(". ")[0]
    return PeerLost(f"tensor-parallel rank {group.rank + 1} of {group.size} got no answer from the other "
                    f"ranks: {reason}")

"""A cluster of boards as something that answers requests: D0 here, the stages over ssh.

Knows that the stages of one run end before those of the next begin.  Does not know how they are
started (``remote_stages``) nor what is asked of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flowspec_edge import torchdevice
from flowspec_edge.fleet.inventory import Inventory
from flowspec_edge.fleet.remote_stages import RemoteStages
from flowspec_edge.runtime.clusters import Clusters, Sharing
from flowspec_edge.runtime.processes import ProcessCluster
from flowspec_edge.runtime.request import OnTokens, Request, Result
from flowspec_edge.runtime.tickets import Ticket
from flowspec_edge.runtime.workerconfig import Dtype
from flowspec_edge.strategies.base import Parallelism

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RemoteClusters(Clusters):
    """Clusters on the boards of an inventory; must run on its draft device."""

    def __init__(self, inventory: Inventory, model_dir: Path, board_model: str, dtype: Dtype = "fp32",
                 before_each: Callable[[], None] = lambda: None, **sharing: Unpack[Sharing]) -> None:
        """Nothing is started yet.  UsageError if the draft device's torch device is not here.

        model_dir    the model here, of which D0 needs the draft models and lm_head
        board_model  the model's directory on the boards
        before_each  called before every request
        sharing      see :class:`Sharing`
        """
        super().__init__()
        self._inventory = inventory
        self._device = inventory.torch_device(inventory.draft)
        torchdevice.require(self._device)
        self._model_dir = model_dir
        self._board_model = board_model
        self._dtype: Dtype = dtype
        self._before_each = before_each
        self._sharing = sharing
        self._stages: RemoteStages | None = None

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        """See :class:`Clusters`."""
        self._before_each()
        return super().generate(request, on_tokens)

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> Ticket:
        """See :class:`Clusters`."""
        self._before_each()
        return super().submit(request, on_tokens)

    def _start(self, parallelism: Parallelism) -> ProcessCluster:
        stages = self._stages = RemoteStages(
            self._inventory, self._board_model, self._dtype, parallelism=parallelism,
            encrypted=parallelism == "pipeline")
        return ProcessCluster(
            self._model_dir, len(self._inventory.verify), self._dtype, parallelism=parallelism,
            device=self._device,
            addresses=stages.addresses, watch=stages.exited, **self._sharing)

    def _end(self) -> None:
        super()._end()
        if self._stages is not None:
            self._stages.close()
            self._stages = None

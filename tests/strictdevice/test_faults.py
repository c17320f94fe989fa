"""Faults that a CPU forgives and a GPU does not, planted in the package; ``test_device`` has the device's own rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from kits.stages import Book, engines, through
from torch import Tensor

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.stage import forward
from flowspec_edge.stage.layers import attention
from flowspec_edge.util.tensors import to_torch

pytestmark = pytest.mark.strict


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    yield
    with suppress(RuntimeError):  # races of the planted fault
        torch.cuda.synchronize()


def test_a_download_that_is_read_before_its_event(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden_states() -> Tensor:
        _, output = through(engines(model, 1, device="cuda"), Book().text(range(1, 17)))
        return to_torch(output.hidden)

    assert hidden_states().isfinite().all()
    monkeypatch.setattr(forward.LaunchPacer, "finish", lambda pacer, keep_going: True)
    assert hidden_states().isnan().all()


def test_a_mask_whose_rows_are_not_aligned(cuda: VirtualCluster, prompt: list[int], monkeypatch: pytest.MonkeyPatch
                                           ) -> None:
    """The kernel refuses it."""
    monkeypatch.setattr(attention, "_ALIGNED", 1)
    with pytest.raises(RuntimeError, match="no multiple of 8 apart"):
        cuda.generate(Request(prompt, "flowspec_plus", 8))

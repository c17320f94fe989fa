"""Faults that a CPU forgives and a GPU does not, planted in the package: the strict device finds each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from kits.stages import Book, engines, through
from torch import Tensor

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import FlowspecError
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage import forward
from flowspec_edge.stage.layers import attention, kinds
from flowspec_edge.util import tensors
from flowspec_edge.util.tensors import to_torch
from strictdevice import allocations

pytestmark = pytest.mark.strict


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    yield
    with suppress(RuntimeError):  # races of the planted fault
        torch.cuda.synchronize()


@pytest.fixture
def request_(prompt: list[int]) -> Request:
    return Request(prompt, "flowspec_plus", 8, Sampling())


def test_an_index_that_stays_on_the_cpu(cuda: VirtualCluster, request_: Request,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "to_device", lambda tensor, device: tensor)
    with pytest.raises((FlowspecError, RuntimeError), match=r"MIXED DEVICES|same device"):
        cuda.generate(request_)


def test_a_download_that_is_read_before_its_event(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden_states() -> Tensor:
        _, output = through(engines(model, 1, device="cuda"), Book().text(range(1, 17)))
        return to_torch(output.hidden)

    assert hidden_states().isfinite().all()
    monkeypatch.setattr(forward.LaunchPacer, "finish", lambda pacer, keep_going: True)
    assert hidden_states().isnan().all()


def test_a_staging_buffer_that_is_used_again(cuda: VirtualCluster, request_: Request,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def through_one_buffer(tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.to(device)
        buffer = buffers.setdefault((tensor.shape, tensor.dtype),
                                    torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
        return buffer.copy_(tensor).to(device, non_blocking=True)

    monkeypatch.setattr(forward, "to_device", through_one_buffer)
    monkeypatch.setattr(tensors, "to_device", through_one_buffer)
    with pytest.raises(RuntimeError, match="RACE: the source of a pending upload was changed"):
        cuda.generate(request_)


def test_a_download_to_a_buffer_in_use(cuda: VirtualCluster, request_: Request,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = torch.empty(1 << 16, pin_memory=True)

    def to_one_buffer(given: Sequence[Tensor]) -> list[Tensor]:
        return [buffer[:t.numel()].view(t.shape).copy_(t, non_blocking=True) for t in given]

    monkeypatch.setattr(forward, "to_host", to_one_buffer)
    with pytest.raises(RuntimeError, match="RACE: the target of a download is in use"):
        cuda.generate(request_)


def test_memory_that_a_request_keeps(cuda: VirtualCluster, request_: Request,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.generate(request_)  # loads the draft model, allocates the KV caches
    with allocations() as plain:
        cuda.generate(request_)
    assert plain.kept <= 0  # less, if it needs less than what went before
    kept: list[Tensor] = []

    def leaking(given: Sequence[Tensor]) -> list[Tensor]:
        kept.extend(torch.empty_like(states) for states in given)
        return to_host(given)

    to_host = tensors.to_host
    monkeypatch.setattr(forward, "to_host", leaking)
    with allocations() as made:
        cuda.generate(request_)
    assert kept
    assert made.kept - plain.kept >= sum(states.nbytes for states in kept)


def test_an_allocation_in_the_life_of_a_request(cuda: VirtualCluster, request_: Request,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is freed again leaves only its event and the peak."""
    made_of = attention.SharedMask
    with allocations() as plain:
        cuda.generate(request_)

    def with_a_large_piece(*arguments: object, **options: object) -> attention.SharedMask:
        torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
        return made_of(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kinds, "SharedMask", with_a_large_piece)
    with allocations() as made:
        cuda.generate(request_)
    assert plain.peak < 1 << 24 <= made.peak
    large = [event for event in made.events if event.nbytes == 1 << 24]
    assert {event.place for event in large} == {"stage/layers/kinds.py:shared_mask"}


def test_a_mask_whose_rows_are_not_aligned(cuda: VirtualCluster, request_: Request,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses it."""
    monkeypatch.setattr(attention, "_ALIGNED", 1)
    with pytest.raises(RuntimeError, match="no multiple of 8 apart"):
        cuda.generate(request_)

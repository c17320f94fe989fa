"""The strict device is strict: what a GPU refuses, or answers with garbage, shows here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from strictdevice import allocations, counting

pytestmark = pytest.mark.strict


def on_device(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype).to("cuda")


def pinned(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float16, pin_memory=True)


@pytest.mark.parametrize("work", [
    lambda x: x + torch.ones(16, 64, dtype=torch.float16),
    lambda x: x @ torch.ones(64, 8, dtype=torch.float16),
    lambda x: x.index_select(0, torch.tensor([1, 2])),
    lambda x: functional.rms_norm(x, (64,), torch.ones(64, dtype=torch.float16)),
    lambda x: functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None],
                                                      torch.zeros(16, 16, dtype=torch.float16)),
])
def test_mixed_devices_raise(work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"MIXED DEVICES|same device"):
        work(on_device(16, 64))


def test_numbers_of_the_cpu_are_taken() -> None:
    x = on_device(16, 64)
    assert torch.equal((x * torch.tensor(2.0)).cpu(), x.cpu() * 2)


def test_fresh_memory_holds_nothing() -> None:
    assert torch.empty(3, device="cuda").isnan().all()
    assert torch.empty(3, pin_memory=True).isnan().all()


def test_a_download_is_there_once_its_event_has_been_waited_for() -> None:
    x, target, event = on_device(16, 64), pinned(16, 64), torch.cuda.Event()
    target.copy_(x, non_blocking=True)
    event.record()
    assert target.isnan().all()
    event.synchronize()
    assert torch.equal(target, x.cpu())


def test_an_event_covers_what_came_before_it() -> None:
    x, first, second, event = on_device(16, 64), pinned(16, 64), pinned(16, 64), torch.cuda.Event()
    first.copy_(x, non_blocking=True)
    event.record()
    second.copy_(x, non_blocking=True)
    event.synchronize()
    assert not first.isnan().any()
    assert second.isnan().all()
    torch.cuda.synchronize()
    assert not second.isnan().any()


def test_a_changed_source_of_an_upload_is_a_race() -> None:
    source, event = pinned(16, 64), torch.cuda.Event()
    on_device(16, 64).copy_(source, non_blocking=True)
    event.record()
    source.fill_(1)
    with pytest.raises(RuntimeError, match="RACE: the source"):
        event.synchronize()


def test_a_second_download_to_the_same_place_is_a_race() -> None:
    target = pinned(16, 64)
    target.copy_(on_device(16, 64), non_blocking=True)
    with pytest.raises(RuntimeError, match="RACE: the target"):
        target.copy_(on_device(16, 64), non_blocking=True)
    torch.cuda.synchronize()


def test_waits_are_counted() -> None:
    x = on_device(16, 64)
    with counting() as log:
        x.sum().item()
        x.index_put_((torch.tensor([1, 2]),), x[:2])
        x.masked_select(x > 0)
        x.cpu()
        x.copy_(torch.zeros(16, 64, dtype=torch.float16))
        x.copy_(pinned(16, 64), non_blocking=True)
        torch.cuda.current_stream().synchronize()
    assert [(event.kind, event.name) for event in log.waits] == [
        ("download, waits", "_local_scalar_dense"), ("upload, pageable", "_index_put_impl_ (index)"),
        ("download, waits", "masked_select"), ("download, waits", "copy_"), ("upload, pageable", "copy_"),
        ("wait", "stream")]
    assert log.launches == {"sum": 1, "_index_put_impl_": 1, "gt": 1, "masked_select": 1}
    assert len(log.of("upload")) == 1


@pytest.mark.parametrize(("fused", "launches"), [(True, 1), (False, 8)])
def test_a_norm_is_one_kernel_or_eight(fused: bool, launches: int) -> None:
    x, weight = on_device(16, 64), on_device(64)
    with counting(fused_rms=fused) as log:
        found = functional.rms_norm(x, (64,), weight, 1e-5)
    assert log.launches.total() == launches
    wide = x.cpu().double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.cpu().double()
    assert (found.cpu().double() - expected).abs().max() < 2**-9 * expected.abs().max()


def test_a_strided_view_of_a_norm_is_copied_first() -> None:
    x = on_device(16, 128)[:, :64]
    with counting() as log:
        functional.rms_norm(x, (64,))
    assert log.launches.total() == 2


def test_allocations_are_counted_with_what_stays() -> None:
    with allocations() as made:
        x = torch.zeros(1 << 10, dtype=torch.uint8, device="cuda")
        y = x + 1
        del x
    assert [event.nbytes for event in made.events] == [1 << 10, 1 << 10]
    assert (made.kept, made.peak) == (1 << 10, 2 << 10)
    with allocations() as made:
        y.add_(1)
        del y
    assert (made.events, made.kept, made.peak) == ([], -(1 << 10), 0)


def test_a_mask_must_be_aligned_for_attention() -> None:
    """PyTorch pads the mask of a GPU in a copy of its own, if its rows are not 8 values apart."""
    x, mask = on_device(1, 2, 13, 16), torch.zeros(13, 16, dtype=torch.float16, device="cuda")
    with counting() as log:
        functional.scaled_dot_product_attention(x, x, x, mask[:, :13])
    aligned = log.launches
    with counting() as log:
        functional.scaled_dot_product_attention(x, x, x, mask[:, :13].contiguous())
    assert aligned == {"efficient_attention": 1}
    assert log.launches.total() > 2


@pytest.mark.parametrize("masked", ["", "causal", "mask"])
def test_gradients_of_attention_are_the_cpus(masked: str) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        x = on_device(1, 2, 16, 8, dtype=torch.float32).to(device)
        q, k, v = states = [x.roll(i).requires_grad_() for i in range(3)]
        mask = torch.eye(16).mul(-3.0).to(device) if masked == "mask" else None
        attended = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=masked == "causal")
        attended.square().sum().backward()
        found[device] = [grad.cpu() for state in states if (grad := state.grad) is not None]
    assert len(found["cuda"]) == 3
    for expected, gradient in zip(*found.values(), strict=True):
        assert (gradient - expected).abs().max() < 1e-5 * expected.abs().max()


def test_gradients_are_the_cpus() -> None:
    found = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 1)).to(device)
        layer(torch.linspace(-1, 1, 64).view(4, 16).to(device)).square().mean().backward()
        found[device] = [grad.cpu() for p in layer.parameters() if (grad := p.grad) is not None]
    assert len(found["cuda"]) == 4
    for expected, gradient in zip(*found.values(), strict=True):
        assert (gradient - expected).abs().max() < 1e-5 * expected.abs().max()

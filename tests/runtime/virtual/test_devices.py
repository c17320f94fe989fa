"""Devices that differ: what each is charged, by hand, and that the text stays the same."""

import pytest

from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.errors import UsageError
from flowspec_edge.runtime.request import Request
from flowspec_edge.runtime.virtual.cluster import VirtualCluster
from flowspec_edge.runtime.virtual.devices import Devices

BASE = load_profile("paper-7b")  # 80 ms for 8 of 32 layers


def changed(**sections: dict[str, object]) -> Profile:
    data = BASE.model_dump()
    for name, values in sections.items():
        data[name] = {**data[name], **values}
    return Profile.model_validate(data)


FAST = changed(stage={"ms": [20.0, 85.0]}, link={"mbps": 100.0, "latency_ms": 1.0})


def test_each_stage_is_charged_its_own_curve_and_its_own_layers() -> None:
    devices = Devices(BASE, (BASE, FAST), (12, 20), "two boards")
    assert devices.stage_seconds(1, 16) == pytest.approx(0.120)
    assert devices.stage_seconds(2, 16) == pytest.approx(0.050)
    assert devices.slot_seconds(16) == pytest.approx(0.120)
    even = Devices.even(BASE, 5)
    assert even.layers == (6.4,) * 5
    assert even.slot_seconds(16) == pytest.approx(0.064)


def test_a_hop_goes_at_the_pace_of_the_slower_port() -> None:
    devices = Devices(BASE, (BASE, FAST), (16, 16), "two boards")
    assert devices.hop_seconds(0, 1, 125_000) == pytest.approx((0.001, 0.0002))
    assert devices.hop_seconds(1, 2, 125_000) == pytest.approx((0.010, 0.001))
    assert devices.hop_seconds(2, 0, 125_000) == pytest.approx((0.010, 0.001))


def test_a_group_goes_at_the_pace_of_its_slowest_device() -> None:
    [mixed] = Devices(BASE, (BASE, FAST), (16, 16), "two").compute_seconds("megatron")
    [slow] = Devices(BASE, (BASE, BASE), (16, 16), "two").compute_seconds("megatron")
    [fast] = Devices(FAST, (FAST, FAST), (16, 16), "two").compute_seconds("megatron")
    assert mixed(16, 0) == max(slow(16, 0), fast(16, 0))
    assert slow(16, 0) != fast(16, 0)


def test_context_and_overhead_are_charged() -> None:
    profile = changed(stage={"context_ms": [10.0, 20.0], "overhead_ms": 2.0})
    devices = Devices.even(profile, 8)  # half the layers of the curve
    assert devices.stage_seconds(1, 16) == pytest.approx(0.042)
    assert devices.stage_seconds(1, 16, 500) == pytest.approx(0.042 + 0.0025)
    assert devices.stage_seconds(1, 116, 1000) == pytest.approx(0.002 + 0.0725 + 0.010)
    assert devices.stage_seconds(1, 0, 1000) == 0


def test_rows_of_an_output_and_nodes_of_a_pass_are_charged(tiny_model) -> None:
    profile = changed(lm_head={"row_ms": 0.25}, draft={"row_ms": 0.5}, host={"bookkeeping_ms": 1.0})
    devices = Devices.even(profile, 2)
    assert devices.d0.verify_seconds(0) == pytest.approx(0.001)
    assert devices.d0.verify_seconds(16) == pytest.approx(0.001 + 0.005 + 0.004)
    cluster = VirtualCluster(tiny_model, 2, profile)
    cluster.generate(Request(list(range(5, 25)), "flowspec", 12))
    for kind, base in (("draft", 0.015), ("verify", 0.006)):
        spans = [span for span in cluster.spans if span.kind == kind and span.rows]
        each = 0.0005 if kind == "draft" else 0.00025
        assert len({span.rows for span in spans}) > 1
        for span in spans:
            assert span.end - span.start == pytest.approx(base + each * span.rows)


def test_plain_decoding_takes_what_the_devices_add_up_to(tiny_model) -> None:
    """One row at a time: every token is the sum of stages, hops and lm_head, counted by hand."""
    devices = Devices(BASE, (BASE, FAST, BASE), (16, 4, 12), "three")
    stats = VirtualCluster(tiny_model, 3, devices).generate(Request([1, 2, 3], "autoregressive", 5)).stats
    stages = 0.160 + 0.010 + 0.120
    slots = stats.decode_s / 4
    bytes_a_row = 8192
    fast_hops = 2 * (bytes_a_row * 8 / 100e6 + 0.001)
    slow_hops = bytes_a_row * 8 / 1000e6 + 2 * 0.0002
    assert slots == pytest.approx(stages + fast_hops + slow_hops + 0.005, rel=2e-3)  # + headers of messages
    assert stats.slot_s == pytest.approx(0.160)


@pytest.mark.parametrize("strategy", ["flowspec", "pipedec", "chunk_pp"])
def test_the_text_does_not_depend_on_the_devices(tiny_model, strategy: str) -> None:
    request = Request([5, 6, 7, 8], strategy, 20)
    devices = Devices(FAST, (BASE, FAST, BASE), (1, 30, 1), "uneven")
    uneven = VirtualCluster(tiny_model, 3, devices).generate(request)
    assert uneven.tokens == VirtualCluster(tiny_model, 3, BASE).generate(request).tokens


def test_context_makes_the_later_tokens_slower(tiny_model) -> None:
    request = Request([1, 2, 3], "autoregressive", 9)
    flat = VirtualCluster(tiny_model, 2, BASE).generate(request).stats
    costly = changed(stage={"context_ms": [1000.0, 1000.0]})
    steep = VirtualCluster(tiny_model, 2, costly).generate(request).stats
    seen = sum(range(3, 11))  # tokens in the cache before each of the eight steps
    assert steep.decode_s - flat.decode_s == pytest.approx(seen * 1e-3 * 4, rel=1e-6)


@pytest.mark.parametrize(("stages", "layers", "says"), [
    ((), (), "0 stages"),
    ((BASE,), (16, 16), "1 stages cannot have 2 shares"),
    ((BASE, BASE), (16, 15), "31 layers in all"),
    ((BASE, load_profile("paper-13b-int4")), (16, 16), "different models"),
])
def test_what_cannot_be_is_refused(stages: tuple[Profile, ...], layers: tuple[float, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Devices(BASE, stages, layers, "x")

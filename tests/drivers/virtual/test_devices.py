"""Devices that differ: what each is charged, by hand, and that the text stays the same."""

import pytest

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.emulation.durations import Emulation

BASE = load_profile("paper-7b")  # 80 ms for 8 of 32 layers


def changed(**sections: dict[str, object]) -> Profile:
    data = BASE.model_dump()
    for name, values in sections.items():
        data[name] = {**(data[name] or {}), **values}
    return Profile.model_validate(data)


FAST = changed(stage={"ms": [20.0, 85.0]}, link={"mbps": 100.0, "latency_ms": 1.0})


def test_each_stage_is_charged_its_own_curve_and_its_own_layers() -> None:
    devices = Devices(BASE, (BASE, FAST), (12, 20), "two boards")
    assert devices.stage_seconds(1, 16) == pytest.approx(0.120)
    assert devices.stage_seconds(2, 16) == pytest.approx(0.050)
    assert devices.slot_seconds(16) == pytest.approx(0.120)
    even = Devices.from_profile(BASE, 5)
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
    devices = Devices.from_profile(profile, 8)  # half the layers of the curve
    assert devices.stage_seconds(1, 16) == pytest.approx(0.042)
    assert devices.stage_seconds(1, 16, 500) == pytest.approx(0.042 + 0.0025)
    assert devices.stage_seconds(1, 116, 1000) == pytest.approx(0.002 + 0.0725 + 0.010)
    assert devices.stage_seconds(1, 0, 1000) == 0


def test_rows_of_an_output_and_nodes_of_a_pass_are_charged(tiny_model) -> None:
    profile = changed(lm_head={"row_ms": 0.25}, draft={"row_ms": 0.5}, host={"bookkeeping_ms": 1.0})
    devices = Devices.from_profile(profile, 2)
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


@pytest.mark.parametrize("strategy", ["flowspec_plus", "chunk_pp", "megatron"])
def test_launches_that_cost_nothing_change_no_digit(tiny_model, strategy: str) -> None:
    """Nor does a profile without their price, as all had been."""
    request = Request(list(range(5, 25)), strategy, 12)
    clusters = [VirtualCluster(tiny_model, 2, profile) for profile in (BASE, changed(launch={"us": 0.0}))]
    without, free = (cluster.generate(request) for cluster in clusters)
    assert (free.tokens, free.stats) == (without.tokens, without.stats)
    assert clusters[0].spans == clusters[1].spans


@pytest.mark.parametrize(("stage_ms", "layer", "slot_ms"), [
    (80.0, 16, 80.0 + 18 * 0.035),  # fp16: 8 x 16 launches, 4.48 ms, are hidden
    (13.0, 16, 13.0 + 18 * 0.035),  # int4 at 68 GB/s, too
    (5.0, 20, 8 * 20 * 0.035 + 18 * 0.035),  # Qwen3 in int4 on a faster GPU: the host is what takes long
])
def test_launches_are_charged_where_the_gpu_does_not_hide_them(tiny_model, stage_ms: float, layer: int,
                                                                slot_ms: float) -> None:
    """At 35 µs each; D0's, 33 a draft pass and 10 an output, are never hidden.  Tokens stay the same."""
    plain = changed(stage={"ms": [stage_ms, 2 * stage_ms]})
    dear = changed(stage={"ms": [stage_ms, 2 * stage_ms]}, launch={"us": 35.0, "layer": layer})
    assert Devices.from_profile(plain, 4).slot_seconds(16) == pytest.approx(stage_ms / 1e3)
    assert Devices.from_profile(dear, 4).slot_seconds(16) == pytest.approx(slot_ms / 1e3)
    assert Devices.from_profile(dear, 4).stage_seconds(1, 0) == 0
    emulated = Emulation(Devices.from_profile(dear, 4)).charge(1)
    assert emulated.seconds(16, 0, 1.0) == Devices.from_profile(dear, 4).stage_seconds(1, 16)
    request = Request(list(range(5, 25)), "flowspec", 12)
    cluster = VirtualCluster(tiny_model, 4, dear)
    found = cluster.generate(request)
    assert found.tokens == VirtualCluster(tiny_model, 4, plain).generate(request).tokens
    assert found.stats.slot_s == pytest.approx(slot_ms / 1e3)
    taken = {kind: {round(1e3 * (span.end - span.start), 6) for span in cluster.spans
                    if span.kind == kind and 0 < span.rows <= 16} for kind in ("compute", "draft", "verify")}
    assert taken == {"compute": {round(slot_ms, 6)}, "draft": {15 + 33 * 0.035}, "verify": {5 + 10 * 0.035}}


def test_each_device_of_a_group_launches_all_layers() -> None:
    """Half of each layer's 0.5 ms hides less than half of its 25 launches of 35 µs, 0.9 ms."""
    free = changed(stage={"layers": 1, "ms": [0.5, 0.5], "rows": [16, 17]})
    dear = changed(stage={"layers": 1, "ms": [0.5, 0.5], "rows": [16, 17]}, launch={"us": 35.0})
    [without], [added] = (Devices(p, (p, p), (16, 16), "two").compute_seconds("megatron")
                          for p in (free, dear))
    assert added(16, 0) - without(16, 0) == pytest.approx((32 * (25 * 0.035 - 0.25) + 18 * 0.035) / 1e3)


@pytest.mark.parametrize(("stages", "layers", "says"), [
    ((), (), "0 stages"),
    ((BASE,), (16, 16), "1 stages cannot have 2 shares"),
    ((BASE, BASE), (16, 15), "31 layers in all"),
    ((BASE, load_profile("paper-13b-int4")), (16, 16), "different models"),
])
def test_what_cannot_be_is_refused(stages: tuple[Profile, ...], layers: tuple[float, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Devices(BASE, stages, layers, "x")

"""Emulation: what is charged, that links weigh and hold back what the profile says, and that the text
and the figures are those of virtual time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from kits.stages import Book, engines

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.drivers.virtual.links import wire_bytes
from flowspec_edge.errors import ProtocolError, UsageError
from flowspec_edge.lab.emulation.durations import Emulation, Links
from flowspec_edge.lab.emulation.emulator import emulated
from flowspec_edge.lab.emulation.links import EmulatedTransport
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.messages import Cancel, Close, Credit, Open, Output, Payload, Prune, Segment
from flowspec_edge.stage.core import Arrived, Charged, Emit, Pass, Passed, StageCore
from flowspec_edge.transport.zmq_links import ZmqLink

PAPER = load_profile("paper-7b")
PATIENCE = 60.0


def quick(**link: float) -> Profile:
    """Twenty times as fast as the paper's boards."""
    data = PAPER.model_dump()
    data["stage"]["ms"] = [4.0, 7.25]
    data["draft"] = {"pass_ms": 2.0, "lm_pass_ms": 3.0, "spd_pass_ms": 2.0}
    data["lm_head"]["ms"] = 1.0
    data["link"] = {"mbps": 1000.0, "latency_ms": 0.2, **link}
    return Profile.model_validate(data)


# ---- a stage ---------------------------------------------------------------------------------------


class Ticks:
    """A clock that only a poll moves on, by at most ``step`` seconds."""

    def __init__(self, step: float = 0.01) -> None:
        self.now, self.step, self.polls = 0.0, step, 0
        self.at: dict[int, object] = {}  # what to do at the n-th poll that waits

    def clock(self) -> float:
        return self.now

    def poll(self, wait: float = 0.0) -> None:
        if wait > 0:
            self.now += min(wait, self.step)
            if act := self.at.get(self.polls):
                act()  # type: ignore[operator]
            self.polls += 1


def emulated_core(tiny_model: Path) -> StageCore:
    [engine] = engines(tiny_model / "target", 1)
    core = StageCore(engine, layers=5)
    core.feed(Open(1, 0, 64), 0.0)  # the engine has it
    return core


def run(core: StageCore, ticks: Ticks, segment: Segment) -> tuple[Pass, Output]:
    """As the worker does: compute, then wait with the clock of ``ticks`` until the profile's time is over."""
    core.feed(Arrived([segment], 0), 0.0)
    begun = core.next(0.0)
    assert isinstance(begun, Pass)
    start = ticks.now
    begun.compute(ticks.poll)
    core.feed(Charged(start, 0.1 * begun.admitted_rows + 0.001 * begun.context), ticks.now)
    while begun.end > ticks.now + 1e-9:
        ticks.poll(begun.end - ticks.now)
    core.feed(Passed(start, ticks.now), ticks.now)
    results = core.next(ticks.now)
    assert isinstance(results, Emit)
    [output] = [message for message in results.messages if isinstance(message, Output)]
    return begun, output


def test_a_segment_takes_what_its_rows_and_the_context_cost(tiny_model: Path) -> None:
    ticks, book, core = Ticks(), Book(), emulated_core(tiny_model)
    for rows, context in ((5, 0), (3, 5), (1, 8)):
        before = ticks.now
        _, output = run(core, ticks, book.text(range(rows)))
        assert len(output.numbers) == rows
        assert ticks.now - before == pytest.approx(0.1 * rows + 0.001 * context)
    assert core.engine.cached(1) == 9


@pytest.mark.parametrize("ends", ["cancel", "close"])
def test_a_cancelled_run_ends_with_the_layer_that_it_is_in(tiny_model: Path, ends: str) -> None:
    ticks, book, core = Ticks(), Book(), emulated_core(tiny_model)
    segment = book.text(range(5))  # five layers of 0.1 s
    message = Cancel(1, 0, (segment.run,)) if ends == "cancel" else Close(1)
    ticks.at[20] = lambda: core.feed(message, ticks.now)  # after 0.21 s
    ticks.at[5] = lambda: core.feed(Cancel(1, 0, (segment.run + 7,)), ticks.now)  # another's
    _, output = run(core, ticks, segment)
    assert ticks.now == pytest.approx(0.3)
    assert len(output.numbers) == 0


def test_a_run_cancelled_before_it_began_takes_no_time(tiny_model: Path) -> None:
    ticks, book, core = Ticks(), Book(), emulated_core(tiny_model)
    segment = book.text(range(5))
    core.feed(Cancel(1, 0, (segment.run,)), 0.0)
    begun, output = run(core, ticks, segment)
    assert (ticks.now, len(output.numbers), begun.cancelled) == (0.0, 0, [True])


# ---- links -----------------------------------------------------------------------------------------


def output(rows: int, run: int = 0) -> Output:
    hidden = Payload("float32", np.ones((rows, 64), np.float32))
    return Output(1, 0, run, np.arange(rows, dtype=np.int32), hidden)


@contextmanager
def pair(profile: Profile, links: Links) -> Iterator[tuple[ZmqLink, ZmqLink]]:
    """The ends of V1's link to D0: D0's, and V1's."""
    emulation = Emulation(Devices.from_profile(profile, 1), links)
    with (closing(EmulatedTransport(emulation, 0, ["v1"])) as d0, closing(EmulatedTransport(emulation, 1)) as v1):
        data_in = d0.pull("tcp://127.0.0.1:*", "in")
        yield data_in, v1.push(data_in.endpoint, "out")


def test_made_links_hold_every_message_back_in_order() -> None:
    profile = quick(mbps=8.0, latency_ms=30.0)  # 1 kB a ms: 16 rows of 8192 bytes take 131 ms
    with pair(profile, "made") as (data_in, data_out):
        sent = [output(16, run) for run in range(3)]
        start = time.monotonic()
        for message in sent:
            assert data_out.send(message, PATIENCE)
        due = start
        for message in sent:
            got = data_in.receive(PATIENCE)
            due += wire_bytes(message, profile) / 1e6
            assert isinstance(got, Output)
            assert got.run == message.run
            assert time.monotonic() >= due + 0.030


def test_made_control_links_are_one_for_each_device() -> None:
    """A large message to V1 does not hold up V2's."""
    devices = Devices.from_profile(quick(mbps=0.01), 2)  # 10 kbit/s: 100 bytes in 80 ms
    d0, v1, v2 = (EmulatedTransport(Emulation(devices), place, ["a", "b"]) for place in range(3))
    try:
        hub = d0.hub("tcp://127.0.0.1:*", "hub")
        ends = [v.control(hub.endpoint, "control", name) for v, name in ((v1, "a"), (v2, "b"))]
        for end in ends:
            end.send(Credit(1, 0, 0))
        met = set()
        while len(met) < 2:
            d0.wait([hub], [], PATIENCE)
            item = hub.receive()
            met |= {item[0]} if item else set()
        assert hub.send("a", Prune(1, 0, 0, 0, 4000, np.arange(4000, dtype=np.int32)))
        small = Cancel(1, 0, (3,))
        assert hub.send("b", small)
        assert ends[1].receive(PATIENCE) == small
        assert ends[0].receive() is None  # its 16 kB need seconds
    finally:
        for transport in (d0, v1, v2):
            transport.close()


def test_real_links_carry_the_profiles_bytes() -> None:
    profile = quick()
    with pair(profile, "real") as (data_in, data_out):
        for rows in (0, 1, 16, 200):
            before = data_out.bytes_out, data_in.bytes_in
            message = output(rows)
            assert data_out.send(message, PATIENCE)
            got = data_in.receive(PATIENCE)
            assert isinstance(got, Output)
            assert np.array_equal(got.hidden.array, message.hidden.array)
            expected = wire_bytes(message, profile) + 8  # the stamp
            assert (data_out.bytes_out - before[0], data_in.bytes_in - before[1]) == (expected, expected)


def test_a_model_wider_than_the_profiles_cannot_be_padded() -> None:
    wide = Payload("float32", np.ones((2, 5000), np.float32))
    with pair(quick(), "real") as (_, data_out), pytest.raises(ProtocolError, match="wider"):
        data_out.send(Output(1, 0, 0, np.arange(2, dtype=np.int32), wide), PATIENCE)


# ---- clusters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", ["made", "real"])
def test_text_and_at_least_the_time_of_virtual_time(tiny_model: Path, links: Links) -> None:
    devices = Devices.from_profile(quick(), 2)
    virtual, plain = VirtualCluster(tiny_model, 2, devices), PlainDecoder(tiny_model)
    prompt = [1, 2, 3, 4, 5]
    expected = plain.generate(prompt, 12, Request(prompt).sampling)[0]
    with ProcessCluster(ClusterSpec(tiny_model, 2, threads=1),
                        emulated(devices, links)).start() as cluster:
        for strategy in ("autoregressive", "chunk_pp", "flowspec", "pipedec", "pipeinfer", "spd"):
            request = Request(prompt, strategy, 12)
            result = cluster.generate(request)
            assert result.tokens == expected, strategy
            if strategy != "autoregressive":
                continue
            # One token after the other: nothing can be saved, and the bytes are the same, at both ends of a
            # link, for nothing is on its way when the text ends.
            first, second = result.stats.stages
            assert first["bytes_out"] == second["bytes_in"] > 0
            made_up = virtual.generate(request).stats
            compute = [stage["compute_s"] for stage in result.stats.stages]
            assert all(c >= v["compute_s"] for c, v in zip(compute, made_up.stages, strict=True))
            if links == "made":
                assert result.stats.decode_s >= made_up.decode_s
            if links == "real":
                # Beside, a stamp on each message, and eight bytes more for a session's number.
                sent = [stage["bytes_out"] - 16 * stage["segments"] for stage in result.stats.stages]
                assert sent == [stage["bytes_out"] for stage in made_up.stages]


def test_an_emulation_survives_its_file(tmp_path: Path) -> None:
    emulation = Emulation(Devices(PAPER, (PAPER, quick()), (20, 12), "two"), "real")
    emulation.save(tmp_path / "e.json")
    assert Emulation.load(tmp_path / "e.json") == emulation
    with pytest.raises(UsageError, match=r"cannot read .*gone\.json: No such file"):
        Emulation.load(tmp_path / "gone.json")

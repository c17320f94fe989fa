"""What /metrics says of the devices: what their heartbeats tell, and D0's own vitals.

Makes of the counters of heartbeats, which begin again at zero now and then, some that only grow.  What a
device does not tell is left out.  Does not know requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from flowspec_edge.runtime.heartbeats import Counters, growth

_SILENT_S = 5.0  # after which a stage is not up

_GROWING = {  # of a stage: name, what it says
    "compute_s": ("flowspec_stage_compute_seconds", "Time that a stage computed segments."),
    "wait_s": ("flowspec_stage_wait_seconds", "Time that a stage had nothing to do while requests ran."),
    "rows": ("flowspec_stage_rows", "Rows, of prompts and drafts, that went through a stage's layers."),
}
_LINKED = ("bytes_in", "bytes_out")
_VITALS = {
    "memory_total": ("flowspec_device_memory_bytes", "Memory that a device's system sees."),
    "memory_available": ("flowspec_device_memory_available_bytes",
                         "Memory of a device that a new process could take without swapping."),
    "resident": ("flowspec_device_resident_bytes", "Memory that the device's flowspec process holds."),
    "cache_bytes": ("flowspec_device_cache_bytes", "Bytes of KV caches."),
    "temperature_c": ("flowspec_device_temperature_celsius", "The hottest thermal zone of a device."),
    "load": ("flowspec_device_load1", "Processes that run or wait for a core, the last minute's average."),
    "cpus": ("flowspec_device_cpus", "Cores that are switched on."),
}


class StageMetrics(Collector):
    """The newest that is known of D0 and of V1…VN."""

    def __init__(self, stages: int, vitals: Callable[[], Counters],
                 clock: Callable[[], float] = time.monotonic) -> None:
        """``vitals``: D0's own; ``clock``: that of heartbeats' arrivals, seconds."""
        self._vitals = vitals
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: dict[int, Counters] = {}  # by stage
        self._heard_at: dict[int, float] = {}
        kept = (*_GROWING, *_LINKED)
        self._grown: dict[int, Counters] = {stage: dict.fromkeys(kept, 0.0) for stage in range(1, stages + 1)}

    def heard(self, stage: int, counters: Counters, at: float) -> None:
        """A heartbeat's counters on all sessions together."""
        with self._lock:
            grown = self._grown[stage]
            for key, added in growth(self._newest.get(stage, {}), counters, grown).items():
                grown[key] += added
            self._newest[stage], self._heard_at[stage] = counters, at

    def lost(self) -> None:
        """The stages cannot go on: none is up until it is heard again."""
        with self._lock:
            self._heard_at.clear()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        with self._lock:
            grown = {stage: dict(counters) for stage, counters in self._grown.items()}
            up = {stage for stage, at in self._heard_at.items() if self._clock() - at < _SILENT_S}
            newest = {f"V{stage}": dict(self._newest[stage]) for stage in sorted(up)}
        yield from _growing(grown)
        yield _links(grown)
        is_up = GaugeMetricFamily("flowspec_stage_up", "Whether a stage was heard of lately.",
                                  labels=["stage"])
        for stage in grown:
            is_up.add_metric([f"V{stage}"], float(stage in up))
        yield is_up
        devices = {"D0": self._vitals(), **newest}
        for key, (name, says) in _VITALS.items():
            gauge = GaugeMetricFamily(name, says, labels=["device"])
            for device, told in devices.items():
                if key in told:
                    gauge.add_metric([device], told[key])
            yield gauge


def _growing(grown: dict[int, Counters]) -> Iterator[Metric]:
    for key, (name, says) in _GROWING.items():
        family = CounterMetricFamily(name, says, labels=["stage"])
        for stage, counters in grown.items():
            family.add_metric([f"V{stage}"], counters[key])
        yield family


def _links(grown: dict[int, Counters]) -> Metric:
    """Each link as the device at its beginning counts it; D0's as V1 does."""
    family = CounterMetricFamily(
        "flowspec_link_bytes", "Bytes over the data links, without control messages and collectives.",
        labels=["sender", "receiver"])
    family.add_metric(["D0", "V1"], grown[1]["bytes_in"])
    for stage, counters in grown.items():
        receiver = f"V{stage + 1}" if stage + 1 in grown else "D0"
        family.add_metric([f"V{stage}", receiver], counters["bytes_out"])
    return family

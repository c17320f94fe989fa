"""/metrics for Prometheus, in a registry of its own.

Requests, their tokens and times come from the access log's records, so they count what clients see. Figures
from the cluster (drafted, verified and accepted tokens, rounds, losses) include the server's own probes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from flowspec_edge.d0.counters import HeartbeatCounters, increase
from flowspec_edge.d0.energy import once_per_board
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import Result
from flowspec_edge.d0.run_events import (
    DraftDeviceWork,
    DrafterLoaded,
    DropReason,
    HeartbeatArrived,
    MessagesDropped,
    RunEvent,
    SessionEnded,
    StagesBack,
    StagesLost,
)
from flowspec_edge.serving.access_log import CLIENT_CLOSED_REQUEST, AccessRecord
from flowspec_edge.serving.admission import Readiness

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_GAPS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_DEPTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)

# Outcomes by HTTP status; other statuses from 400 are "refused".
_OUTCOMES = {CLIENT_CLOSED_REQUEST: "client_gone", 429: "queue_full", 503: "unavailable", 500: "failed"}


class Metrics(Observer):
    """Observes a cluster, and gets the records of finished requests."""

    def __init__(self, stages: int, system_stats: Callable[[], HeartbeatCounters], about: dict[str, str],
                 fairness: Callable[[], float | None] = lambda: None) -> None:
        """Set up the metrics.

        system_stats  D0's own (``SystemStats.read``)
        about         labels of flowspec_build_info
        fairness      of the running requests (``RequestStats.fairness``)
        """
        disable_created_metrics()  # an unused extra series per counter
        self._stages = StageMetrics(stages, system_stats)
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"flowspec_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"flowspec_{name}", text, labels, registry=registry, buckets=buckets)

        self._requests = counter("requests", "Requests that are over, by how they ended.", "path", "outcome")
        self._generated = counter("generated_tokens", "Tokens of answers, as clients' usage counts them, "
                                  "when they come.")
        self._prompt = counter("prompt_tokens", "Tokens of the prompts of requests that had their turn.")
        self._reused = counter("prompt_tokens_reused",
                               "Tokens of prompts that were not read in again, for stages had kept them.")
        self._ttft = histogram("time_to_first_token_seconds",
                               "From a request's arrival to its first token, the queue included.", _SECONDS)
        self._gaps = histogram("inter_token_latency_seconds", "Between a token and the one before it; of "
                               "tokens accepted together all but the first took no time.", _GAPS)
        self._seconds = histogram("request_duration_seconds", "From a request's arrival to its end.",
                                  _SECONDS, "path")
        self._queued = histogram("queue_wait_seconds", "From a request's arrival to its turn.", _SECONDS)
        self._drafted = counter("drafted_tokens", "Nodes of draft trees that were sent.")
        self._verified = counter("verified_tokens",
                                 "Nodes of draft trees, and roots, that came out of the last stage.")
        self._accepted = counter("accepted_tokens", "Draft tokens that became text.")
        self._depth = histogram("round_accepted_tokens", "Draft tokens accepted in a round that ended with "
                                "a miss. The share of rounds that reached depth d is 1 - bucket(le=d-1) / "
                                "count.", _DEPTHS)
        self._losses = counter("losses", "Times that a stage was lost.")
        self._recoveries = counter("recoveries", "Times that all stages were there again after a loss.")
        self._state_gauges = _StateGauges(about, fairness)
        registry.register(self._state_gauges)
        registry.register(self._stages)

    def page(self, accept: str, state: Readiness) -> tuple[bytes, str]:
        """Return all metrics in the format of the header Accept, and the content type; not reentrant."""
        self._state_gauges.state = state
        try:
            encode, kind = choose_encoder(accept)
        except (TypeError, ValueError):  # "version=a.b": the library compares numbers
            encode, kind = choose_encoder("")
        return encode(self._registry), kind

    # ---- from the HTTP thread --------------------------------------------------------------------------

    def tokens_arrived(self, count: int, first_token_s: float | None, gaps: Sequence[float]) -> None:
        """Tokens of one answer came together.

        ``first_token_s`` and ``gaps`` as in :class:`AccessRecord`, the former None unless the answer's first token
        is among them.
        """
        self._generated.inc(count)
        if first_token_s is not None:
            self._ttft.observe(first_token_s)
        for gap in gaps:
            self._gaps.observe(gap)

    def request_ended(self, record: AccessRecord) -> None:
        refused = "refused" if record.status >= 400 else record.finish or "failed"
        self._requests.labels(record.path, _OUTCOMES.get(record.status, refused)).inc()
        self._seconds.labels(record.path).observe(record.seconds)
        if record.queued_s is not None:
            self._queued.observe(record.queued_s)
            self._prompt.inc(record.prompt_tokens)

    # ---- from the thread that drives the cluster -------------------------------------------------------

    def observe(self, event: RunEvent) -> None:
        match event:
            case DraftDeviceWork(accepted=int(accepted)):
                self._depth.observe(accepted)
            case SessionEnded(result=Result(stats=stats)):
                self._drafted.inc(stats.drafted)
                self._verified.inc(stats.verified)
                self._accepted.inc(stats.accepted)
                self._reused.inc(stats.reused)
            case StagesLost():
                self._losses.inc()
            case StagesBack():
                self._recoveries.inc()
        self._stages.observe(event)


class _StateGauges(Collector):
    """Gauges of ``state`` at the moment of the scrape."""

    def __init__(self, about: dict[str, str], fairness: Callable[[], float | None]) -> None:
        self.state: Readiness | None = None
        self._fairness = fairness
        self._about = {"version": version("flowspec-edge"), **about}

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("flowspec_build", "What is served.", value=self._about)
        if self.state is None:
            return
        for name, text, value in (
                ("ready", "Whether a token came through the pipeline lately.", self.state.ready),
                ("requests_running", "Requests that have a place in the stages.", self.state.running),
                ("requests_waiting", "Requests that wait for a place in the stages.", self.state.waiting)):
            yield GaugeMetricFamily(f"flowspec_{name}", text, value=float(value))
        fairness = GaugeMetricFamily("flowspec_requests_fairness_ratio", "Tokens per second of the slowest "
                                     "running request over those of the fastest; absent unless two run.")
        if (ratio := self._fairness()) is not None:
            fairness.add_metric([], ratio)
        yield fairness


_SILENT_S = 5.0  # after which a stage is not up

_GROWING = {  # a stage's counter -> metric, help
    "compute_s": ("flowspec_stage_compute_seconds", "Time that a stage computed segments."),
    "wait_s": ("flowspec_stage_wait_seconds", "Time that a stage had nothing to do while requests ran."),
    "rows": ("flowspec_stage_rows", "Rows, of prompts and drafts, that went through a stage's layers."),
    "experts": ("flowspec_stage_experts",
                "Distinct experts that a segment's rows touched, summed over layers and segments."),
    "experts_independent": ("flowspec_stage_experts_independent",
                            "Distinct experts that as many independent rows would have touched on average."),
}
_SYSTEM_STATS = {
    "memory_total": ("flowspec_device_memory_bytes", "Memory that a device's system sees."),
    "memory_available": ("flowspec_device_memory_available_bytes",
                         "Memory of a device that a new process could take without swapping."),
    "resident": ("flowspec_device_resident_bytes", "Memory that the device's flowspec process holds."),
    "cache_bytes": ("flowspec_device_cache_bytes", "Bytes of KV caches."),
    "graph_sizes": ("flowspec_device_graph_sizes", "Numbers of rows for which a stage's layers, or D0's "
                    "draft passes, run as CUDA graphs; 0: always kernel by kernel."),
    "temperature_c": ("flowspec_device_temperature_celsius", "The hottest thermal zone of a device."),
    "load": ("flowspec_device_load1", "Processes that run or wait for a core, the last minute's average."),
    "cpus": ("flowspec_device_cpus", "Cores that are switched on."),
    "watts": ("flowspec_device_power_watts", "What a device's board draws, by its own sensor; a board with "
                                             "several devices at the first of them."),
    "energy_j": ("flowspec_device_energy_joules", "What a device's board has used since its process began."),
}
_GROWS = "energy_j"  # of these; the others are gauges
_UP = ("flowspec_stage_up", "Whether a stage was heard of lately.")
_DROPPED = ("flowspec_dropped_messages", "Messages that a device did not process: their session is not open "
            "there, they are stale, or no stage of the cluster may have sent them.")
_DROP_COUNTERS = ("dropped_stale", "dropped_session")  # of a stage; the first contains the second


class StageMetrics(Observer, Collector):
    """Metrics of D0 and V1…VN; unlike heartbeat counters, these never reset. Missing figures are left out."""

    def __init__(self, stages: int, system_stats: Callable[[], HeartbeatCounters],
                 clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without heartbeats; ``system_stats``: D0's own; ``clock``: of the heartbeats' arrival, in seconds."""
        self._draft_graph_sizes: int | None = None  # of D0's draft model, once it is loaded
        self._system_stats = system_stats
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: dict[int, HeartbeatCounters] = {}  # by stage
        self._heard_at: dict[int, float] = {}
        self._grown: dict[int, HeartbeatCounters] = {
            stage: dict.fromkeys((*_GROWING, *_DROP_COUNTERS, "bytes_in", "bytes_out"), 0.0)
            for stage in range(1, stages + 1)}
        self._dropped_frames = dict.fromkeys(self._grown, 0.0)  # by stage
        self._dropped_here: dict[DropReason, int] = {"session": 0, "stale": 0, "frame": 0}

    def observe(self, event: RunEvent) -> None:
        with self._lock:
            match event:
                case DrafterLoaded():
                    self._draft_graph_sizes = event.graph_sizes
                case HeartbeatArrived():
                    self._add_heartbeat(event.beat.stage, event.beat.counters, event.at)
                case MessagesDropped():
                    self._dropped_here[event.reason] += event.number
                case StagesLost():  # none counts as up until its next heartbeat
                    self._heard_at.clear()

    def _add_heartbeat(self, stage: int, counters: HeartbeatCounters, at: float) -> None:
        """Add a heartbeat's counters, which cover all sessions."""
        totals, before = self._grown[stage], self._newest.get(stage, {})
        for key, amount in increase(before, counters, totals).items():
            totals[key] += amount
        frames = counters.get("dropped_frames", 0.0)  # of the process, over all sessions
        previous_frames = before.get("dropped_frames", 0.0)
        self._dropped_frames[stage] += frames - previous_frames if frames >= previous_frames else frames
        self._newest[stage], self._heard_at[stage] = counters, at

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            totals = {stage: dict(counters) for stage, counters in self._grown.items()}
            up = {stage for stage, at in self._heard_at.items() if self._clock() - at < _SILENT_S}
            newest = {f"V{stage}": dict(self._newest[stage]) for stage in sorted(up)}
            dropped: dict[str, dict[DropReason, float]] = {"D0": {**self._dropped_here}}
            for stage, counts in self._grown.items():
                session = counts["dropped_session"]
                dropped[f"V{stage}"] = {"session": session, "stale": counts["dropped_stale"] - session,
                                        "frame": self._dropped_frames[stage]}
        for key, about in _GROWING.items():
            yield _family(CounterMetricFamily, about, "stage",
                          {f"V{stage}": counters[key] for stage, counters in totals.items()})
        yield _links(totals)
        drops = CounterMetricFamily(*_DROPPED, labels=["device", "reason"])
        for device, reasons in dropped.items():
            for reason, count in reasons.items():
                drops.add_metric([device, reason], count)
        yield drops
        yield _family(GaugeMetricFamily, _UP, "stage", {f"V{stage}": float(stage in up) for stage in totals})
        d0_stats = self._system_stats()
        if self._draft_graph_sizes is not None:
            d0_stats = {**d0_stats, "graph_sizes": float(self._draft_graph_sizes)}
        devices = once_per_board({"D0": d0_stats, **newest})
        for key, about in _SYSTEM_STATS.items():
            kind = CounterMetricFamily if key == _GROWS else GaugeMetricFamily
            yield _family(kind, about, "device", {
                device: counters[key] for device, counters in devices.items() if key in counters})


def _family(kind: type[CounterMetricFamily] | type[GaugeMetricFamily], about: tuple[str, str], label: str,
            values: dict[str, float]) -> Metric:
    """Make a family of metrics; ``about``: name and help; ``values`` by the label's."""
    family = kind(*about, labels=[label])
    for name, value in values.items():
        family.add_metric([name], value)
    return family


def _links(totals: dict[int, HeartbeatCounters]) -> Metric:
    """Count each link by its sender, and D0's by V1."""
    family = CounterMetricFamily(
        "flowspec_link_bytes", "Bytes over the data links, without control messages and collectives.",
        labels=["sender", "receiver"])
    family.add_metric(["D0", "V1"], totals[1]["bytes_in"])
    for stage, counters in totals.items():
        receiver = f"V{stage + 1}" if stage + 1 in totals else "D0"
        family.add_metric([f"V{stage}", receiver], counters["bytes_out"])
    return family

"""What /metrics says, for Prometheus: requests, tokens and times; devices are ``stage_metrics``' affair.

Knows names, units and buckets.  Does not know HTTP, nor who reads.  The registry is its own.

Counted where clients see it: requests, their tokens and their times come from the records that are also
written to the log.  Counted where the pipeline works, the server's own requests (warm-up and probes of one
token) included: tokens drafted, verified and accepted, rounds, losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from flowspec_edge.messages import Heartbeat
from flowspec_edge.runtime.coordinator import Coordinator, Verify
from flowspec_edge.runtime.heartbeats import Counters
from flowspec_edge.runtime.observer import Observer
from flowspec_edge.runtime.request import Result
from flowspec_edge.runtime.sessions import Job
from flowspec_edge.serving.desk import Readiness
from flowspec_edge.serving.log import GONE, Record
from flowspec_edge.serving.stage_metrics import StageMetrics

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_GAPS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_DEPTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)

# How a request ended that has no text, or not all of it; other statuses from 400 are "refused".
_OUTCOMES = {GONE: "client_gone", 429: "queue_full", 503: "unavailable", 500: "failed"}


class Metrics(Observer):
    """Watches a cluster, is told of requests that are over, and writes it all down for Prometheus."""

    def __init__(self, stages: int, vitals: Callable[[], Counters], about: dict[str, str]) -> None:
        """``vitals``: of D0 (``runtime.vitals``); ``about``: labels of flowspec_build_info."""
        disable_created_metrics()  # a series more for each counter, which nobody reads
        self._stages = StageMetrics(stages, vitals)
        # By session: rounds ended, -1 while the text is read in, and tokens at the newest's end.
        self._rounds: dict[int, tuple[int, int]] = {}
        registry = self._registry = CollectorRegistry()

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(f"flowspec_{name}", says, labels, registry=registry)

        def histogram(name: str, says: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"flowspec_{name}", says, labels, registry=registry, buckets=buckets)

        self._requests = counter("requests", "Requests that are over, by how they ended.", "path", "outcome")
        self._generated = counter("generated_tokens", "Tokens of answers, as clients' usage counts them.")
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
        self._drafted = counter("drafted_tokens", "Nodes that draft trees were given.")
        self._verified = counter("verified_tokens", "Draft tokens that came out of the last stage.")
        self._accepted = counter("accepted_tokens", "Draft tokens that became text.")
        self._depth = histogram("round_accepted_tokens", "Draft tokens accepted in a round that a miss "
                                "ended; that depth d was reached: the share of rounds above le=d-1.", _DEPTHS)
        self._losses = counter("losses", "Times that a stage was lost.")
        self._recoveries = counter("recoveries", "Times that all stages were there again after a loss.")
        self._now = _Now(about)
        registry.register(self._now)
        registry.register(self._stages)

    def page(self, accept: str, state: Readiness) -> tuple[bytes, str]:
        """The text of all metrics and its content type, as the header Accept asks for it; one at a time."""
        self._now.state = state
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    # ---- from the HTTP thread --------------------------------------------------------------------------

    def over(self, record: Record) -> None:
        """A request is over, however it ended."""
        refused = "refused" if record.status >= 400 else record.finish or "failed"
        self._requests.labels(record.path, _OUTCOMES.get(record.status, refused)).inc()
        self._seconds.labels(record.path).observe(record.seconds)
        self._generated.inc(record.completion_tokens)
        if record.queued_s is not None:
            self._queued.observe(record.queued_s)
            self._prompt.inc(record.prompt_tokens)
        if record.first_token_s is not None:
            self._ttft.observe(record.first_token_s)
        for gap in record.gaps:
            self._gaps.observe(gap)

    # ---- from the thread that drives the cluster -------------------------------------------------------

    def opened(self, coordinator: Coordinator, at: float) -> None:
        self._rounds[coordinator.ledger.session] = (-1, len(coordinator.tokens))

    def worked(self, job: Job, start: float, end: float) -> None:
        coordinator = job.coordinator
        before = self._rounds.get(coordinator.ledger.session)
        if before is None or not isinstance(job.task, Verify):
            return
        (rounds, told), now = before, coordinator.strategy.counters.rounds
        tokens = len(coordinator.tokens)
        if tokens == told:
            return
        if rounds < 0:
            self._rounds[coordinator.ledger.session] = (now, tokens)  # the token that came of reading in
        elif now > rounds:
            self._rounds[coordinator.ledger.session] = (now, tokens)
            if not coordinator.finished:
                self._depth.observe(tokens - told - 1)  # the token after a miss was not drafted

    def settled(self, coordinator: Coordinator, result: Result, at: float) -> None:
        self._rounds.pop(coordinator.ledger.session, None)
        stats = result.stats
        self._drafted.inc(stats.drafted)
        self._verified.inc(stats.verified)
        self._accepted.inc(stats.accepted)
        self._reused.inc(stats.reused)

    def failed(self, coordinator: Coordinator, at: float) -> None:
        self._rounds.pop(coordinator.ledger.session, None)

    def heard(self, beat: Heartbeat, at: float) -> None:
        if "closed" not in beat.counters:  # those are of one session alone
            self._stages.heard(beat.stage, beat.counters, at)

    def lost(self, reason: str, at: float) -> None:
        self._losses.inc()
        self._rounds.clear()  # those that go on are opened again
        self._stages.lost()

    def back(self, at: float) -> None:
        self._recoveries.inc()


class _Now(Collector):
    """What is so at the moment of asking: ``state``."""

    def __init__(self, about: dict[str, str]) -> None:
        self.state: Readiness | None = None
        self._about = {"version": version("flowspec-edge"), **about}

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        yield InfoMetricFamily("flowspec_build", "What is served.", value=self._about)
        if self.state is None:
            return
        for name, says, value in (
                ("ready", "Whether a token came through the pipeline lately.", self.state.ready),
                ("requests_running", "Requests that have a place in the stages.", self.state.running),
                ("requests_waiting", "Requests that wait for a place in the stages.", self.state.waiting)):
            yield GaugeMetricFamily(f"flowspec_{name}", says, value=float(value))

"""/metrics under load: what it says against what the clients got, read by Prometheus' own parsers."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kits import network_beds
from kits.http_server import AT_ONCE, LONG, NAME, Running, running, served
from kits.process_clusters import PATIENCE, until
from openai import APIStatusError
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from flowspec_edge.d0.observer import Observers
from flowspec_edge.d0.run_events import DrafterLoaded, HeartbeatArrived, MessagesDropped, StagesLost
from flowspec_edge.drivers.observe.system_stats import SystemStats
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.messages import Heartbeat
from flowspec_edge.serving.access_log import CLIENT_CLOSED_REQUEST, AccessRecord
from flowspec_edge.serving.admission import Readiness
from flowspec_edge.serving.dashboard.feed import Feed
from flowspec_edge.serving.metrics import Metrics, StageMetrics

KEY = "a-key"
STAGES = 2
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Read:
    """A page of /metrics."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples: Samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families for sample in family.samples}

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[f"flowspec_{name}", frozenset(labels.items())]

    def total(self, name: str) -> float:
        """Over all labels."""
        return sum(value for (found, _), value in self.samples.items() if found == f"flowspec_{name}")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    feed = Feed()
    metrics = Metrics(STAGES, SystemStats().read, {"model": NAME}, feed.stats.fairness)
    observer = Observers([metrics, feed])
    with (open_cluster(ClusterSpec(model, STAGES, threads=1, at_once=AT_ONCE, observer=observer)) as clusters,
          running(served(model), clusters, api_key=KEY, at_once=AT_ONCE, metrics=metrics) as server):
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


def read(server: Running) -> Read:
    answer = server.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Read(answer.text)


def test_counters_agree_with_what_the_clients_got(server: Running) -> None:
    before = read(server)
    compute = before.total("stage_compute_seconds_total")

    def ask(number: int) -> tuple[str, int, int, int]:
        """How it ended, its tokens and its prompt's, and how many tokens came in how many pieces."""
        if number == 7:
            with pytest.raises(APIStatusError):
                server.client.completions.create(model=NAME, prompt="x", max_tokens=4, n=9)
            return "refused", 0, 0, 0
        if number % 2:
            chunks = list(server.client.completions.create(
                model=NAME, prompt=[5] * (number + 1), max_tokens=10 + number, stream=True,
                stream_options={"include_usage": True}))
            usage = chunks[-1].usage
            finish = chunks[-2].choices[0].finish_reason
        else:
            answer = server.client.completions.create(model=NAME, prompt=[7] * (number + 1),
                                                      max_tokens=10 + number)
            usage, finish = answer.usage, answer.choices[0].finish_reason
        assert usage is not None
        return finish, usage.completion_tokens, usage.prompt_tokens, 1

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(8)))
    until(lambda: read(server).total("requests_total") - before.total("requests_total") == len(got))
    # Heartbeats come twice a second; what they tell of the last request may be on its way.
    text = sum(tokens + prompt for _, tokens, prompt, _ in got)
    until(lambda: read(server).total("stage_rows_total") >= before.total("stage_rows_total") + STAGES * text)
    after = read(server)

    def grown(name: str, **labels: str) -> float:
        sample = (f"flowspec_{name}", frozenset(labels.items()))
        return after(name, **labels) - before.samples.get(sample, 0.0)

    for outcome in ("stop", "length", "refused"):
        count = sum(found == outcome for found, *_ in got)
        assert (grown("requests_total", path="/v1/completions", outcome=outcome) if count else 0) == count
    answered = sum(known for *_, known in got)
    tokens = sum(tokens for _, tokens, _, _ in got)
    assert grown("generated_tokens_total") == tokens
    assert grown("prompt_tokens_total") == sum(prompt for _, _, prompt, _ in got)
    for name in ("time_to_first_token_seconds", "queue_wait_seconds"):
        assert grown(f"{name}_count") == answered
        assert grown(f"{name}_sum") > 0
    assert grown("inter_token_latency_seconds_count") == tokens - answered
    assert grown("request_duration_seconds_count", path="/v1/completions") == len(got)
    spent = grown("request_duration_seconds_sum", path="/v1/completions")
    assert spent >= grown("time_to_first_token_seconds_sum") + grown("inter_token_latency_seconds_sum") - 1e-3
    assert grown("time_to_first_token_seconds_sum") >= grown("queue_wait_seconds_sum")
    accepted, verified = grown("accepted_tokens_total"), grown("verified_tokens_total")
    assert 0 <= grown("round_accepted_tokens_sum") <= accepted <= verified
    assert verified <= grown("drafted_tokens_total") + tokens  # a tree's root is a token of the answer
    assert 0 < grown("round_accepted_tokens_count") < tokens
    assert verified > 0
    assert after.total("stage_compute_seconds_total") > compute
    for sender, receiver in (("D0", "V1"), ("V1", "V2"), ("V2", "D0")):
        assert grown("link_bytes_total", sender=sender, receiver=receiver) > 0
    assert (after("requests_running"), after("requests_waiting"), after("ready")) == (0, 0, 1)
    for stage in ("V1", "V2"):
        assert after("stage_up", stage=stage) == 1
        assert after("device_cache_bytes", device=stage) >= 0
    for device in ("D0", "V1", "V2"):
        assert 0 < after("device_resident_bytes", device=device) < after("device_memory_bytes", device=device)


def test_a_client_that_goes_away_is_counted_as_one(server: Running) -> None:
    gone = ("flowspec_requests_total", frozenset({("path", "/v1/completions"), ("outcome", "client_gone")}))
    before = read(server).samples.get(gone, 0)
    with server.client.completions.create(model=NAME, prompt="x", max_tokens=1500, stream=True) as stream:
        next(iter(stream))
    server.records.wait(CLIENT_CLOSED_REQUEST)
    until(lambda: read(server).samples.get(gone) == before + 1)


def test_names_and_types_are_prometheus_own(server: Running) -> None:
    families = read(server).families
    units = ("_seconds", "_bytes", "_celsius")
    for family in families:
        assert family.name.startswith("flowspec_")
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        assert not family.name.endswith(("_ms", "_mb", "_s"))
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        assert not any(unit in family.name.removesuffix("_total")[:-len(unit)] for unit in units), family.name
    assert len({family.name for family in families}) == len(families)


def test_openmetrics_is_spoken_if_asked_for(server: Running) -> None:
    answer = server.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert {family.name for family in openmetrics.text_string_to_metric_families(answer.text)} >= {
        "flowspec_requests", "flowspec_build", "flowspec_stage_up"}


def test_an_unreadable_accept_header_gets_the_usual_format(server: Running) -> None:
    answer = server.http.get("/metrics", headers={"accept": "text/plain;version=a.b"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")


# Prometheus' own check; prometheus_client's parsers read the page everywhere.
@network_beds.needs("promtool", "" if shutil.which("promtool") else "it is missing (Debian package prometheus)")
def test_promtool_has_nothing_to_say(server: Running) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=server.http.get("/metrics").content,
                          capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def beat(stage: int, since: int, **counters: float) -> Heartbeat:
    return Heartbeat(f"v{stage}", stage, {"since": since, **counters})


def test_counters_that_begin_again_only_grow() -> None:
    """Also where a session's counters are already larger than those of the one before."""
    now = [0.0]
    stages = StageMetrics(1, lambda: {"load": 0.5}, lambda: now[0])

    def page() -> Samples:
        return {(s.name, frozenset(s.labels.items())): s.value for f in stages.collect() for s in f.samples}

    rows = ("flowspec_stage_rows_total", frozenset({("stage", "V1")}))
    up = ("flowspec_stage_up", frozenset({("stage", "V1")}))
    assert (page()[rows], page()[up]) == (0, 0)
    for since, count in ((1, 5), (1, 9), (2, 9), (2, 20), (3, 1)):
        message = beat(1, since, rows=count, temperature_c=40.0)
        stages.observe(HeartbeatArrived(now[0], message))
    assert (page()[rows], page()[up]) == (9 + 20 + 1, 1)
    heat = ("flowspec_device_temperature_celsius", frozenset({("device", "V1")}))
    assert page()[heat] == 40.0
    assert ("flowspec_device_temperature_celsius", frozenset({("device", "D0")})) not in page()
    now[0] = 6.0  # silent for too long: what it said of its board is no news
    assert page()[up] == 0
    assert heat not in page()
    stages.observe(HeartbeatArrived(now[0], beat(1, 3, rows=1)))
    assert page()[up] == 1
    stages.observe(StagesLost(now[0], "V1 is gone"))
    assert page()[up] == 0


def test_dropped_messages_are_counted_by_device_and_reason() -> None:
    metrics = Metrics(2, dict, {})
    told_by_v1 = ((1, 2, 3, 1), (1, 2, 4, 1), (2, 1, 1, 2), (2, 1, 1, 5),
                  (3, 0, 0, 1))  # of another process
    for since, session, stale, frames in told_by_v1:
        metrics.observe(HeartbeatArrived(0.0, beat(1, since, dropped_session=session, dropped_stale=stale,
                                                   dropped_frames=frames)))
    for dropped in (MessagesDropped("session", 1), MessagesDropped("stale", 1), MessagesDropped("frame", 7),
                    MessagesDropped("session", 1)):
        metrics.observe(dropped)
    page, _ = metrics.page("", Readiness(True, "", 0, 0, None))
    told = Read(page.decode())
    assert {device: [told("dropped_messages_total", device=device, reason=reason)
                     for reason in ("session", "stale", "frame")] for device in ("D0", "V1", "V2")} == {
        "D0": [2, 1, 7], "V1": [3, 2, 6], "V2": [0, 0, 0]}


def test_endings_are_told_apart() -> None:
    metrics = Metrics(STAGES, dict, {})
    ends = ((200, "stop"), (200, "length"), (400, None), (429, None), (503, None), (500, None))
    for status, finish in ends:
        metrics.request_ended(AccessRecord("/v1/completions", status=status, finish=finish))
    page, _ = metrics.page("", Readiness(True, "", 0, 0, None))
    told = Read(page.decode())
    for outcome in ("stop", "length", "refused", "queue_full", "unavailable", "failed"):
        assert told("requests_total", path="/v1/completions", outcome=outcome) == 1


def test_gaps_between_tokens() -> None:
    before = time.monotonic()
    record = AccessRecord("/v1/completions")
    begun = time.monotonic()
    assert record.add_tokens(begun + 1.0, 2) == [0]
    assert record.add_tokens(begun + 1.5, 3) == pytest.approx([0.5, 0, 0])
    assert record.add_tokens(begun + 1.75, 1) == pytest.approx([0.25])
    assert record.first_token_s is not None
    assert 1.0 - 1e-6 < record.first_token_s < 1.0 + begun - before + 1e-6
    assert "token_at" not in record.as_json()


def test_tokens_are_counted_while_they_come(server: Running) -> None:
    """So that a rate over a minute shows an answer that takes ten; two that run have a fairness."""
    before = read(server)

    def grown(page: Read, name: str) -> float:
        return page.total(name) - before.total(name)

    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(server.client.completions.create, model=NAME, prompt=f"stream {i}",
                               max_tokens=LONG, stream=True) for i in range(2)]
        with streams[0].result(PATIENCE) as first, streams[1].result(PATIENCE) as second:
            got = sum(1 for stream in (first, second) for _ in zip(stream, range(5), strict=False))
            until(lambda: grown(read(server), "generated_tokens_total") >= got)
            page = read(server)
            assert page("requests_running") == 2
            assert grown(page, "requests_total") == 0
            assert grown(page, "time_to_first_token_seconds_count") == 2
            assert grown(page, "inter_token_latency_seconds_count") >= got - 2
            assert 0 < page("requests_fairness_ratio") <= 1
    until(lambda: read(server)("requests_running") == 0)
    assert not read(server).total("requests_fairness_ratio")


def test_d0_says_for_how_many_rows_its_draft_passes_are_graphs() -> None:
    metrics = Metrics(STAGES, lambda: {"load": 0.5}, {"model": NAME})

    def sizes() -> list[float]:
        page, _ = metrics.page("", Readiness(True, "", 0, 0, None))
        return [value for (name, _), value in Read(page.decode()).samples.items()
                if name == "flowspec_device_graph_sizes"]

    assert sizes() == []
    Observers([metrics]).observe(DrafterLoaded(2))
    assert sizes() == [2.0]

"""What the tests of the page share: a server over real processes that can be watched, and a viewer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from flowspec_edge.d0.observer import Observer, Observers
from flowspec_edge.d0.request import Result
from flowspec_edge.d0.run_events import RunEvent, SessionEnded, StageTimes
from flowspec_edge.drivers.observe.power import PowerMeter
from flowspec_edge.drivers.observe.system_stats import SystemStats
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.serving.admission import Admission
from flowspec_edge.serving.dashboard.feed import Feed
from flowspec_edge.serving.dashboard.live import Description, Live
from kits.http_server import NAME, Running, running, served
from kits.process_clusters import PATIENCE, until

STAGES = 2


class Recorder(Observer):
    """Keeps what the cluster itself says of its requests."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.timed = 0  # segments that a stage told the time of

    def observe(self, event: RunEvent) -> None:
        match event:
            case StageTimes():
                self.timed += 1
            case SessionEnded(result=Result() as result):
                self.results.append(result)


@dataclass
class Watched:
    """A cluster of processes that a page's feed watches, and what came of its requests."""

    model: Path
    clusters: ProcessCluster
    feed: Feed
    recorder: Recorder
    meter: PowerMeter | None = None


@dataclass(kw_only=True)
class Watchable(Watched):
    """The same behind a server."""

    server: Running


@contextmanager
def watched_cluster(model: Path, meter: PowerMeter | None = None, rejoin_within: float = 0.0
                    ) -> Iterator[Watched]:
    """``STAGES`` processes for a model of two layers; ``meter``: of this machine."""
    feed, recorder = Feed(), Recorder()
    observer = Observers([feed, recorder])
    with open_cluster(ClusterSpec(model, STAGES, threads=1, observer=observer, meter=meter,
                                  rejoin_within=rejoin_within)) as clusters:
        yield Watched(model, clusters, feed, recorder, meter)


@contextmanager
def watchable(cluster: Watched, api_key: str | None = None, at_once: int = 1, template: str | None = None
              ) -> Iterator[Watchable]:
    """A server as ``flowspec serve`` has it; without a chat ``template`` it continues texts."""
    what = served(cluster.model, template)
    described = Description(NAME, what.strategy, "fp32", [(0, 1), (1, 2)], None, api_key is not None,
                            what.tokenizer.chats, True, what.strategies, what.context_tokens)

    def page(admission: Admission) -> Live:
        return Live(cluster.feed, admission, described, what.tokenizer.decode,
                    SystemStats(meter=cluster.meter).read)

    with running(what, cluster.clusters, api_key=api_key, at_once=at_once, page=page) as server:
        yield Watchable(**vars(cluster), server=server)


class Watcher:
    """Reads /live in a thread of its own."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._client = httpx2.Client(base_url=url, headers=headers or {}, trust_env=False, timeout=PATIENCE)
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Watcher:
        self._thread.start()
        until(lambda: len(self.events) > 0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave.set()  # seen with the next event, and there is one every second
        self._thread.join(PATIENCE)
        self._client.close()

    @property
    def ended(self) -> bool:
        """Whether the server has ended the stream."""
        return not self._thread.is_alive()

    def named(self, name: str) -> list[dict[str, Any]]:
        """The events of that name so far."""
        return [event for kind, event in self.events if kind == name]

    def wait(self, name: str, **fields: object) -> dict[str, Any]:
        """The first event with these fields, once there is one."""
        def found() -> list[dict[str, Any]]:
            return [event for event in self.named(name) if fields.items() <= event.items()]

        until(lambda: bool(found()))
        return found()[0]

    def _read(self) -> None:
        with self._client.stream("GET", "/live") as answer:
            assert answer.status_code == 200
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self.events.append((name, json.loads(line.removeprefix("data: "))))
                if self._leave.is_set():
                    return

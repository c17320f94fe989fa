"""A served model, for ``flowspec serve`` and ``flowspec draft``: queue, endpoints, metrics, page."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowspec_edge.cli.common.options import Dtype
from flowspec_edge.cli.common.workload import require_runnable
from flowspec_edge.d0.request import SchedulingPolicy
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.draft_kinds import NGRAM
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.strategies.draft_choice import draft_kind
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES, strategy_class
from flowspec_edge.util.terminal import counted_stages

if TYPE_CHECKING:
    from flowspec_edge.d0.observer import Observer
    from flowspec_edge.drivers.processes.spec import ClusterSpec, Processes


@dataclass(frozen=True, kw_only=True)
class Service:
    """A model and the options of its service.

    context       tokens of all requests together that caches hold
    ready_within  seconds for which a token proves that the pipeline works
    cluster       None: the devices are on this machine
    profile       the emulated one; None: real time
    device        torch's, of D0 and stages on this machine; None: as configured on the boards
    forwarded_allow_ips  proxies that are trusted to name their clients
    cors_origins  of web pages that may ask
    """

    model: OpenModel
    name: str
    strategy: str
    stages: int
    dtype: Dtype
    params: Params
    chat_template: str | None
    api_key: str | None
    queue: int
    at_once: int
    context: int
    answer_tokens: int
    ready_within: float
    rejoin_within: float
    scheduling_policy: SchedulingPolicy
    cluster: str | None = None
    profile: str | None = None
    device: str | None = None
    forwarded_allow_ips: str = ""
    cors_origins: Sequence[str] = ()

    def run(self, listener: socket.socket, spec: ClusterSpec, backend: Processes, ready: Callable[[str], None],
            log_json: bool = False, watchers: Sequence[Observer] = ()) -> None:
        """Serve until SIGINT or SIGTERM, in the main thread; ``ready`` gets a line after the first token.

        spec  without what this class determines: how requests share the stages, and who observes them
        """
        from flowspec_edge.d0.capacity import cache_rows
        from flowspec_edge.d0.observer import Observers
        from flowspec_edge.drivers.observe.power import board_meter
        from flowspec_edge.drivers.observe.system_stats import SystemStats
        from flowspec_edge.drivers.processes.clusters import open_cluster
        from flowspec_edge.model.text import Tokenizer
        from flowspec_edge.serving.admission import Admission
        from flowspec_edge.serving.app import make_app
        from flowspec_edge.serving.dashboard.feed import Feed
        from flowspec_edge.serving.dashboard.live import Description, Live
        from flowspec_edge.serving.metrics import Metrics
        from flowspec_edge.serving.openai.prepare import ServedModel
        from flowspec_edge.serving.server import log_to_stderr, serve_app, url_of
        from flowspec_edge.strategies.tree_strategy import TreeStrategy

        served_model = ServedModel(self.model, Tokenizer(self.model, self.chat_template), self.name, self.strategy,
                                   self._runnable(), self.params, self.answer_tokens, self.context)
        served_model.tokenizer.start()
        about = Description(self.name, self.strategy, self.dtype, self._layers(), self.profile,
                            self.api_key is not None, served_model.tokenizer.chats,
                            issubclass(strategy_class(self.strategy), TreeStrategy), served_model.strategies,
                            served_model.context_tokens)
        admission = Admission(served_model.probe(), self.queue, self.ready_within, at_once=self.at_once)
        log_to_stderr(log_json)
        first_line = self._first_line(url_of(listener))
        with board_meter(enabled=self.profile is None) as meter:
            stats, feed = SystemStats(meter=meter).read, Feed()
            metrics = Metrics(self.stages, stats, {
                "model": self.name, "strategy": self.strategy, "stages": str(self.stages),
                "dtype": self.dtype, "emulates": self.profile or ""}, feed.stats.fairness)
            live = Live(feed, admission, about, served_model.tokenizer.decode, stats)
            spec = replace(
                spec, at_once=self.at_once, rejoin_within=self.rejoin_within,
                scheduling_policy=self.scheduling_policy,
                cache_rows=cache_rows(self.context, self.at_once, self.params, self.stages), reserve=True,
                observer=Observers([metrics, feed, *watchers]), meter=meter)
            app = make_app(admission, served_model, self.api_key, metrics=metrics, live=live,
                           cors_origins=self.cors_origins)
            serve_app(listener, app, admission, open_cluster(spec, backend), lambda: ready(first_line),
                      self.forwarded_allow_ips)

    def _first_line(self, url: str) -> str:
        cluster_text = f", cluster {self.cluster}" if self.cluster else ""
        emulated = f", emulating {self.profile}" if self.profile else ""
        device = f", {self.device}" if self.device not in (None, "cpu") else ""
        return (f"flowspec: serving {self.name} ({self.strategy}, {counted_stages(self.stages)}, {self.dtype}"
                f"{device}{cluster_text}{emulated}) at {url}/v1, the page at {url}/")

    def _layers(self) -> list[tuple[int, int]]:
        from flowspec_edge.stage.shard import stage_ranges

        return stage_ranges(self.model, self.stages)

    def _runnable(self) -> list[str]:
        """Return the strategies that need no other models than ``strategy``."""
        strategy_type = strategy_class(self.strategy)
        loaded = {None, NGRAM.name, draft_kind(strategy_type, self.params, self.model)}
        names = []
        for name in dict.fromkeys([*STRATEGIES, strategy_type.name]):
            try:
                other = strategy_class(name)
                require_runnable([other.name], self.model, self.params, "wall", self.stages)
                fits = draft_kind(other, self.params, self.model) in loaded
            except FlowspecError:
                fits = False
            if fits:
                names.append(other.name)
        return names

"""A served model: what ``flowspec serve`` and ``flowspec draft`` have in common.

Knows what answers clients and what watches it: desk, endpoints, metrics, page.  Does not know options,
nor where the devices are.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowspec_edge.cli.measuring import require_runnable
from flowspec_edge.cli.options import Dtype
from flowspec_edge.errors import FlowspecError
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES, draft_kind, strategy_class
from flowspec_edge.strategies.tree_strategy import TreeStrategy

if TYPE_CHECKING:
    from flowspec_edge.runtime.clusters import Sharing
    from flowspec_edge.runtime.observer import Observer
    from flowspec_edge.runtime.request import SharedCluster
    from flowspec_edge.serving.asking import Served
    from flowspec_edge.serving.desk import Desk
    from flowspec_edge.serving.feed import Feed
    from flowspec_edge.serving.live import Description, Live
    from flowspec_edge.serving.metrics import Metrics

    Open = Callable[[Sharing], AbstractContextManager[SharedCluster]]


@dataclass(frozen=True, kw_only=True)
class Service:
    """A model, and how it is served.

    name           what clients call the model
    strategy       for requests that name none
    chat_template  None: the tokenizer's own
    queue          requests that may wait for their turn
    at_once        requests that share the stages
    context        tokens of all requests' texts together that caches hold
    answer_tokens  the longest answer in a chat that sets no limit
    ready_within   seconds for which a token shows that the pipeline works
    rejoin_within  seconds that a lost stage may take to be back
    cluster        the boards' name; None: the devices are on this machine
    profile        whose time they take; None: their own
    device         torch's, of D0 and of stages on this machine; None: as the boards are set up
    """

    model: ModelDir
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
    cluster: str | None = None
    profile: str | None = None
    device: str | None = None

    def run(self, listener: socket.socket, open_cluster: Open, ready: Callable[[str], None],
            log_json: bool = False, watchers: Sequence[Observer] = ()) -> None:
        """Answer until SIGINT or SIGTERM; to be called in the main thread.

        ``open_cluster`` gets what the cluster has to know of this; ``ready`` is called with a line when the
        first token has come through the pipeline, ``watchers`` are told what happens.
        Errors are those of ``serving.server.serve_app``.
        """
        from flowspec_edge.runtime.coordinator import cache_rows
        from flowspec_edge.runtime.observer import Observers
        from flowspec_edge.serving.app import make_app
        from flowspec_edge.serving.asking import Served
        from flowspec_edge.serving.desk import Desk
        from flowspec_edge.serving.live import Description
        from flowspec_edge.serving.server import log_to_stderr, serve_app, url_of
        from flowspec_edge.text import Tokenizer

        served = Served(self.model, Tokenizer(self.model, self.chat_template), self.name, self.strategy,
                        self._runnable(), self.params, self.answer_tokens, self.context)
        about = Description(self.name, self.strategy, self.dtype, self._layers(), self.profile,
                            self.api_key is not None, served.tokenizer.chats,
                            issubclass(strategy_class(self.strategy), TreeStrategy))
        desk = Desk(served.probe(), self.queue, self.ready_within, at_once=self.at_once)
        metrics, feed, live = _watching(about, desk, served)
        opened = open_cluster({
            "at_once": self.at_once, "rejoin_within": self.rejoin_within,
            "cache_rows": cache_rows(self.context, self.at_once, self.params, self.stages),
            "observer": Observers([metrics, feed, *watchers])})
        log_to_stderr(log_json)
        says = self._first_line(url_of(listener))
        serve_app(listener, make_app(desk, served, self.api_key, metrics=metrics, live=live), desk, opened,
                  lambda: ready(says))

    def _first_line(self, url: str) -> str:
        where = f", cluster {self.cluster}" if self.cluster else ""
        emulated = f", emulating {self.profile}" if self.profile else ""
        device = f", {self.device}" if self.device not in (None, "cpu") else ""
        return (f"flowspec: serving {self.name} ({self.strategy}, {self.stages} stages, {self.dtype}"
                f"{device}{where}{emulated}) at {url}/v1, the page at {url}/")

    def _layers(self) -> list[tuple[int, int] | None]:
        """What each stage has; None where all have a slice of every layer."""
        from flowspec_edge.stage.shard import stage_ranges

        if strategy_class(self.strategy).parallelism != "pipeline":
            return [None] * self.stages
        return [*stage_ranges(self.model.stages, self.stages)]

    def _runnable(self) -> list[str]:
        """What a request may name: strategies for which nothing more than for ``strategy`` is loaded."""
        chosen = strategy_class(self.strategy)
        loaded = {None, "ngram", draft_kind(chosen, self.params, self.model)}
        names = []
        for other in STRATEGIES.values():
            try:
                require_runnable([other.name], self.model, self.params, "wall", self.stages)
                fits = (other.parallelism == chosen.parallelism
                        and draft_kind(other, self.params, self.model) in loaded)
            except FlowspecError:
                fits = False
            if fits:
                names.append(other.name)
        return names


def _watching(about: Description, desk: Desk, served: Served) -> tuple[Metrics, Feed, Live]:
    """What is told of the cluster at work: /metrics, and the page's feed with its endpoint."""
    from flowspec_edge.runtime.vitals import Vitals
    from flowspec_edge.serving.feed import Feed
    from flowspec_edge.serving.live import Live
    from flowspec_edge.serving.metrics import Metrics

    vitals, feed, stages = Vitals(), Feed(), len(about.layers)
    metrics = Metrics(stages, vitals.read, {"model": about.model, "strategy": about.strategy,
                                            "stages": str(stages), "dtype": about.dtype,
                                            "emulates": about.profile or ""})
    return metrics, feed, Live(feed, desk, about, served.tokenizer.decode, vitals.read)

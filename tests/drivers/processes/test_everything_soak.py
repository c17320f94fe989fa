"""Everything at once: requests beside one another, texts that go on, clients that leave or fail, what cannot
be run, and stages that are lost meanwhile.  Every answer is plain decoding's, and all is given back."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from kits.process_clusters import PATIENCE

from flowspec_edge.d0.capacity import session_rows
from flowspec_edge.d0.observer import Observer, Observers
from flowspec_edge.d0.request import ClusterState, Request, RequestHandle, Result
from flowspec_edge.d0.run_events import HeartbeatArrived, RunEvent, SessionEnded, SessionOpened, StagesLost
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.serving.dashboard.feed import Feed
from flowspec_edge.serving.metrics import Metrics
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES

SMALL = Params(segment=4, width=4, tree_size=20, depth=3, prefill_chunk=16)
SAMPLINGS = (Sampling(), Sampling(1.0, seed=11), Sampling(0.7, top_p=0.9, seed=12))
_LONGEST = 300  # tokens of a prompt
_MOST = 40  # tokens asked for, but by those that go away
_TOO_MANY = 1500  # that those may ask for


class Held(Observer):
    """Whose the requests are that are open, and the most that a stage's caches took."""

    def __init__(self) -> None:
        self.open: dict[int, DraftSession] = {}
        self.most_bytes = 0.0
        self.losses = 0

    def observe(self, event: RunEvent) -> None:
        match event:
            case SessionOpened():
                draft_session = event.draft_session()
                assert draft_session is not None
                self.open[event.session] = draft_session
            case SessionEnded(result=Result()):
                del self.open[event.session]
            case HeartbeatArrived():
                self.most_bytes = max(self.most_bytes, event.beat.counters.get("cache_bytes", 0.0))
            case StagesLost():
                self.losses += 1
                self.open = {n: one for n, one in self.open.items() if one.finished}


@dataclass(eq=False)
class _Asked:
    request: Request
    ticket: RequestHandle
    came: list[int] = field(default_factory=list)
    cancel_at: int | None = None  # tokens
    fail_at: int | None = None


class ListenerFailed(Exception):
    """What a listener of ours raises."""


class Mix:
    """A client that does everything at once, by a seed; :meth:`run` drives the cluster."""

    def __init__(self, cluster: ProcessCluster, plain: PlainDecoder, seed: int, requests: int, kills: int,
                 strategies: list[str], vocabulary: int) -> None:
        self.answered: list[Result] = []  # that are complete
        self._cluster = cluster
        self._plain = plain
        self._chance = random.Random(seed)
        self._left, self._kills = requests, kills
        self._kill_at = max(1, requests // (kills + 1))
        self._strategies = strategies
        self._vocabulary = vocabulary
        self._texts: list[list[int]] = []
        self._open: list[_Asked] = []
        self._seed = seed

    def run(self) -> None:
        self._cluster.serve(self._turn)

    def _turn(self) -> bool:
        """One step of the client's; whether it is done."""
        for asked in [asked for asked in self._open if asked.ticket.done()]:
            self._open.remove(asked)
            self._check(asked)
        chance = self._chance
        if self._left and len(self._open) < 6 and chance.random() < 0.3:
            self._left -= 1
            self._ask()
        if self._open and chance.random() < 0.004:
            chance.choice(self._open).ticket.cancel()
        if self._kills and self._left < self._kills * self._kill_at and self._open and chance.random() < 0.05:
            self._kills -= 1
            os.kill(chance.choice(self._cluster.pids), signal.SIGKILL)
        return not (self._left or self._open)

    def _ask(self) -> None:
        chance = self._chance
        request = Request(self._prompt(), chance.choice(self._strategies), chance.randint(1, _MOST),
                          chance.choice(SAMPLINGS), SMALL, logprobs=chance.choice((None, 0, 2)),
                          stop_ids=frozenset({5, 6}) if chance.random() < 0.2 else frozenset())
        kind = chance.random()
        cancel_at = fail_at = None
        if kind < 0.06:
            request = replace(request, prompt=[*request.prompt, self._vocabulary])
        elif kind < 0.1:
            request = replace(request, max_new_tokens=0)
        elif kind < 0.14:  # more than there is room for
            request, cancel_at = replace(request, max_new_tokens=_TOO_MANY), chance.randint(0, 20)
        elif kind < 0.3:
            cancel_at = chance.randint(0, 10)
        elif kind < 0.36:
            fail_at = chance.randint(1, 5)
        asked = _Asked(request, None, [], cancel_at, fail_at)  # type: ignore[arg-type]

        def on_tokens(new: list[int]) -> None:
            asked.came += new
            if asked.fail_at is not None and len(asked.came) >= asked.fail_at:
                raise ListenerFailed
            if asked.cancel_at is not None and len(asked.came) >= asked.cancel_at:
                asked.ticket.cancel()

        asked.ticket = self._cluster.submit(request, on_tokens)
        if cancel_at == 0:
            asked.ticket.cancel()
        self._open.append(asked)

    def _prompt(self) -> list[int]:
        chance = self._chance

        def some(count: int) -> list[int]:
            return [chance.randrange(1, self._vocabulary) for _ in range(count)]

        if self._texts and chance.random() < 0.75:
            text = chance.choice(self._texts[-6:])
            kept = text[: chance.randint(len(text) // 2, len(text))] if chance.random() < 0.4 else text
            if len(kept) < _LONGEST:
                return [*kept, *some(chance.randint(1, 6))]
        return some(chance.choice((1, 20, 40, 90)))

    def _check(self, asked: _Asked) -> None:
        request, ticket = asked.request, asked.ticket
        what = f"seed {self._seed}: {request}"
        bad = request.max_new_tokens < 1 or max(request.prompt) >= self._vocabulary
        try:
            result = ticket.result(0)
        except UsageError:
            assert bad, what
            return
        except ListenerFailed:
            assert asked.fail_at is not None, what
            result = None
        assert not bad or (result and result.finish_reason == "cancelled" and not asked.came), what
        tokens = asked.came if result is None else result.tokens
        length = len(tokens) if result is None or result.finish_reason == "cancelled" \
            else request.max_new_tokens
        if not bad:
            text, why = self._plain.generate(list(request.prompt), max(1, length), request.sampling,
                                             request.stop_ids)
            assert tokens == text[:length], what
            if result and result.finish_reason != "cancelled":
                assert result.finish_reason == why, what
        assert tokens[: len(asked.came)] == asked.came, what
        if result and result.finish_reason != "cancelled":
            assert asked.came == tokens, what
            self.answered.append(result)
        if request.logprobs is None:
            assert ticket.likelihoods == [], what
        else:
            assert [likely.token for likely in ticket.likelihoods] == tokens, what
            assert all(len(likely.top) == request.logprobs for likely in ticket.likelihoods), what
            if request.logprobs and request.sampling == Sampling():
                assert [likely.top[0][0] for likely in ticket.likelihoods] == tokens, what
        if tokens:
            self._texts.append([*request.prompt, *tokens])


def largest(stages: int) -> int:
    """Rows of the largest request that a Mix asks for."""
    return session_rows(Request([0] * (_LONGEST + 6), max_new_tokens=_TOO_MANY, params=SMALL), stages)


ROW = 4 * 2 * 2 * 16 * 4  # bytes in one of two stages: layers, key and value, kv heads, head_dim, fp32
STAGES = 2
BUDGET = 2 * 1240  # rows: two requests fit, and one that asks for too much does not
PIPELINED = [name for name, cls in STRATEGIES.items() if cls.parallelism == "pipeline"]


def everything(model: Path, seed: int, requests: int, kills: int, strategies: list[str],
               vocabulary: int = 97) -> None:
    held, feed, metrics = Held(), Feed(), Metrics(STAGES, dict, {})
    feed.watched = True
    with ProcessCluster(ClusterSpec(model, STAGES, threads=1, at_once=4, cache_rows=BUDGET,
                                    rejoin_within=PATIENCE, observer=Observers([held, feed, metrics]))
                        ).start() as cluster:
        mix = Mix(cluster, PlainDecoder(model), seed, requests, kills, strategies, vocabulary)
        mix.run()
        assert cluster.status.state is ClusterState.RUNNING
        assert not cluster.busy
        assert cluster.running is not None
        pool = cluster.running.core.pool
        assert held.open == feed._open == {}
        assert pool._open == {}
        assert pool.rows <= BUDGET
        if vocabulary == 97:  # ROW is that model's
            assert held.most_bytes <= largest(STAGES) * ROW
        assert held.losses >= bool(kills)
        assert mix.answered
        assert requests < 20 or any(result.stats.reused for result in mix.answered)


def test_everything_for_a_moment(small_vocabulary_model: Path) -> None:
    everything(small_vocabulary_model, 4, 7, 1, ["flowspec"], vocabulary=8)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_everything(tiny_model: Path, seed: int) -> None:
    everything(tiny_model, seed, 60, 4, PIPELINED)

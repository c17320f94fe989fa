"""Everything at once: requests beside one another, texts that go on, clients that leave or fail, what cannot
be run, and stages that are lost meanwhile.  Every answer is plain decoding's, and all is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
from clusterkit import PATIENCE
from mixkit import Held, Mix, largest

from flowspec_edge.runtime.cluster.process_cluster import ProcessCluster
from flowspec_edge.runtime.cluster.spec import ClusterSpec
from flowspec_edge.runtime.observe.observer import Observers
from flowspec_edge.runtime.plain import PlainDecoder
from flowspec_edge.runtime.request import ClusterState
from flowspec_edge.serving.dashboard.feed import Feed
from flowspec_edge.serving.metrics import Metrics
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.strategies.registry import STRATEGIES

ROW = 4 * 2 * 2 * 16 * 4  # bytes in one of two stages: layers, key and value, kv heads, head_dim, fp32
STAGES = 2
BUDGET = 2 * 1240  # rows: two requests fit, and one that asks for too much does not
PIPELINED = [name for name, cls in STRATEGIES.items() if cls.parallelism == "pipeline"]


def everything(model: Path, seed: int, requests: int, kills: int, strategies: list[str],
               parallelism: Parallelism = "pipeline", vocabulary: int = 97) -> None:
    held, feed, metrics = Held(), Feed(), Metrics(STAGES, dict, {})
    feed.watched = True
    with ProcessCluster(ClusterSpec(model, STAGES, threads=1, at_once=4, cache_rows=BUDGET,
                                    rejoin_within=PATIENCE, observer=Observers([held, feed, metrics])),
                        parallelism=parallelism) as cluster:
        mix = Mix(cluster, PlainDecoder(model), seed, requests, kills, strategies, vocabulary)
        mix.run()
        assert cluster.status.state is ClusterState.RUNNING
        assert not cluster.busy
        pool = cluster._core.pool
        assert held.open == feed._open == metrics._acceptance._rounds == {}
        assert pool._open == {}
        assert pool.rows <= BUDGET
        if vocabulary == 97 and parallelism == "pipeline":  # ROW is that model's
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


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["megatron", "galaxy"])
def test_everything_in_a_group(tiny_model: Path, kind: Parallelism) -> None:
    everything(tiny_model, 10, 10, 1, [kind], parallelism=kind)

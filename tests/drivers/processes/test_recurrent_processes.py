"""Recurrent layers over real processes: a killed stage's states are computed again, and the next turn of a
chat begins at a snapshot."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.family_checkpoints import SMALL, VOCAB, family_dir, generated
from kits.lost_stages import Striker
from kits.process_clusters import PATIENCE, on_third
from kits.stages import random_tokens

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.layers.recurrent import GRID


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_dir("qwen3.5", tmp_path_factory.mktemp("recurrent"))


@pytest.fixture(scope="module")
def striker() -> Striker:
    return Striker()


@pytest.fixture(scope="module")
def cluster(model: Path, striker: Striker) -> Iterator[ProcessCluster]:
    spec = ClusterSpec(model, 2, threads=1, cache_rows=2400, rejoin_within=PATIENCE, observer=striker)
    with ProcessCluster(spec).start() as made:
        yield made


def test_a_killed_stage_changes_no_token(cluster: ProcessCluster, model: Path, striker: Striker) -> None:
    """In the middle of two answers; the drawn one is that of plain pipelined decoding before the loss."""
    prompt, drawn = random_tokens(40, VOCAB, seed=1), Sampling(temperature=1.0, seed=4)
    plain = cluster.generate(Request(prompt, "autoregressive", 20, drawn, SMALL)).tokens
    before = cluster.pids
    greedy, sampled = (Request(prompt, "flowspec_plus", 20, how, SMALL) for how in (Sampling(), drawn))
    handles = [cluster.submit(greedy, on_third(lambda: os.kill(before[1], signal.SIGKILL))),
               cluster.submit(sampled)]
    cluster.serve(lambda: all(handle.done() for handle in handles))
    assert [handle.result().tokens for handle in handles] == [generated(model / "target", prompt, 20), plain]
    assert len(striker.losses) == 1
    assert cluster.pids[1] != before[1]


def test_the_next_turn_begins_at_a_snapshot(cluster: ProcessCluster, model: Path) -> None:
    prompt = random_tokens(GRID + 40, VOCAB, seed=2)
    first = cluster.generate(Request(prompt, "flowspec_plus", 8, params=SMALL))
    turn = [*prompt, *first.tokens, *random_tokens(9, VOCAB, seed=3)]
    second = cluster.generate(Request(turn, "flowspec_plus", 8, params=SMALL))
    assert (first.stats.reused, second.stats.reused) == (0, len(prompt) - 16)  # a template may change those
    for text, result in ((prompt, first), (turn, second)):
        assert result.tokens == generated(model / "target", text, 8)

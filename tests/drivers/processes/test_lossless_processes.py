"""Every strategy at every stage count over real processes: `make soak`; a few of them in every run
are in drivers/processes/test_process_cluster.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.registry import STRATEGIES, groups

PROMPT = [(11 * i + 5) % 97 for i in range(70)]  # two chunks
SAMPLINGS = (Sampling(), Sampling(1.0, seed=11), Sampling(1.0, top_p=0.9, seed=12))


@pytest.mark.soak
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_strategy(eight_layers: Path, stages: int) -> None:
    plain = PlainDecoder(eight_layers)
    expected = [plain.generate(PROMPT, 12, sampling) for sampling in SAMPLINGS]
    with open_cluster(ClusterSpec(eight_layers, stages, threads=1)) as clusters:
        for name in [name for name in STRATEGIES if not groups([name])]:
            for sampling, (tokens, reason) in zip(SAMPLINGS, expected, strict=True):
                result = clusters.generate(Request(PROMPT, name, 12, sampling))
                assert (result.tokens, result.finish_reason) == (tokens, reason), (name, sampling)

"""Every strategy, greedy and sampled, gives on the strict device the tokens that it gives on the CPU."""

from __future__ import annotations

import pytest

from flowspec_edge.runtime.request import Request
from flowspec_edge.runtime.virtual.cluster import VirtualCluster
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.registry import STRATEGIES

SAMPLINGS = {"greedy": Sampling(), "T=1": Sampling(1.0, seed=1), "top-p": Sampling(1.0, top_p=0.9, seed=1),
             "top-k top-p": Sampling(0.8, 50, 0.9, seed=2)}
pytestmark = pytest.mark.strict


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_the_cpus(cpu: VirtualCluster, cuda: VirtualCluster, prompt: list[int], strategy: str,
                             sampling: Sampling) -> None:
    request = Request(prompt, strategy, 16, sampling)
    found = cuda.generate(request).tokens
    assert found == cpu.generate(request).tokens
    assert len(found) == 16

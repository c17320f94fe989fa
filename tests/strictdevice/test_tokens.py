"""Every strategy, greedy and sampled, gives on the strict device the tokens that it gives on the CPU."""

from __future__ import annotations

import pytest
from kits.tiny_model_dir import tiny_eagle3, tiny_model_dir

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES
from strictdevice import counting

SAMPLINGS = {"greedy": Sampling(), "T=1": Sampling(1.0, seed=1), "top-p": Sampling(1.0, top_p=0.9, seed=1),
             "top-k top-p": Sampling(0.8, 50, 0.9, seed=2)}
LOGITS = 4 * 4096  # bytes of a row of the demonstration's vocabulary in float32
pytestmark = pytest.mark.strict


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_the_cpus(cpu: VirtualCluster, cuda: VirtualCluster, prompt: list[int], strategy: str,
                             sampling: Sampling) -> None:
    request = Request(prompt, strategy, 16, sampling)
    with counting() as log:
        found = cuda.generate(request).tokens
    assert found == cpu.generate(request).tokens
    assert len(found) == 16
    if sampling.greedy:  # sampled, the sampler looks at the row of a tie
        assert all(event.nbytes < LOGITS for event in log.of("download, waits")), "logits came down"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[VirtualCluster]:
    """On the CPU and on the strict device, with every kind of draft."""
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2)
    tiny_eagle3(path)
    return [VirtualCluster(path, 2, load_profile("paper-7b"), device=device) for device in ("cpu", "cuda")]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("draft", ["eagle3", "lm", "ngram"])
def test_so_they_are_with_every_kind_of_draft(pair: list[VirtualCluster], draft: str, sampling: Sampling
                                              ) -> None:
    request = Request([3, 7, 11, 2, 7, 11], "flowspec", 12, sampling, Params(draft=draft))
    on_cpu, on_cuda = (cluster.generate(request).tokens for cluster in pair)
    assert on_cuda == on_cpu
    assert len(on_cuda) == 12

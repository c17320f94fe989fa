"""Where requests wait for the device, and why; anywhere else a wait or a pageable copy is a fault."""

from __future__ import annotations

import pytest

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.params import Params
from strictdevice import counting
from strictdevice.conftest import DEMO

pytestmark = pytest.mark.strict

# By kind, and file and function of the package.
ALLOWED = {
    ("wait", "stage/forward.py:enqueued"): "the host is two layers ahead, so that it hears a Cancel",
    ("wait", "stage/forward.py:finish"): "the hidden states go to the next stage",
    ("download, waits", "sampling/sampler.py:fetched"): "the tree grows by the best children",
    ("download, waits", "sampling/sampler.py:choose"): "an output's tokens decide what is drafted next",
    ("download, waits", "sampling/sampler.py:log_probs"): "they go to the client with their tokens",
    ("wait", "util/torchdevice.py:release"): "a virtual stage's caches grow: none are allocated before",
}
GREEDY, DRAWN = Sampling(), Sampling(1.0, seed=1)
NUCLEUS = Sampling(1.0, top_p=0.9, seed=1)


def requests(prompt: list[int], case: str) -> list[Request]:
    if case == "three at once":
        return [Request(prompt + prompt[:more], "flowspec_plus", 16, DRAWN) for more in range(3)]
    if case == "a grammar":
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        model = OpenModel(DEMO)
        grammar = Tokenizer(model).grammars.json_schema(schema, model.stop_ids)
        return [Request(prompt, "flowspec_plus", 16, GREEDY, stop_ids=model.stop_ids, grammar=grammar)]
    return [{
        "greedy": Request(prompt, "flowspec_plus", 16, GREEDY),
        "T=1": Request(prompt, "flowspec_plus", 16, DRAWN),
        "T=1 top-p": Request(prompt, "flowspec", 16, NUCLEUS),
        "T=0.8 top-k top-p": Request(prompt, "flowspec_plus", 16, Sampling(0.8, 50, 0.9, seed=2)),
        "log-probabilities": Request(prompt, "flowspec_plus", 16, GREEDY, logprobs=3),
        "a small draft model": Request(prompt, "flowspec", 16, GREEDY, Params(draft="lm")),
        "SPD": Request(prompt, "spd", 16, DRAWN),
    }[case]]


@pytest.mark.parametrize("case", ["greedy", "T=1", "T=1 top-p", "T=0.8 top-k top-p", "log-probabilities",
                                  "a grammar", "a small draft model", "SPD", "three at once"])
def test_requests_wait_only_where_they_must(cuda: VirtualCluster, prompt: list[int], case: str) -> None:
    given = requests(prompt, case)
    cuda.generate_many([Request(prompt, given[0].strategy, 1, params=given[0].params)])  # loads its draft
    with counting() as log:
        results = cuda.generate_many(given)
    assert all(result.tokens for result in results)
    elsewhere = {(event.kind, event.name, event.place, event.trail) for event in log.waits
                 if (event.kind, event.place) not in ALLOWED}
    assert not elsewhere
    assert not log.of("note")
    assert log.of("upload")
    assert log.of("download")

"""What a request learns about its draft model is for later requests: over processes, or if asked in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.run_events import RunEvent, SessionOpened
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.strategies.params import Params
from flowspec_edge.tree.acceptance import AcceptanceWeights, Case, _Weights

INITIAL = AcceptanceWeights().weights(True)
PROMPT = [5, 17, 42, 3, 3, 58, 11, 3, 3, 58]


class Weights(Observer):
    """What earlier requests have left, at the beginning of each."""

    def __init__(self) -> None:
        self.at_begin: list[dict[Case, _Weights]] = []

    def observe(self, event: RunEvent) -> None:
        if isinstance(event, SessionOpened) and event.request.strategy == "flowspec_plus":
            session = event.draft_session()
            assert session is not None
            self.at_begin.append(dict(session.strategy.pipeline.acceptance.weights(greedy=True)))


def requests(carry: bool | None) -> list[Request]:
    return [Request(PROMPT, "flowspec_plus", 12, params=Params(plus_carry=carry)) for _ in range(2)]


@pytest.mark.parametrize(("carry", "carried"), [(None, False), (False, False), (True, True)])
def test_in_virtual_time_requests_are_independent_unless_asked(tiny_model: Path, carry: bool | None, carried: bool
                                                              ) -> None:
    seen = Weights()
    cluster = VirtualCluster(tiny_model, 2, load_profile("paper-7b"), observer=seen)
    texts = [cluster.generate(request).tokens for request in requests(carry)]
    assert texts[0] == texts[1]
    first, second = seen.at_begin
    assert first == INITIAL
    assert (second != INITIAL) == carried


@pytest.mark.parametrize(("carry", "carried"), [(None, True), (False, False)])
def test_over_processes_they_are_not_unless_asked(tiny_model: Path, carry: bool | None, carried: bool) -> None:
    seen = Weights()
    with open_cluster(ClusterSpec(tiny_model, 2, threads=1, observer=seen)) as cluster:
        texts = [cluster.generate(request).tokens for request in requests(carry)]
    assert texts[0] == texts[1]
    first, second = seen.at_begin
    assert first == INITIAL
    assert (second != INITIAL) == carried

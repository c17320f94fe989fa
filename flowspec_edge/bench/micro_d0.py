"""D0's own bookkeeping per turn: walk, prune, merge, segment, encode, at the paper's tree size.

Runs FlowSpec and FlowSpec+ against a synthetic text and drafter, so that neither models nor links are in the
figure, and times what a turn costs D0 beside its forward passes.  Run it with
``python -m flowspec_edge.bench.micro_d0``.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

import numpy as np

from flowspec_edge.messages import Segment
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.transport.codec import encode
from flowspec_edge.tree.ledger import Ledger
from flowspec_edge.tree.requests import DraftRequest, Expansion

_VOCABULARY = 4096
_WANTED_MS = {"flowspec": 1.0, "flowspec_plus": 2.0}  # at L 80, k 10; at 10 nodes a pass
_PASSES = 5  # that fit into a turn of paper-7b


class _Text:
    """A fixed random text; a drafted child is the true one with the probability it claims."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.tokens = self._rng.integers(0, _VOCABULARY, 100_000).tolist()

    def expansion(self, request: DraftRequest) -> Expansion:
        k = request.children
        tokens = self._rng.integers(0, _VOCABULARY, (len(request.nodes), k)).astype(np.int32)
        top = self._rng.beta(1.6, 0.6, len(request.nodes))
        p = np.concatenate((top[:, None], np.outer(1 - top, 0.5 ** np.arange(1, k))), axis=1)
        for row, node in enumerate(request.nodes):
            rank = int(np.searchsorted(np.cumsum(p[row]), self._rng.random()))
            if rank < k:
                tokens[row, rank] = self.tokens[node.position + 1]
        return Expansion(tokens, np.log(np.sort(p, axis=1)[:, ::-1]))


def bookkeeping(name: str, turns: int = 400, stages: int = 4, seed: int = 0) -> list[float]:
    """Milliseconds of bookkeeping in each of ``turns`` turns of a pipeline that is always full."""
    text = _Text(seed)
    ledger = Ledger()
    strategy = strategy_class(name)(Params(), ledger, Pipeline(stages))
    strategy.begin((), Sampling(), _VOCABULARY)
    strategy.start(text.tokens[0], 0)
    pipeline: deque[Segment] = deque()
    costs = []
    for _ in range(turns):
        spent = 0.0
        if len(pipeline) == stages:
            segment = pipeline.popleft()
            numbers = segment.numbers.tolist()
            # What the target would say; rows off the true path are answered too, as in life.
            successors = [text.tokens[p + 1] for p in segment.positions.tolist()]
            begin = time.perf_counter()
            strategy.verified(segment.run, numbers, successors)
            for message in strategy.controls():
                encode(message)
            spent += time.perf_counter() - begin
        begin = time.perf_counter()
        sent = strategy.next_segment() or ledger.seal()
        encode(sent)
        spent += time.perf_counter() - begin
        pipeline.append(sent)
        for _ in range(_PASSES):  # the passes of one turn: only what surrounds them is timed
            begin = time.perf_counter()
            request = strategy.next_draft()
            spent += time.perf_counter() - begin
            if request is None:
                break
            expansion = text.expansion(request)
            begin = time.perf_counter()
            strategy.drafted(request, expansion)
            spent += time.perf_counter() - begin
        costs.append(spent * 1e3)
    return costs[2 * stages :]


def main() -> None:
    """Print the figures."""
    for name, wanted in _WANTED_MS.items():
        costs = bookkeeping(name)
        p90 = statistics.quantiles(costs, n=10)[-1]
        print(f"D0's bookkeeping per turn, {name}: median {statistics.median(costs):.3f} ms, "
              f"p90 {p90:.3f} ms (wanted: median at most {wanted:.0f} ms)")


if __name__ == "__main__":
    main()

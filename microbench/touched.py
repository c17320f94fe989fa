"""How many experts rows share: siblings, chains, FlowSpec+'s segments and batches, against independent rows.

Requests run in virtual time over four stages of the sparse demonstration model (``--model``); all layers
count.  Of FlowSpec+, whose segments have 16 rows here: "siblings" follow one token, "segment" are the n rows
that were numbered first, "likeliest of K" the first rows of K requests in one pass.  "chain": consecutive
rows of the prompts; "oracle": of the first 2 n rows of a segment those n that share most in a stage, whatever
they are worth.  U(n) is of independent rows, c the correlation (``model.experts``); profiles have
that of a segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from flowspec_edge.boards.planning.testbed import profile_or_testbed
from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.messages import Segment, unpack_bits
from flowspec_edge.model.expert_counts import independent
from flowspec_edge.model.experts import computed
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.engine import Poll, SegmentResult, StageEngine
from flowspec_edge.stage.preparation import shard_of
from flowspec_edge.strategies.params import Params
from microbench._common import Row, demo_prompts, options, print_rows

TESTBED = "orin-nano-8gb-super:5/qwen3-30b-a3b/int4"
SIZES = (2, 3, 4, 6, 8, 12, 16)
_TOGETHER = 4
_LONGEST = 17  # rows of a segment: longer ones are prompts


class Counts:
    """The counts of experts in passes, by the passes' kind and rows.

    Each is (touched, expected, spread), as sums over layers and passes.
    """

    def __init__(self) -> None:
        self.sums: defaultdict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0] * 4)

    def add(self, kind: str, experts: int, expert_ids: Tensor) -> None:
        """Count the experts ``expert_ids`` [n, k] of a layer."""
        n, k = expert_ids.shape
        expected = independent(experts, k, n)
        for i, value in enumerate((len(expert_ids.unique()), expected, expected - k, 1)):
            self.sums[kind, n][i] += value

    def table(self, kind: str) -> Iterator[Row]:
        sizes = {n: sums for (name, n), sums in self.sums.items() if name == kind and n > 1}
        for n in sorted(sizes.keys() & set(SIZES)):
            distinct, expected, spread, passes = sizes[n]
            yield f"{kind}, rows: {n}: experts touched a layer", distinct / passes, ""
            yield f"  by independent rows: U({n})", expected / passes, ""
            yield "  correlation c", (expected - distinct) / spread, ""


class Counting(StageEngine):
    counts: Counts

    def compute(self, segments: Sequence[Segment], poll: Poll | None = None) -> list[SegmentResult]:
        results = super().compute(segments, poll)
        numbers = sum(len(segment.numbers) for segment in segments)
        layers = [(experts, expert_ids) for experts, expert_ids in computed(shard_of(self).modules)
                  if len(expert_ids) == numbers]  # else rows died meanwhile
        for experts, expert_ids in layers:
            self._count(segments, experts, expert_ids)
        for n in SIZES if len(segments) == 1 and numbers <= _LONGEST else ():
            if 2 * n <= numbers:
                rows = _alike([expert_ids[: 2 * n] for _, expert_ids in layers], n)
                for experts, expert_ids in layers:
                    self.counts.add("oracle", experts, expert_ids[rows])
        return results

    def _count(self, segments: Sequence[Segment], experts: int, expert_ids: Tensor) -> None:
        first = segments[0]
        if len(segments) > 1:
            if all(len(segment.numbers) for segment in segments):
                lengths = torch.tensor([len(segment.numbers) for segment in segments])
                starts = lengths.cumsum(0) - lengths
                self.counts.add(f"likeliest of {len(segments)}", experts, expert_ids[starts])
        elif len(expert_ids) > _LONGEST:
            for n in SIZES:
                for start in range(0, len(expert_ids) - n + 1, n):
                    self.counts.add("chain", experts, expert_ids[start : start + n])
        else:
            for n in SIZES:
                if n <= len(expert_ids):
                    self.counts.add("segment", experts, expert_ids[:n])
            for rows in _siblings(first):
                for n in range(2, len(rows) + 1):
                    self.counts.add("siblings", experts, expert_ids[rows[:n]])


def _alike(layers: Sequence[Tensor], n: int) -> list[int]:
    """Choose ``n`` rows, the first one and then always that with the fewest new experts in all ``layers``."""
    rows = [0]
    while len(rows) < n:
        rows.append(min(set(range(len(layers[0]))) - set(rows),
                        key=lambda row: sum(len(expert_ids[[*rows, row]].unique()) for expert_ids in layers)))
    return rows


def _siblings(segment: Segment) -> Iterator[list[int]]:
    """Yield the rows after the same token."""
    bits = unpack_bits(segment.bits, 8 * segment.bits.shape[1])
    parents = []
    for row, number in zip(bits, segment.numbers.tolist(), strict=True):
        ancestors = row.nonzero()[0] + segment.base
        parents.append(int(max(ancestors[ancestors < number], default=-1)))
    for _, rows in groupby(sorted(range(len(parents)), key=parents.__getitem__), parents.__getitem__):
        if len(siblings := list(rows)) > 1:
            yield siblings


class CountingCluster(VirtualCluster):
    def __init__(self, model: Path, counts: Counts) -> None:
        self._counts = counts
        super().__init__(model, 4, profile_or_testbed(TESTBED))

    def _engines_of(self, stages: int) -> list[StageEngine]:
        if stages not in self._engines:
            engines = [Counting(engine.model) for engine in self._model.engines(stages)]
            for engine in engines:
                engine.counts = self._counts
            self._engines[stages] = list(engines)
        return self._engines[stages]


def main() -> None:
    args = options(__doc__, model="demo-sparse", prompts=8, tokens=48)
    counts = Counts()
    cluster = CountingCluster(resolve_model(args.model).path, counts)
    params = Params(plus_without="curve")
    for temperature in (0.0, 1.0):
        requests = [Request(prompt[-64:], "flowspec_plus", args.tokens, params=params,
                            sampling=Sampling(temperature=temperature, seed=1))
                    for prompt in demo_prompts(args.prompts)]
        for request in requests:
            cluster.generate(request)
        for start in range(0, len(requests), _TOGETHER):
            cluster.generate_many(requests[start : start + _TOGETHER])
    for kind in sorted({kind for kind, _ in counts.sums}):
        print_rows(counts.table(kind))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

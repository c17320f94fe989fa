"""The planner against all possible splits on small instances, and its reasons for unused boards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.planned_boards import D0_MB, MB, board, problem, size

from flowspec_edge.boards.planning.layer_split import plan_as_listed
from flowspec_edge.boards.planning.one_board import single_board_headroom
from flowspec_edge.boards.planning.planner import (
    CandidateBoard,
    DoesNotFit,
    PipelinePlan,
    SplitProblem,
    most_layers,
    plan,
    search,
)
from flowspec_edge.boards.planning.throughput import Throughput
from flowspec_edge.errors import UsageError

NS = 1e-9


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as ``parts`` positive numbers, in order."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(edges))


def fits(b: CandidateBoard, weights_and_cache: int) -> bool:
    assert b.profile.memory is not None
    return weights_and_cache + b.profile.memory.process_mb * MB <= b.profile.memory.usable_mb * MB


def objectives(p: SplitProblem, d0: CandidateBoard, stages: tuple[CandidateBoard, ...],
               layers: tuple[int, ...]) -> tuple[float, float, int] | None:
    """(slowest stage, latency of a segment, boards) from the profiles; None if memory is too small."""
    s, rows = p.size, p.context + p.tentative
    if not fits(d0, s.lm_head + s.draft + rows * s.draft_kv_row + D0_MB * MB):
        return None
    for b, k in zip(stages, layers, strict=True):
        if not fits(b, k * (s.layer + rows * s.kv_row) + s.norm):
            return None
    computes = [b.profile.stage_seconds(p.rows, k, p.context) for b, k in zip(stages, layers, strict=True)]
    bits = p.rows * s.hidden_width * 2 * 8
    ring = [*stages, d0]
    hops = [max(bits / (b.profile.link.mbps * 1e6) + b.profile.link.latency_ms / 1e3 for b in pair)
            for pair in pairwise(ring)]
    hops.append(max(d0.profile.link.latency_ms, stages[0].profile.link.latency_ms) / 1e3)
    busy = max(bits / (b.profile.link.mbps * 1e6) for b in ring)
    way = sum(computes) + sum(hops) + d0.profile.lm_head.ms / 1e3
    return max(*computes, busy), way, len(ring)


def every_split(boards: list[CandidateBoard], p: SplitProblem
                ) -> Iterator[tuple[CandidateBoard, tuple[float, float, int]]]:
    """(D0, its objectives) of every D0, subset, order and composition that fits."""
    for d0 in (b for b in boards if b.role != "verify"):
        if any(b.role == "draft" and b is not d0 for b in boards):
            continue
        rest = [b for b in boards if b is not d0]
        for n in range(1, min(len(rest), p.size.layers) + 1):
            for stages in permutations(rest, n):
                for layers in compositions(p.size.layers, n):
                    if found := objectives(p, d0, stages, layers):
                        yield d0, found


def brute_force(boards: list[CandidateBoard], p: SplitProblem) -> tuple[float, float, int] | None:
    return min((found for _, found in every_split(boards, p)), default=None)


def of_plan(p: SplitProblem, made: PipelinePlan) -> tuple[float, float, int] | None:
    return objectives(p, made.d0, tuple(s.board for s in made.stages),
                      tuple(hi - lo for lo, hi in (s.layers for s in made.stages)))


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[CandidateBoard], SplitProblem]:
    """Two to four boards for which memory, speed and ports all matter, with ties."""
    latency = draw(st.booleans())
    roles = st.sampled_from(["auto", "auto", "auto", "verify"])
    boards = [board(
        f"b{i}", role=draw(roles), layer_ms=draw(st.sampled_from([1.0, 1.5, 2.0, 3.0, 7.0])),
        usable_mb=draw(st.integers(3, 26)) * 100.0, process_mb=100.0,
        overhead_ms=draw(st.sampled_from([0.0, 0.5, 2.0])), lm_head_ms=draw(st.sampled_from([1.0, 4.0])),
        **draw(st.sampled_from([{"mbps": 1000, "latency_ms": 0.2}, {"mbps": 400, "latency_ms": 0.2 + latency},
                                {"mbps": 125, "latency_ms": 0.2 + 2 * latency}])))
        for i in range(draw(st.integers(2, 4)))]
    of = size(layers=draw(st.integers(1, 6)), layer_mb=200,
              embedding_mb=draw(st.sampled_from([10, 150, 300])), draft_mb=draw(st.sampled_from([390, 900])),
              hidden_width=draw(st.sampled_from([512, 4096])))
    return boards, problem(of, context=1000, tentative=1000)


def slow_ports() -> tuple[list[CandidateBoard], SplitProblem]:
    """Boards of which the order decides the latency: two have slow ports."""
    settings = [(2.0, 1600, 400), (3.0, 1600, 400), (1.0, 1600, 1000), (3.0, 900, 1000)]
    boards = [board(f"b{i}", layer_ms=layer_ms, usable_mb=usable_mb, process_mb=100.0, overhead_ms=0.0,
                    lm_head_ms=1.0, mbps=mbps, latency_ms=0.2)
              for i, (layer_ms, usable_mb, mbps) in enumerate(settings)]
    of = size(layers=5, layer_mb=200, embedding_mb=10, draft_mb=390, hidden_width=4096)
    return boards, problem(of, context=1000, tentative=1000)


@examples(120, quick=24)
@given(instances())
@example(slow_ports())
def test_never_worse_than_every_split_there_is(instance: tuple[list[CandidateBoard], SplitProblem]) -> None:
    boards, p = instance
    best = brute_force(boards, p)
    if best is None:
        with pytest.raises(DoesNotFit):
            plan(boards, p)
        return
    made = plan(boards, p)
    ours = of_plan(p, made)
    assert ours is not None, "memory is exceeded"
    assert ours[0] == pytest.approx(best[0], abs=10 * NS)
    assert ours[1] == pytest.approx(best[1], abs=10 * NS)
    assert ours[2] <= best[2]
    assert made.slowest == pytest.approx(ours[0], abs=10 * NS)
    assert made.latency == pytest.approx(ours[1], abs=10 * NS)
    assert {b.name for b in boards} == {made.d0.name, *(s.board.name for s in made.stages),
                                        *(b.name for b, _ in made.unused_boards)}


def profiles(split: PipelinePlan) -> list[str]:
    """D0's, then those of the stages in a fixed order: splits over equal boards have the same."""
    return [repr(split.d0.profile), *sorted(repr(stage.board.profile) for stage in split.stages)]


@examples(120, quick=24)
@given(instances(), st.booleans(), st.integers(1, 3))
def test_no_subset_of_the_boards_has_a_higher_rate(instance: tuple[list[CandidateBoard], SplitProblem],
                                                   by_ngrams: bool, at_once: int) -> None:
    boards, p = instance
    p = replace(p, size=p.size.without_head()) if by_ngrams else p
    rate = Throughput(p, at_once)
    rates = [(float(f"{rate(d0, slowest, latency):.4g}"), -slowest)
             for d0, (slowest, latency, _) in every_split(boards, p)]
    if not rates:
        with pytest.raises(DoesNotFit):
            search(boards, p, rate)
        return
    found = search(boards, p, rate)
    best = found[0]
    ours = of_plan(p, best)
    assert ours is not None, "memory is exceeded"
    highest, slowest = max(rates)
    assert rate(best.d0, ours[0], ours[1]) == pytest.approx(highest, rel=1e-3)
    assert ours[0] <= -slowest + 10 * NS, "of equal rates the one with the faster slowest stage wins"
    assert (best.slowest, best.latency) == (pytest.approx(ours[0], abs=10 * NS),
                                            pytest.approx(ours[1], abs=10 * NS))
    # The boards that keep several requests fastest are among those to compare, and no two have equal boards.
    assert profiles(plan(boards, p)) in [profiles(split) for split in found]
    used = [(s.d0.name, *sorted(stage.board.name for stage in s.stages)) for s in found]
    assert len(set(used)) == len(used)


def test_equal_boards_get_equal_layers() -> None:
    """Although times are rounded, so that some sums of theirs are less by a nanosecond."""
    boards = [board("d", role="draft"), *(board(f"v{i}", layer_ms=2.134364244, usable_mb=4700) for i in range(4))]
    split = search(boards, problem(size(layers=32)), lambda d0, slowest, latency: 1 / latency)[0]
    assert [hi - lo for lo, hi in (stage.layers for stage in split.stages)] == [8, 8, 8, 8]


def test_a_slow_board_more_may_cost_tokens() -> None:
    """A quick board that holds all layers: slow stages beside it shorten the slot and lengthen the way."""
    boards = [board("quick", layer_ms=2.0, usable_mb=30_000), *(board(f"slow{i}") for i in range(4))]
    p = problem()
    chosen = plan(boards, p, Throughput(p))
    assert ([s.board.name for s in chosen.stages], chosen.d0.name) == (["quick"], "slow0")
    [why] = {why for _, why in chosen.unused_boards}
    assert "adding it would give fewer tokens/s" in why
    many = plan(boards, p, Throughput(p, at_once=8))  # requests that fill the pipeline
    assert len(many.stages) == len(plan(boards, p).stages) == 4


@examples(50, quick=20)
@given(instances())
def test_the_same_split_as_listed_is_as_good(instance: tuple[list[CandidateBoard], SplitProblem]) -> None:
    boards, p = instance
    if brute_force(boards, p) is None:
        return
    made = plan(boards, p)
    verify, ranges = [s.board for s in made.stages], tuple(s.layers for s in made.stages)
    listed = plan_as_listed(made.d0, verify, p, ranges)
    assert listed.stages == made.stages
    assert (listed.slowest, listed.latency) == (pytest.approx(made.slowest, abs=10 * NS),
                                            pytest.approx(made.latency, abs=20 * NS))
    # In this order no other split has a faster slowest stage: the layers alone would be enough.
    again = plan_as_listed(made.d0, verify, p)
    assert again.slowest == pytest.approx(made.slowest, abs=10 * NS)


@examples(50, quick=20)
@given(instances())
def test_most_layers_is_what_memory_alone_allows(
        instance: tuple[list[CandidateBoard], SplitProblem]) -> None:
    boards, p = instance
    fitting = [0]
    for d0 in boards:
        if d0.role == "verify" or not fits(d0, p.d0):
            continue
        fitting.append(sum(max(k for k in range(p.size.layers + 1) if k == 0 or fits(b, p.stage(k)))
                           for b in boards if b is not d0))
    assert max(most_layers(boards, p), 0) == max(fitting)


def test_boards_left_out_say_why() -> None:
    boards = [board("d", role="draft"), board("a", usable_mb=9000), board("b", usable_mb=9000),
              board("small", usable_mb=600), board("slow", layer_ms=90), board("far", mbps=1)]
    made = plan(boards, problem(size(layers=8)))
    why = {b.name: text for b, text in made.unused_boards}
    assert why["small"] == "too little memory for one layer: 449 MB are needed, and 100 MB are there"
    assert why["slow"] == "one layer takes 90 ms there, longer than the slowest stage"
    assert "a segment takes 1.05e+03 ms at the network port, longer than" in why["far"]
    assert not re.search(r"\b(its?|has|needs)\b", " ".join(why.values()))  # it may be said of several boards
    spare = plan([*boards[:3], board("c", role="verify")], problem(size(layers=1)))
    assert {text for _, text in spare.unused_boards} == {"adding it would not make the slowest stage faster"}


def test_roles_are_kept() -> None:
    boards = [board("a", role="verify"), board("b"), board("c", role="draft", layer_ms=0.1)]
    assert plan(boards, problem(size(layers=4))).d0.name == "c"
    with pytest.raises(UsageError, match='only one board can have the role "draft", but a, b have it'):
        plan([board("a", role="draft"), board("b", role="draft")], problem())


def test_one_board_is_no_pipeline() -> None:
    with pytest.raises(UsageError, match="at least two boards"):
        plan([board()], problem())


def test_one_board_holds_everything_in_one_process() -> None:
    p = problem(size(layers=2))
    needed = p.d0 + p.stage(2) + 500 * MB
    assert single_board_headroom(board(usable_mb=needed / MB), p) == 0
    assert single_board_headroom(board(usable_mb=needed / MB - 1), p) < 0


def test_a_profile_without_memory_cannot_be_planned() -> None:
    bare = CandidateBoard("x", board().profile.model_copy(update={"memory": None}))
    with pytest.raises(UsageError, match=r"profile board has no \[memory\]"):
        plan([bare, board()], problem())


def test_a_link_may_be_the_bottleneck() -> None:
    p = problem(size(layers=4))
    quick = [board("a"), board("b", usable_mb=9000)]
    assert not plan(quick, p).link_bound
    slow = plan([board("a", mbps=10), board("b", usable_mb=9000, mbps=1000)], p)
    assert slow.link_bound  # D0's own port counts, too
    assert slow.slowest == pytest.approx(16 * 4096 * 2 * 8 / 10e6)

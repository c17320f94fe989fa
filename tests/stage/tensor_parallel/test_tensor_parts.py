"""The parts of tensor parallelism: heads, rings, and errors when another rank is gone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.tensor_parallel import KINDS, groups, together
from torch import Tensor

from flowspec_edge.errors import PeerLost
from flowspec_edge.stage.shard import even_runs
from flowspec_edge.stage.tensor_parallel.engine import _WorkerThread
from flowspec_edge.stage.tensor_parallel.layers import Heads
from flowspec_edge.stage.tensor_parallel.layout import GalaxyLayout, TensorKind, make_layout
from flowspec_edge.stage.tensor_parallel.process_group import GlooGroup

PATIENCE = 30.0  # seconds; only a failing test waits so long


@given(key_heads=st.integers(1, 8), group=st.integers(1, 8), ranks=st.integers(1, 9))
def test_every_query_head_is_held_once_with_its_key_head(key_heads: int, group: int,
                                                                   ranks: int) -> None:
    held = []
    for lo, hi in even_runs(key_heads * group, ranks):
        heads = Heads.of_run(lo, hi, group)
        for local, head in enumerate(range(lo, hi)):
            reads = heads.expanded[local] if heads.expanded is not None else local // heads.groups
            assert heads.keys[0] + reads == head // group
            held.append(head)
        assert heads.key_count == len({head // group for head in range(lo, hi)})
        if heads.expanded is None:
            assert heads.count == heads.key_count * heads.groups
    assert held == list(range(key_heads * group))


def test_whole_groups_read_the_cache_in_place() -> None:
    assert Heads.of_run(0, 6, 3) == Heads((0, 6), (0, 2), 3, None)
    assert Heads.of_run(3, 5, 3) == Heads((3, 5), (1, 2), 2, None)  # a part of one group
    assert Heads.of_run(2, 4, 3) == Heads((2, 4), (0, 2), 1, None)  # one of each
    assert Heads.of_run(0, 4, 3).expanded == (0, 0, 0, 1)
    assert Heads.of_run(6, 6, 3).count == Heads.of_run(6, 6, 3).key_count == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", range(1, 6))
def test_a_block_is_the_sum_over_ranks(tmp_path: Path, size: int, kind: TensorKind) -> None:
    """In float64, against the same block in one piece; ``core`` must see all rows in order."""
    noise = torch.Generator().manual_seed(size)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    entries, exits = random(size, 8, 3), random(size, 3, 8)
    all_ranks = groups(size, tmp_path)
    for rows in (1, 2, 5, 12):
        x = random(rows, 8)

        def run(group: GlooGroup, x: Tensor = x) -> Tensor:
            layout, rank = make_layout(kind, group), group.rank
            held = layout.split(x)
            out = layout.block(held, lambda t: t @ entries[rank], lambda t: t.cumsum(0),
                                   lambda t: t @ exits[rank])
            assert out.shape == held.shape
            return layout.join(out)

        expected = sum((x @ entries[r]).cumsum(0) @ exits[r] for r in range(size))
        for result in together([lambda group=group: run(group) for group in all_ranks]):
            torch.testing.assert_close(result, expected)


def test_a_tile_travels_while_the_rank_works(tmp_path: Path) -> None:
    """Rank 1 works until rank 2 has the tile that is in transit: without overlap neither could continue."""
    first, last = groups(2, tmp_path)
    arrived = threading.Event()
    x = torch.arange(8.0).view(4, 2)

    def rank_1() -> list[Tensor]:
        galaxy, steps = GalaxyLayout(first), []

        def enter(tile: Tensor) -> Tensor:
            if not steps:
                assert arrived.wait(PATIENCE)
                arrived.clear()
            steps.append(tile)
            return tile

        def leave(tile: Tensor) -> Tensor:
            if len(steps) == 3:  # the second tile of the scatter
                assert arrived.wait(PATIENCE)
            steps.append(tile)
            return tile

        galaxy.block(galaxy.split(x), enter, lambda t: t, leave)
        return steps

    def rank_2() -> list[Tensor]:
        galaxy, steps = GalaxyLayout(last), []

        def enter(tile: Tensor) -> Tensor:
            steps.append(tile)
            if len(steps) == 2:  # rank 1's tile
                arrived.set()
            return tile

        galaxy.block(galaxy.split(x), enter, lambda t: t, lambda tile: tile)
        arrived.set()
        return steps

    steps, others = together([rank_1, rank_2])
    assert len(steps) == 4
    assert torch.equal(others[1], x[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_never_comes_is_not_waited_for_for_ever(tmp_path: Path, kind: TensorKind) -> None:
    alone = groups(2, tmp_path, timeout=0.5)[0]
    layout = make_layout(kind, alone)
    with pytest.raises(PeerLost, match="tensor-parallel rank 1 of 2 got no answer from the") as caught:
        layout.block(layout.split(torch.ones(2, 4)), lambda t: t, lambda t: t, lambda t: t)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_stops_is_not_waited_for_for_ever(tmp_path: Path, kind: TensorKind) -> None:
    """Both have connected; then only one continues."""
    pair = groups(2, tmp_path, timeout=5.0)  # of the rendezvous, too

    def block(group: GlooGroup) -> None:
        layout = make_layout(kind, group)
        layout.block(layout.split(torch.ones(2, 4)), lambda t: t, lambda t: t, lambda t: t)

    together([lambda group=group: block(group) for group in pair])
    with pytest.raises(PeerLost, match="rank 2 of 2 got no answer from the other ranks"):
        block(pair[1])


def test_the_caller_is_called_back_while_a_rank_computes() -> None:
    """The work ends only because ``poll`` was called meanwhile."""
    worker, called = _WorkerThread(), threading.Event()
    assert worker.run(lambda: called.wait(PATIENCE), called.set)
    assert worker.run(lambda: 7, None) == 7
    with pytest.raises(PeerLost, match="gone"):
        worker.run(_raise, called.set)


def test_a_caller_that_leaves_does_not_wait_for_the_work() -> None:
    worker, forever = _WorkerThread(), threading.Event()

    def leave() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.run(lambda: forever.wait(PATIENCE), leave)
    forever.set()


def _raise() -> None:
    raise PeerLost("gone")

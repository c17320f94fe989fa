"""How a cluster of processes learns how many tokens of a prompt a segment may carry, and what that takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kits.planned_boards import profile
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.prompt_chunks import MOST, USUAL
from flowspec_edge.d0.request import Request, Stats
from flowspec_edge.drivers.processes.membership import Membership
from flowspec_edge.drivers.processes.timing import ClusterTiming
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import RequestFailed
from flowspec_edge.messages import Hello


@pytest.mark.parametrize(("rows", "most"), [((512, 128), 128), ((64, 512), 64), ((2**40, 2**40), MOST)])
def test_the_stage_that_takes_the_fewest_decides(rows: tuple[int, int], most: int) -> None:
    members = Membership(["v1", "v2"], 5.0)
    for stage, taken in enumerate(rows, 1):
        members.receive(f"v{stage}", Hello(f"v{stage}", stage, 2, (stage - 1, stage), "d", rows=taken), 0.0)
    assert members.accepted_prompt_rows == most


def test_segments_of_prompts_are_timed_once_at_the_start(tmp_path: Path) -> None:
    """On boards in virtual time, whose times are known, and of a model that takes no longer text than 256 tokens."""
    cluster = VirtualCluster(tiny_model_dir(tmp_path / "model", layers=4, hidden=32), 2, profile(layers=4))

    def run(request: Request) -> Stats:
        return cluster.generate(request).stats

    timing = ClusterTiming(None, 2, lambda kind: 1.0)
    timing.warm_up(run)
    assert timing.prompt_curve(MOST) is None  # prompts are cut as usual
    timing.warm_up(run, MOST)
    curve = timing.prompt_curve(MOST)
    assert curve is not None
    assert USUAL < curve.most <= MOST
    sizes = np.array([16, 64, 96, 128])
    assert [curve.seconds(int(n), 0) for n in sizes] == pytest.approx(12e-3 * np.maximum(1, sizes / 64), rel=1e-3)
    assert curve.chunk(2000, 1) >= USUAL
    assert curve.seconds(10**6, 0) == curve.seconds(curve.most, 0)
    fewer = timing.prompt_curve(80)  # a stage that came back takes no more
    assert fewer is not None
    assert fewer.most == 80


def test_too_little_memory_ends_the_measurement_and_not_the_start(tmp_path: Path) -> None:
    cluster = VirtualCluster(tiny_model_dir(tmp_path / "model", layers=4, hidden=32), 2, profile(layers=4))

    def run(request: Request) -> Stats:
        if request.params.prefill_chunk > 128:
            raise RequestFailed("V1: out of memory")
        return cluster.generate(request).stats

    timing = ClusterTiming(None, 2, lambda kind: 1.0)
    timing.warm_up(run, MOST)
    curve = timing.prompt_curve(MOST)
    assert curve is not None
    assert curve.most == 128

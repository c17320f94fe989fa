"""The ways by which a cluster takes on a value of an axis, one function each.

A way turns a value into a running cluster; what it keeps from value to value it gives back when the
sweep ends.  torch and the runtime are imported only when a cluster is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowspec_edge.bench.sweep import Axis, Links, Value
from flowspec_edge.bench.sweep_runner import OpenPoint, PointCluster, profile_at, stages_at
from flowspec_edge.cli.options import Dtype
from flowspec_edge.config import Profile
from flowspec_edge.modeldir import ModelDir

if TYPE_CHECKING:
    from flowspec_edge.runtime.virtual import VirtualCluster


@dataclass(frozen=True)
class Setup:
    """What a cluster is like before the axis changes it."""

    axis: Axis
    model: ModelDir
    stages: int
    profile: Profile
    dtype: Dtype


def open_points(way: Links, setup: Setup) -> AbstractContextManager[OpenPoint]:
    """How this way opens a point, for as long as the sweep lasts."""
    return _WAYS[way](setup)


@contextmanager
def _virtual(setup: Setup) -> Iterator[OpenPoint]:
    """Virtual time under the profile with the point's link; the models stay loaded while they can."""
    from flowspec_edge.runtime.virtual import VirtualCluster

    loaded: dict[tuple[int, str], VirtualCluster] = {}

    @contextmanager
    def open_point(value: Value) -> Iterator[PointCluster]:
        stages = stages_at(setup.stages, setup.axis, value)
        profile = profile_at(setup.profile, setup.axis, value)
        key = stages, profile.model_dump_json()
        if key not in loaded:
            close()
            loaded[key] = VirtualCluster(setup.model.path, stages, profile, setup.dtype)
        yield PointCluster(loaded[key], None)

    def close() -> None:
        while loaded:
            loaded.popitem()[1].close()

    try:
        yield open_point
    finally:
        close()


_WAYS: dict[Links, Callable[[Setup], AbstractContextManager[OpenPoint]]] = {"virtual": _virtual}

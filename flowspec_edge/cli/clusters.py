"""From options to a running cluster.

Imports torch and the runtime only when a cluster is wanted, so that help and errors come at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flowspec_edge.cli.options import Clock, Dtype
from flowspec_edge.config import Profile
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.runtime.request import Cluster


@contextmanager
def open_cluster(clock: Clock, model: ModelDir, stages: int, profile: Profile | None,
                 dtype: Dtype) -> Iterator[Cluster]:
    """Processes (``wall``), started with the first request that needs them, or virtual time under
    ``profile``; closed on the way out."""
    cluster: Cluster
    if clock == "virtual":
        from flowspec_edge.runtime.virtual import VirtualCluster

        assert profile is not None
        cluster = VirtualCluster(model.path, stages, profile, dtype)
    else:
        from flowspec_edge.runtime.clusters import LocalClusters

        cluster = LocalClusters(model.path, stages, dtype)
    try:
        yield cluster
    finally:
        cluster.close()

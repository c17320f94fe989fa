"""Clusters in virtual time under the paper's profile, made once for all tests of a process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster

PROFILE = load_profile("paper-7b")


@lru_cache(maxsize=16)
def cluster(model: Path, stages: int, dtype: str = "fp32") -> VirtualCluster:
    """Only for tests that change nothing of it."""
    return VirtualCluster(model, stages, PROFILE, dtype)

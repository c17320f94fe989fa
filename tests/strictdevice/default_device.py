"""A plugin of pytest, ``-p strictdevice.default_device``, for tests that name no device.

What the package computes on the CPU unless it is told otherwise, it computes on the strict device.  So these tests
run the CUDA branches.
"""

from __future__ import annotations

from typing import Any

from flowspec_edge.d0.models import DraftModels
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.loaded import StageWeights
from flowspec_edge.lab.plain import PlainDecoder


def _on_the_device(function: Any) -> None:
    def moved(value: object) -> object:
        return "cuda" if value == "cpu" else value

    function.__defaults__ = tuple(map(moved, function.__defaults__ or ()))
    function.__kwdefaults__ = {name: moved(value) for name, value in (function.__kwdefaults__ or {}).items()}


for made in (VirtualCluster, StageWeights, DraftModels, PlainDecoder):
    _on_the_device(made.__init__)

"""Who gets a file from whom."""

from __future__ import annotations

import threading

from flowspec_edge.fleet.shipping_neighbours import Neighbours, large
from flowspec_edge.manifest import PartFile


def test_only_large_files_come_from_neighbours() -> None:
    files = [PartFile(path=f"draft/{name}", size=size, sha256=name * 64)
             for name, size in (("b", 10**8), ("a", 5 * 10**6), ("c", 10**6), ("a", 5 * 10**6))]
    assert large(files) == ["a" * 64, "b" * 64]


def test_what_somebody_has_comes_from_there() -> None:
    neighbours = Neighbours({"v1": ["x"], "v2": [], "v3": []}, {"v2": ["x", "y"], "v3": ["x"]})
    assert neighbours.waits("v2", "x")
    assert not neighbours.waits("v2", "y")
    assert neighbours.source("v2", "x") == neighbours.source("v3", "x") == "v1"
    assert neighbours.source("v2", "y") is None
    neighbours.arrived("v2", "x")
    assert neighbours.source("v1", "x") == "v2"  # never itself


def test_the_second_waits_for_the_first_and_takes_it_from_there() -> None:
    for arrives in (True, False):
        neighbours = Neighbours({"v1": [], "v2": []}, {"v1": ["x"], "v2": ["x"]})
        assert [neighbours.waits(board, "x") for board in ("v1", "v2")] == [False, True]
        assert neighbours.source("v1", "x") is None
        found: list[str | None] = []
        second = threading.Thread(target=lambda n=neighbours, f=found: f.append(n.source("v2", "x")))
        second.start()
        assert second.is_alive()
        if arrives:
            neighbours.arrived("v1", "x")
        else:  # then it comes from here
            neighbours.gone("v1")
        second.join(30)
        assert found == ["v1" if arrives else None]

"""The boards that tests of the whole thing share: they are booted once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from kits import board_images, container_boards, deployments, jetson_boards
from kits.deployment_phases import PLACES, Bench

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.wheels import WheelTarget, build_wheel, environment, fill

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[container_boards.Fleet]:
    """Five boards, freshly made, and on: a test leaves them as bare as it found them, and on."""
    with container_boards.fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture(scope="session")
def cluster(fleet: container_boards.Fleet, tmp_path_factory: pytest.TempPathFactory) -> deployments.Cluster:
    """A cluster file for the boards, and the wheels that they need; nothing is deployed yet."""
    return deployments.Cluster(fleet, tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def bench(fleet: container_boards.Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Boards with the software."""
    house = board_images.cache() / "wheelhouse"
    build_wheel(house)
    torch = fleet.shell(1, "python3 -c 'import torch; print(torch.__version__)'").strip()
    target = WheelTarget("3.11", "x86_64", torch)
    fill(house, [target])
    file = fleet.write_cluster(tmp_path_factory.mktemp("bench") / "cluster.toml")
    bench = Bench(fleet, environment(house, target), file)
    untouched = [bench.traces(place) for place in PLACES]
    for phase in ("release", "activate", "down", "purge"):
        bench.well(phase, dry_run=True)
    would = bench.well("software", dry_run=True)
    assert [bench.traces(place) for place in PLACES] == untouched
    assert bench.well("software") == would
    assert min(would) > 5
    yield bench
    bench.well("purge")
    assert [bench.traces(place) for place in PLACES] == untouched == [[], []]


@pytest.fixture
def running(bench: Bench) -> Iterator[Bench]:
    """Boards where the first release runs; afterwards nothing does."""
    bench.well("release")
    assert min(bench.well("activate")) > 0
    yield bench
    bench.well("down")
    for place in PLACES:
        bench.fleet.shell(place, f"rm -rf {paths.RELEASES}/* {paths.CURRENT} {paths.PREVIOUS}")


@pytest.fixture(scope="session")
def orins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jetson_boards.Orins]:
    """Four boards that pass for Jetsons, as flashed, and a Debian 11: orin-0 to orin-4."""
    if why_not := jetson_boards.why_no_orins():
        pytest.skip(f"boards that pass for Jetsons: {why_not}")
    running = jetson_boards.Orins(tmp_path_factory.mktemp("orins"), old=True)
    yield running
    running.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from kits.browser import CHROMIUM, QUIET
    from playwright.sync_api import sync_playwright

    with (sync_playwright() as playwright,
          closing(playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET])) as browser):
        yield browser

"""What a deployment of an image changes follows from the boards' facts, as for an environment: see test_diff.py.

The steps run on boards with Docker in tests/e2e/test_deploy_image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kits import settled_boards
from kits.settled_boards import changed, deployment, settled

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.actions import BoardState
from flowspec_edge.boards.deploy.diff import Diff
from flowspec_edge.boards.deploy.resolve import on_board
from flowspec_edge.boards.deploy.steps.phases import decide
from flowspec_edge.boards.doctor.discover import board_from_facts, describe_software, render_cluster_toml
from flowspec_edge.boards.images.archive import Image
from flowspec_edge.boards.inventory import DeviceEntry, Inventory
from flowspec_edge.boards.probe.checks import Needs, PreflightReport, Subject, faults, room_problems
from flowspec_edge.boards.probe.facts import (
    BoardFacts,
    DiskFacts,
    DockerFacts,
    MemoryFacts,
    ReleaseFacts,
    SystemdFacts,
    SystemFacts,
)
from flowspec_edge.util.tomlfile import parse_toml

IMAGE = Image("/lab/image.tar", 5_000_000_000, "c" * 64, (f"sha256:{'c' * 64}", f"sha256:{'d' * 64}"),
              ("flowspec-edge:latest",), "aarch64", "1.0")
OLD = "b" * 16


def wanted(torch_device: str = "cuda") -> Image:
    found = deployment(runtime="image", torch_device=torch_device)
    return on_board(found.inventory, found.boards[1], IMAGE)


TARGET = wanted()
SETTLED = settled(TARGET, runtime="image", torch_device="cuda")
STAGE = SETTLED["stage"]


def diff(stage: BoardFacts) -> Diff:
    return settled_boards.diff({**SETTLED, "stage": stage}, TARGET, runtime="image", torch_device="cuda")


CASES: dict[str, tuple[Callable[[BoardFacts], BoardFacts], list[str]]] = {
    "all is as it should be": (lambda facts: facts, []),
    "Docker lost its images": (lambda facts: replace(facts, images=()), ["image sent", "image", "environment"]),
    "the launcher is of another flowspec": (lambda facts: replace(facts, venvs={"e" * 16: True}, venv_images={
        "e" * 16: IMAGE.tag}), ["environment", "old releases"]),
    "an image that no release runs": (lambda facts: replace(facts, images=(IMAGE.tag, OLD)), ["old releases"]),
    "the image of a release that is kept": (lambda facts: replace(
        facts, images=(IMAGE.tag, OLD), venvs={**facts.venvs, "f" * 16: True},
        venv_images={**facts.venv_images, "f" * 16: OLD},
        releases={**facts.releases, "r1": ReleaseFacts({}, f"../../venvs/{'f' * 16}")}), [])}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_fact_that_is_not_as_it_should_be(case: tuple[Callable[[BoardFacts], BoardFacts], list[str]]) -> None:
    change, steps = case
    assert changed(diff(change(STAGE))) == steps


def test_a_bare_board_gets_the_image_and_no_wheels() -> None:
    bare = diff(BoardFacts(part_changes=True, publics=STAGE.publics))
    found = changed(bare)
    assert found[0] == "image sent"
    assert [name for name in found if name in ("image", "environment", "wheels (0 of 0)")] == ["image", "environment"]
    one = bare.boards[1]
    assert one.image == TARGET
    assert (one.python, one.receiver) == (f"{paths.VENVS}/{TARGET.digest}/bin/python", "")


def test_the_units_are_those_of_environments_with_more() -> None:
    files, plain = (found.boards[1].state.files for found in (diff(STAGE), settled_boards.diff(SETTLED)))
    for unit in (paths.DRAFT_UNIT, paths.VERIFY_UNIT):
        assert files[f"units/{unit}"].startswith(plain[f"units/{unit}"])
        assert "FLOWSPEC_CONTAINER" in files[f"units/{unit}"]
        assert "FLOWSPEC_CONTAINER" not in plain[f"units/{unit}"]


def test_purge_removes_the_images() -> None:
    actions = decide("purge", BoardState("stage"), replace(STAGE, images=(IMAGE.tag, OLD)))
    [removed] = [action for action in actions if action.step == "images removed"]
    assert removed.commands == (f"docker image rm flowspec-board:{IMAGE.tag} flowspec-board:{OLD} > /dev/null",)
    none = replace(STAGE, images=())
    for actions in (decide("down", BoardState("stage"), STAGE), decide("purge", BoardState("stage"), none)):
        assert not [action for action in actions if "image" in action.step]


DOCKER = DockerFacts("27.5.1", runtimes=("nvidia", "runc"), root="/var/lib/docker", group=True)
ROOMY = DiskFacts(1, 20_000_000_000)


def board(docker: DockerFacts = DOCKER, free: int = ROOMY.free, **changes: object) -> BoardFacts:
    """A board that has Docker and no torch."""
    disk = replace(ROOMY, free=free)
    return BoardFacts(system=replace(SystemFacts(
        python=(3, 10, 12), systemd=SystemdFacts(249, True), memory=MemoryFacts(9, 9), machine="aarch64", docker=docker,
        disks={paths.HOME: disk, paths.STATE: disk, "/var/lib/docker": disk}), **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("facts", "found", "advice"), [
    (board(), "", ""),
    (board(DockerFacts(why="there is no docker")), "docker: there is no docker", "apt-get install -y docker.io"),
    (board(DockerFacts(why="Cannot connect to the Docker daemon")), "docker: Cannot connect", "systemctl enable"),
    (board(replace(DOCKER, group=False)), "docker: there is no group docker", "groupadd"),
    (board(replace(DOCKER, runtimes=("runc",))), "docker: it has no runtime nvidia, but runc", "nvidia-ctk"),
    (board(machine="x86_64"), "docker: the image is for aarch64, and the board is x86_64", "--platform"),
    (board(free=9_000_000_000), "disk: /opt/flowspec and /var/lib/flowspec and /var/lib/docker need 10.00 GB, 9.00 GB",
     "make room"),
    (board(replace(DOCKER, images=(IMAGE.tag,)), free=9_000_000_000), "", "")])
def test_what_a_board_lacks_for_an_image(facts: BoardFacts, found: str, advice: str) -> None:
    problems = faults("up", Subject(facts, torch_device="cuda", needs=Needs(image=TARGET), in_image=True))
    assert [f"{problem.check}: {problem.found}".startswith(found) and advice in problem.advice for problem in problems
            ] == [True] * bool(found), problems


def test_without_a_gpu_any_runtime_will_do() -> None:
    facts = board(replace(DOCKER, runtimes=("runc",)))
    image = wanted(torch_device="cpu")
    assert image.runtime == ""
    assert not faults("up", Subject(facts, torch_device="cpu", needs=Needs(image=image), in_image=True))


def test_room_is_asked_for_with_the_shards() -> None:
    facts = board(free=11_000_000_000)
    found, needs = PreflightReport([], {"stage": facts}), {"stage": Needs(image=TARGET)}
    assert not room_problems(found, needs, {"stage": TARGET.digest}, {"stage": 500_000_000})
    [problem] = room_problems(found, needs, {"stage": TARGET.digest}, {"stage": 2_000_000_000})
    assert "12.00 GB" in problem.found


@pytest.mark.parametrize(("docker", "said", "problem"), [
    (DOCKER, "Docker 27.5.1", ""),
    (DockerFacts(why="there is no docker"), "no Docker that answers", "docker: there is")])
def test_a_cluster_file_for_an_image(docker: DockerFacts, said: str, problem: str) -> None:
    """Of boards that look like Jetsons and have no torch, which then is no fault."""
    l4t = {"etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 1"}
    found = [board_from_facts(DeviceEntry(name=name, address=name), board(docker, files=l4t, user="me").system)
             for name in ("orin-0", "orin-1")]
    assert describe_software(found[0]) == said
    assert [fault.startswith(problem) for fault in found[0].faults] == [True] * bool(problem)
    settings = {"runtime": "image", "image": "/lab/image.tar"}
    text = render_cluster_toml(found, "lab", "lab.toml", cluster_settings=settings)
    cluster = parse_toml(text.encode(), Path("lab.toml"), Inventory).cluster
    assert (cluster.in_image, cluster.image, cluster.torch_device) == (True, "/lab/image.tar", "cuda")

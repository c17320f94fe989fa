"""Decides what a deployment changes: `deploy plan` prints the diff, `deploy up` executes it.

Pure except for host name lookups and reading the packaged units (``release.render``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowspec_edge.boards.deploy.actions import Action, BoardState, Environment, RequiredPart, Step
from flowspec_edge.boards.deploy.release import render
from flowspec_edge.boards.deploy.resolve import Deployment
from flowspec_edge.boards.deploy.rollback import releases_before
from flowspec_edge.boards.deploy.steps.image import SEND_STEP, lacks
from flowspec_edge.boards.deploy.steps.phases import decide
from flowspec_edge.boards.images.archive import Image
from flowspec_edge.boards.inventory import DeviceEntry
from flowspec_edge.boards.paths import DRAFT_UNIT, VENVS, model_dir, verify_unit
from flowspec_edge.boards.probe.facts import BoardFacts, BoardStatus, Installed
from flowspec_edge.boards.services.keys import KeyAction, changed_key, key_to_use, rotation
from flowspec_edge.boards.services.status import FleetStatus
from flowspec_edge.model.manifest import DRAFT, Manifest, stage_part
from flowspec_edge.model.weights.located import MANIFEST
from flowspec_edge.util.bounded_read import sha256_of

_NO_KEY = "0" * 40  # placeholder for a key that does not exist yet


@dataclass(frozen=True)
class BoardDiff:
    """The actions of each phase on one board."""

    device: DeviceEntry
    state: BoardState
    key: KeyAction
    transfer: bool  # whether files of its part have to be sent
    image: Image | None  # to be sent; None: it is there, or the board has an environment
    software: tuple[Action, ...]
    release: tuple[Action, ...]
    switch: tuple[Action, ...]
    activate: tuple[Action, ...]
    settle: tuple[Action, ...]

    @property
    def python(self) -> str:
        """The interpreter of the new environment."""
        assert self.state.environment
        return f"{VENVS}/{self.state.environment.digest}/bin/python"

    @property
    def receiver(self) -> str:
        """The interpreter that receives files.

        With an image it is "", the board's own: an interpreter in a container would not see the board's processes.
        """
        return "" if isinstance(self.state.environment, Image) else self.python

    def steps(self) -> list[Step]:
        def steps_of(actions: tuple[Action, ...]) -> list[Step]:
            return [Step(self.device.name, action.step, action.changes) for action in actions]

        sends_image = isinstance(self.state.environment, Image)
        return [*([Step(self.device.name, SEND_STEP, bool(self.image))] if sends_image else []),
                *steps_of(self.software), Step(self.device.name, "key", self.key != "show"),
                Step(self.device.name, "shards", self.transfer), *steps_of(self.release),
                *steps_of((*self.switch, *self.activate, *self.settle))]


@dataclass(frozen=True)
class Diff:
    release: str | None  # None while a board has no key yet, on which the id depends
    boards: tuple[BoardDiff, ...]  # the ring: D0, V1…VN
    problems: tuple[str, ...]  # why the diff cannot be executed, one line each


def make_diff(deployment: Deployment, manifest: Manifest, environments: Mapping[str, Environment | Image],
              facts: Mapping[str, BoardFacts], recorded: Mapping[str, str], status: FleetStatus,
              digests: Sequence[str], rotate: bool = False) -> Diff:
    """Compare the boards' state with the deployment; mappings are by board.

    recorded  the recorded public keys
    status    the running releases, whose parts of models are kept, and to which the boards can return
    digests   of the stages' shards, V1's first (``release.digests_of``)
    rotate    each board is to have another key pair: the keys are not those of the release yet
    """
    names = [device.name for device in deployment.boards]
    running = {board.name: board.current.public_key for board in status.boards if board.current}
    board_keys = {name: facts[name].publics for name in names}
    keys: dict[str, KeyAction] = rotation(board_keys, recorded) if rotate else {
        name: "show" if board_keys[name] else "make" for name in names}
    publics = {name: key_to_use(board_keys[name], recorded.get(name, ""), running.get(name, "")) if board_keys[name]
               else _NO_KEY for name in names}
    release, files = render(deployment, manifest, publics, digests,
                            {name: venv.digest for name, venv in environments.items()})
    boards, befores = [], releases_before(status)
    for rank, device in enumerate(deployment.boards):
        name = device.name
        before = befores[name]
        state = replace(
            state_of(deployment, rank, environments[name]), release=release, files=files[name],
            before=before.id if before else "", public=publics[name],
            parts=_needed_parts(manifest, rank, release, before, status.boards[names.index(name)]))
        boards.append(BoardDiff(
            device, state, keys[name], facts[name].part_changes, lacks(state.environment, facts[name]),
            *(tuple(decide(phase, state, facts[name])) for phase in (
                "software", "release", "switch", "activate", "settle"))))
    problems = [error for name in names if board_keys[name] and not rotate and (
        error := changed_key(name, publics[name], recorded, deployment.keys))]
    problems += [f"{board.device.name}: {action.step}: {action.error}" for board in boards
                 for action in (*board.software, *board.release, *board.switch) if action.error]
    return Diff(None if {*keys.values()} != {"show"} else release, tuple(boards), tuple(problems))


def state_of(deployment: Deployment, rank: int, environment: Environment | Image) -> BoardState:
    """Return the desired state, without a release's files, of the board at ``rank`` of the ring (D0: 0)."""
    device = deployment.boards[rank]
    return BoardState(device.name, unit=verify_unit(rank) if rank else DRAFT_UNIT, environment=environment,
                      power_mode=deployment.inventory.power_mode(device),
                      client_key=not rank and deployment.cluster.serves_others)


def required_part(manifest: Manifest, rank: int) -> RequiredPart:
    return RequiredPart(
        Path(model_dir(manifest.request)).name,
        tuple((file.path, file.size, file.sha256) for file in manifest.part(part_name(rank)).files),
        sha256_of(manifest.directory / MANIFEST))


def part_name(rank: int) -> str:
    """Return the name of D0's part for place 0, of Vi's for place i."""
    return stage_part(rank - 1) if rank else DRAFT


def _needed_parts(manifest: Manifest, rank: int, release: str, before: Installed | None, board: BoardStatus
                  ) -> tuple[str, ...]:
    """Return the board's parts of this release and of the one before it.

    The one before is the release that is ``previous`` once this one runs (``steps.activate``).
    """
    current = board.current
    if current and current.id == release:
        previous = board.previous
    else:
        previous = before if before and before.id != release else current
    needed = {(manifest.request, rank), *([(previous.model, previous.stage)] if previous else ())}
    return tuple(sorted(f"{Path(model_dir(model)).name}/{part_name(stage)}" for model, stage in needed))

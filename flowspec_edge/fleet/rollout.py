"""Bringing a release to all boards of a cluster, and back: the order of things.

Knows what must be done everywhere before anything is touched that runs, what goes back when a release
does not become ready, and what counts as a change.  Does not know how one step is done: packages and
units (``engine``), shards (``shipping``), keys (``board_keys``), files (``rendering``).

1. Here: the model is cut, the wheels are gathered.
2. Every board is looked at; any problem ends it, and nothing has been touched.
3. Beside what runs: environment, keys, shards, the release's files.  A failure leaves what runs alone.
4. Stages first, then the draft device, whose service starts when a token has come through all of them.
   Where that fails all boards go back to the release before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet import board_keys, engine, services, shipping, wheelhouse
from flowspec_edge.fleet.client_key import make_client_key
from flowspec_edge.fleet.deployment import Deployment
from flowspec_edge.fleet.desired import BoardState, Environment, Step
from flowspec_edge.fleet.inventory import DeviceEntry
from flowspec_edge.fleet.own_wheel import build_wheel
from flowspec_edge.fleet.places import DRAFT_UNIT, PYTHON, VENVS, verify_unit
from flowspec_edge.fleet.preflight import preflight
from flowspec_edge.fleet.rendering import render
from flowspec_edge.fleet.requirements import needs_of
from flowspec_edge.fleet.rollback import go_back, reach_of
from flowspec_edge.fleet.rollout_books import Books
from flowspec_edge.fleet.rollout_report import Report, Watch
from flowspec_edge.fleet.sharded import digests_of, sharded_model
from flowspec_edge.fleet.wheelhouse import Target
from flowspec_edge.manifest import DRAFT, Manifest, stage_part


class Rollout:
    """One run over the boards of a deployment."""

    def __init__(self, deployment: Deployment, watch: Watch | None = None) -> None:
        """Nothing is touched yet."""
        self._deployment = deployment
        self._inventory = deployment.decided
        self._boards = deployment.boards
        self._books = Books([device.name for device in self._boards], watch or Watch())
        self._watch = self._books.watch
        self._activated = False  # whether what runs may be another release than before

    def up(self, going_back: bool = True) -> Report:
        """Bring all boards to the release that the cluster file, this package and the model make.

        ``going_back``: if it does not become ready; without, :meth:`take_back` is the caller's to call.

        UsageError for what can be seen to be wrong from here, FlowspecError where the model or the wheels
        cannot be had; what fails on boards is in the report.
        """
        manifest = self._cut()
        targets, problems = self._look(manifest)
        if problems:
            return self._books.report(problems=problems)
        states = self._states(self._environments(targets))
        if not self._books.run("software", states, "packages and environments"):
            return self._books.report()
        publics = self._keys(states)
        if publics is None or not self._ship(manifest, states):
            return self._books.report()
        release, states = self._with_files(states, manifest, publics)
        if not self._books.run("release", states, "the release's files"):
            return self._books.report(release)
        self._activated = True
        if self._activate(states):
            self._prune(manifest)
            return self._books.report(release)
        rolled_back, left = self.take_back() if going_back else (None, "")
        return self._books.report(release, rolled_back=rolled_back, left=left)

    def take_back(self) -> tuple[str | None, str]:
        """Boards run again what they ran before :meth:`up`, if it came so far; see :func:`go_back`."""
        return go_back(self._inventory, self._status, self._books) if self._activated else (None, "")

    def plan(self) -> Report:
        """What :meth:`up` would change; boards are only looked at."""
        manifest = self._cut()
        targets, problems = self._look(manifest)
        if problems:
            return self._books.report(problems=problems)
        states = self._states(self._environments(targets))
        self._books.run("software", states, "packages and environments", dry_run=True)
        self._watch.phase("shards")
        self._book_shards(shipping.would_ship(manifest.directory, self._parts(), self._inventory))
        publics = board_keys.recorded(self._boards, self._deployment.keys)
        for state in states:
            if state.name not in publics:
                self._books.book(Step(state.name, "key", changed=True))
        release = None
        if len(publics) == len(states):
            release, states = self._with_files(states, manifest, publics)
            self._books.run("release", states, "the release's files", dry_run=True)
            self._books.run("activate", states, "services", dry_run=True)
        else:  # what is in the release depends on all keys
            for state in states:
                for name in ("release", "current release", "running"):
                    self._books.book(Step(state.name, name, changed=True))
        return self._books.report(release)

    # ---- beside what runs ----------------------------------------------------------------------

    def _cut(self) -> Manifest:
        engine.require()  # before minutes are spent on what it is for
        self._watch.phase("the model's parts")
        return sharded_model(self._deployment,
                             lambda done, total: self._watch.amount("here", done, total))

    def _look(self, manifest: Manifest) -> tuple[dict[str, Target], list[str]]:
        """What kind of board each is, by name, and what keeps them from taking part."""
        self._watch.phase("looking at the boards")
        self._status = services.look(self._inventory)
        found = preflight(self._inventory, needs_of(self._deployment, manifest, self._status))
        targets = {name: Target(".".join(map(str, found.pythons[name][:2])), found.machines[name], torch)
                   for name, torch in found.torches.items()}
        problems = [problem for problem in found.problems if not problem.note]
        # What a board ran before must be known: it is what may have to be gone back to.
        silent = [board.error for board in self._status.boards
                  if board.error and board.name not in {problem.board for problem in problems}]
        return targets, [*map(str, problems), *silent]

    def _environments(self, targets: Mapping[str, Target]) -> dict[str, Environment]:
        """What each board's venv is to have, by its name."""
        self._watch.phase("wheels")
        house, python = self._deployment.wheelhouse, self._inventory.cluster.board_python
        build_wheel(house)
        wheelhouse.fill(house, targets.values(), lambda text: self._watch.phase(f"wheels: {text}"))
        made = {target: wheelhouse.environment(house, target, python) for target in set(targets.values())}
        return {name: made[target] for name, target in targets.items()}

    def _states(self, environments: Mapping[str, Environment]) -> list[BoardState]:
        cluster = self._inventory.cluster
        return [
            BoardState(device.name, reach_of(self._inventory, device),
                       unit=verify_unit(place) if place else DRAFT_UNIT,
                       environment=environments[device.name],
                       power_mode=cluster.power_mode if device.power_mode is None else device.power_mode)
            for place, device in enumerate(self._boards)]

    def _keys(self, states: Sequence[BoardState]) -> dict[str, str] | None:
        """Every board's public key; None if one could not be had, which its outcome then says."""
        self._watch.phase("keys")
        found = board_keys.collect(self._inventory, self._boards, _python(states), self._deployment.keys)
        for board in found:
            self._books.book(Step(board.name, "key", board.made), board.error)
        draft = self._deployment.draft
        if self._inventory.cluster.serves_others and not self._books.failed:
            try:
                self._books.book(Step(draft.name, "clients' key", make_client_key(self._inventory, draft)))
            except FlowspecError as error:
                self._books.book(Step(draft.name, "clients' key", changed=False), str(error))
        return None if self._books.failed else {board.name: board.public for board in found}

    def _ship(self, manifest: Manifest, states: Sequence[BoardState]) -> bool:
        """Whether every board has its part."""
        self._watch.phase("shards")
        pythons = _python(states)
        for python in sorted({*pythons.values()}):  # one, where boards are alike
            parts = [pair for pair in self._parts() if pythons[pair[0].name] == python]
            self._book_shards(shipping.ship(manifest.directory, parts, self._inventory, python,
                                            progress=self._watch.amount))
        return not self._books.failed

    def _book_shards(self, boards: Iterable[shipping.Shipped]) -> None:
        for board in boards:
            self._books.book(Step(board.board, "shards", board.changed), board.error)

    def _parts(self) -> list[tuple[DeviceEntry, str]]:
        return [(device, _part(place)) for place, device in enumerate(self._boards)]

    def _with_files(self, states: Sequence[BoardState], manifest: Manifest, publics: Mapping[str, str]
                    ) -> tuple[str, list[BoardState]]:
        """The id of the release that all this makes, and the states with its files."""
        digests = {state.name: state.environment.digest for state in states if state.environment}
        release, files = render(self._deployment, manifest, publics, digests_of(manifest), digests)
        return release, [replace(state, release=release, files=files[state.name]) for state in states]

    # ---- what runs -----------------------------------------------------------------------------

    def _activate(self, states: Sequence[BoardState]) -> bool:
        """Stages, all at once, then the draft device: whether a token came through."""
        return (self._books.run("activate", states[1:], "stages")
                and self._books.run("activate", states[:1], "the draft device, until a token comes through"))

    def _prune(self, manifest: Manifest) -> None:
        """Parts of models that neither this release nor the one before needs go."""
        before = {board.name: board for board in self._status.boards}
        keep = []
        for place, device in enumerate(self._boards):
            needed = {(manifest.request, _part(place))}
            for release in (before[device.name].current, before[device.name].previous):
                if release is not None:
                    needed.add((release.model, _part(release.stage)))
            keep.append((device, needed))
        for pruned in shipping.prune(keep, self._inventory, PYTHON):
            if pruned.removed:
                self._books.book(Step(pruned.board, "old shards", changed=True))


def _part(place: int) -> str:
    """D0's part at 0, Vi's at i."""
    return stage_part(place - 1) if place else DRAFT


def _python(states: Sequence[BoardState]) -> dict[str, str]:
    """The interpreters of the new environments, by board."""
    return {state.name: f"{VENVS}/{state.environment.digest}/bin/python"
            for state in states if state.environment}

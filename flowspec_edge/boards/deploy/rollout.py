"""Brings a release to all boards of a cluster.

1. Here: shard the model, gather the wheels or read the image.
2. Read every board's state and make the diff; any problem ends the rollout with no board changed.
3. Install environment, keys, shards and files next to the running release, which keeps running if a step
   fails.
4. Switch the stages to the new release, then the draft device (``steps.activate`` says what an interruption
   leaves).  Restart their services, and wait until a token has come through all stages.  On a failure all
   boards go back to the previous release.
5. Stop the services of boards that an earlier deployment used, and this one does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowspec_edge.boards.deploy import wheels
from flowspec_edge.boards.deploy.actions import BoardState, Environment, Step, ask_boards
from flowspec_edge.boards.deploy.diff import Diff, make_diff, part_name, required_part, state_of
from flowspec_edge.boards.deploy.release import digests_of, sharded_model
from flowspec_edge.boards.deploy.resolve import Deployment, needs_of
from flowspec_edge.boards.deploy.rollback import go_back
from flowspec_edge.boards.deploy.rollout_log import DeployReport, RolloutLog, Watch
from flowspec_edge.boards.deploy.steps.image import SEND_STEP
from flowspec_edge.boards.deploy.wheels import WheelTarget
from flowspec_edge.boards.images.archive import Image
from flowspec_edge.boards.probe.checks import Needs, PreflightReport, preflight, room_problems
from flowspec_edge.boards.probe.facts import BoardFacts
from flowspec_edge.boards.probe.findings import no_facts
from flowspec_edge.boards.services import keys
from flowspec_edge.boards.services.status import look
from flowspec_edge.boards.transfer.push import push, send_image
from flowspec_edge.errors import FlowspecError


class Rollout:
    def __init__(self, deployment: Deployment, watch: Watch | None = None) -> None:
        self._deployment = deployment
        self._inventory = deployment.decided
        self._boards = deployment.boards
        self._log = RolloutLog(self._inventory, [device.name for device in self._boards], watch or Watch())
        self._watch = self._log.watch

    def plan(self) -> DeployReport:
        """Report what ``up`` would change; boards are only read."""
        diff = self._decide(end_others=False)
        for board in diff.boards if diff else ():
            for step in board.steps():
                self._log.add_step(step)
        if diff:
            self._stop_unused(dry_run=True)
        return self._log.report(diff.release if diff else None)

    def up(self, rotate: bool = False) -> DeployReport:
        """Bring all boards to the release that follows from the cluster file, this package and the model.

        ``rotate`` also gives every board a new key pair (``services.keys``).  Failures on boards are in the report.

        Raise UsageError if the input has errors.  Raise FlowspecError if this machine cannot shard the model or gather
        the wheels.
        """
        diff = self._decide(end_others=True, rotate=rotate)
        if diff is None:
            return self._log.report()
        log = self._log
        if not self._send_images(diff):
            return log.report()
        if not log.carry_out([(board.device, board.software) for board in diff.boards],
                             "software and environments"):
            return log.report()
        diff = self._make_keys(diff, rotate)
        if log.failed or not self._send_parts(diff):
            return log.report()
        if not log.carry_out([(board.device, board.release) for board in diff.boards], "the release's files"):
            return log.report(diff.release)
        if self._activate(diff):
            self._stop_unused()
            return log.report(diff.release)
        rolled_back, after_failure = go_back(self._inventory, self._status, log)
        return log.report(diff.release, rolled_back=rolled_back, after_failure=after_failure)

    # ---- the decision --------------------------------------------------------------------------

    def _decide(self, end_others: bool, rotate: bool = False) -> Diff | None:
        """Return the diff; None if a problem prevents the deployment, which is then in the report.

        end_others  as for ``ask_boards``
        """
        self._watch.phase("looking at the boards")
        self._deployment.image  # noqa: B018 - read now: an error in it is the user's to mend
        self._status = look(self._inventory)
        if any(board.unreached for board in self._status.boards):  # now: sharding the model may take an hour
            self._log.answered(self._status)
            return None  # else the checks below say more of a board that cannot be asked
        self._watch.phase("the model's parts")
        self._manifest = sharded_model(self._deployment,
                                       lambda done, total: self._watch.amount("here", done, total))
        needs = needs_of(self._deployment, self._manifest)
        checked = self._check(needs)
        if checked is None:
            return None
        environments: Mapping[str, Environment | Image] = {
            name: image for name, need in needs.items() if (image := need.image)}
        if not environments:
            environments = self._gather_wheels({name: WheelTarget.from_facts(facts.system, needs[name].dtype)
                                                for name, facts in checked.facts.items()})
        self._watch.phase("looking at the boards")
        answers = ask_boards(self._inventory, [
            (device, state_of(self._deployment, rank, environments[device.name]),
             required_part(self._manifest, rank)) for rank, device in enumerate(self._boards)], end_others)
        self._log.problems = [str(no_facts(device, facts))
                              for device, facts in zip(self._boards, answers, strict=True)
                              if isinstance(facts, FlowspecError)]
        if self._log.problems:
            return None
        self._environments = environments
        self._facts: Mapping[str, BoardFacts] = {
            device.name: facts for device, facts in zip(self._boards, answers, strict=True)
            if isinstance(facts, BoardFacts)}
        # Again, because boards of an interrupted rollout may have changed their release since.  A failed one
        # goes back to that release.
        self._status = look(self._inventory)
        self._log.problems = [
            *(board.error for board in self._status.boards if board.error),
            *map(str, room_problems(
                checked, needs, {name: environment.digest for name, environment in environments.items()},
                {name: facts.missing_bytes for name, facts in self._facts.items()}))]
        if self._log.problems:
            return None
        self._recorded = keys.recorded(self._boards, self._deployment.keys)
        diff = self._diff(self._facts, rotate)
        self._log.problems = [*diff.problems]
        return None if diff.problems else diff

    def _diff(self, facts: Mapping[str, BoardFacts], rotate: bool = False) -> Diff:
        return make_diff(self._deployment, self._manifest, self._environments, facts, self._recorded,
                         self._status, digests_of(self._manifest), rotate)

    def _check(self, needs: Mapping[str, Needs]) -> PreflightReport | None:
        """Check that the boards meet ``needs``; None as in ``_decide``."""
        self._watch.phase("looking at the boards")
        checked = preflight(self._inventory, needs)
        self._log.notes = [str(problem) for problem in checked.problems if problem.state == "warning"]
        self._log.problems = [str(problem) for problem in checked.problems if problem.state == "failed"]
        return None if self._log.problems else checked

    def _gather_wheels(self, targets: Mapping[str, WheelTarget]) -> dict[str, Environment]:
        self._watch.phase("wheels")
        house, python = self._deployment.wheelhouse, self._inventory.cluster.board_python
        wheels.build_wheel(house)
        wheels.fill(house, targets.values(), lambda text: self._watch.phase(f"wheels: {text}"))
        by_target = {target: wheels.environment(house, target, python) for target in set(targets.values())}
        return {name: by_target[target] for name, target in targets.items()}

    # ---- its execution -------------------------------------------------------------------------

    def _send_images(self, diff: Diff) -> bool:
        """Send the image to the boards that lack it; return whether every board has it."""
        self._watch.phase("the image")
        for board in diff.boards:
            if isinstance(board.state.environment, Image) and not board.image:
                self._log.add_step(Step(board.device.name, SEND_STEP, changed=False))
        for result in send_image([(board.device, board.image) for board in diff.boards if board.image],
                                 self._inventory, progress=self._watch.amount):
            self._log.add_step(Step(result.board, SEND_STEP, changed=True), result.error)
        return not self._log.failed

    def _make_keys(self, diff: Diff, rotate: bool) -> Diff:
        """Make and record the boards' keys; return the diff with all keys."""
        self._watch.phase("keys")
        new_keys = {board.name: board for board in keys.ask(
            self._inventory, [board.device for board in diff.boards if board.key != "show"], _pythons(diff),
            {board.device.name: board.key for board in diff.boards})}
        for name in self._facts:
            error = new_keys[name].error if name in new_keys else ""
            if name in new_keys and not error and not rotate:
                error = keys.changed_key(name, new_keys[name].publics[-1], self._recorded, self._deployment.keys)
            self._log.add_step(Step(name, "key", name in new_keys), error)
        if self._log.failed:
            return diff
        facts = {name: replace(board_facts, publics=new_keys[name].publics) if name in new_keys else board_facts
                 for name, board_facts in self._facts.items()}
        before = self._recorded
        if rotate:
            self._recorded = {name: board_facts.publics[-1] for name, board_facts in facts.items()}
        diff = self._diff(facts)
        keys.record(self._deployment.keys, {
            board.device.name: board.state.public for board in diff.boards
            if board.state.public != before.get(board.device.name)})
        return diff

    def _send_parts(self, diff: Diff) -> bool:
        """Send missing parts; return whether every board has its part."""
        self._watch.phase("shards")
        for board in diff.boards:
            if not board.transfer:
                self._log.add_step(Step(board.device.name, "shards", changed=False))
        results = push(self._manifest.directory, [
            (board.device, part_name(rank), board.receiver) for rank, board in enumerate(diff.boards)
            if board.transfer], self._inventory, progress=self._watch.amount)
        for result in results:
            self._log.add_step(Step(result.board, "shards", changed=True), result.error)
        return not self._log.failed

    def _stop_unused(self, dry_run: bool = False) -> None:
        """Stop the boards of the cluster file that have a release, and no part in this deployment."""
        unused_devices = [device for device, _ in self._deployment.unused_boards]
        if not unused_devices:
            return
        status = look(self._deployment.inventory.model_copy(update={"device": unused_devices}))
        unused = [device for device, board in zip(unused_devices, status.boards, strict=True) if board.current]
        if unused:
            self._log.include(device.name for device in unused)
            self._log.run("leave", [(device, BoardState(device.name)) for device in unused],
                          "stopping what is no longer used", dry_run)

    def _activate(self, diff: Diff) -> bool:
        """Switch and restart all boards; return whether a token came through."""
        draft, *stages = diff.boards
        carry_out = self._log.carry_out
        ready = (carry_out([(stage.device, stage.switch) for stage in stages], "switching to the release")
                and carry_out([(draft.device, draft.switch)], "switching to the release: the draft device")
                and carry_out([(stage.device, stage.activate) for stage in stages], "stages")
                and carry_out([(draft.device, draft.activate)],
                              "the draft device, until a token comes through"))
        if ready:  # a board that fails to settle is reported, but the rollout is not undone
            carry_out([(board.device, board.settle) for board in diff.boards], "settling")
        return ready


def _pythons(diff: Diff) -> dict[str, str]:
    return {board.device.name: board.python for board in diff.boards}

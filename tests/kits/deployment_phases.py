"""A deployment's phases on two boards of a fleet, run at the control place."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.actions import (
    BoardOutcome,
    BoardState,
    Environment,
    Phase,
    Step,
)
from kits.container_boards import Fleet

PLACES = (1, 2)
PATIENCE = 600.0  # two environments on a machine that does much else
# Runs where the boards are in reach.
_RUN = """
import dataclasses, json, sys
from pathlib import Path
from flowspec_edge.boards.deploy.actions import BoardState, Environment
from flowspec_edge.boards.deploy.steps.phases import bring_about
from flowspec_edge.boards.inventory import load_inventory
phase, dry_run, file, boards = json.loads(sys.argv[1])
inventory = load_inventory(Path(file))
devices = {device.name: device for device in inventory.device}
states = [BoardState(**{**board, "environment": Environment(**board["environment"])}) for board in boards]
wanted = [(devices[state.name], state) for state in states]
outcomes = bring_about(inventory, phase, wanted, dry_run)
print(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes]))
"""
# A service that is ready.
_UNIT = """
[Unit]
Description=Stage %i
[Service]
Type=notify
NotifyAccess=all
WorkingDirectory=/opt/flowspec/current
ExecStart=/bin/sh -c 'systemd-notify --ready; exec sleep infinity'
Restart=on-failure
RestartSec=0
User=flowspec
[Install]
WantedBy=multi-user.target
"""


@dataclass
class Bench:
    """Two boards of the fleet, and the control place."""

    fleet: Fleet
    environment: Environment
    cluster: Path

    def state(self, place: int, stage: int = 0) -> BoardState:
        return BoardState(self.fleet.name(place), "first", paths.verify_unit(stage or place),
                          self.environment, {"release.json": '"first"', "etc/verify.toml": "",
                                             f"units/{paths.VERIFY_UNIT}": _UNIT})

    def run(self, phase: Phase, *boards: BoardState, dry_run: bool = False) -> list[BoardOutcome]:
        """Carry out a phase, by default on both boards with the first release; "activate": with what comes
        before and after it."""
        if phase == "activate":
            switched, outcomes, settled = (
                self._run(each, *boards, dry_run=dry_run) for each in ("switch", "activate", "settle"))
            for before, outcome, after in zip(switched, outcomes, settled, strict=True):
                outcome.steps[:] = [*before.steps, *outcome.steps, *after.steps]
                outcome.error = before.error or outcome.error or after.error
            return outcomes
        return self._run(phase, *boards, dry_run=dry_run)

    def _run(self, phase: Phase, *boards: BoardState, dry_run: bool) -> list[BoardOutcome]:
        states = boards or tuple(self.state(place) for place in PLACES)
        job = json.dumps([phase, dry_run, str(self.cluster), [dataclasses.asdict(board) for board in states]])
        done = self.fleet.run([sys.executable, "-c", _RUN, job], PATIENCE)
        assert done.returncode == 0, done.stderr
        return [BoardOutcome(outcome["board"], [Step(**step) for step in outcome["steps"]], outcome["error"])
                for outcome in json.loads(done.stdout)]

    def well(self, phase: Phase, *boards: BoardState, dry_run: bool = False) -> list[int]:
        """The same where nothing goes wrong: how much has changed on each."""
        outcomes = self.run(phase, *boards, dry_run=dry_run)
        assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
        return [outcome.changes for outcome in outcomes]

    def traces(self, place: int) -> list[str]:
        """All that is there of flowspec: files, users, units that systemd knows of."""
        return self.fleet.shell(place, "find / -xdev -name '*flowspec*' -not -path '/proc/*'; "
                                       "getent passwd flowspec || getent group flowspec || true; "
                                       "systemctl list-units --all --no-legend 'flowspec*'").splitlines()

"""systemd's own watchdog over a service that says what ``drivers.stage.sd_notify`` says, on a board."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits import container_boards
from kits.container_boards import Fleet

from flowspec_edge.drivers.stage import sd_notify

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

WATCHDOG_S = 1
# What blocks is longer than the watchdog's time: it stands for a library that is read from a slow card.
_SERVICE = """
import os, sys, time
sys.path.insert(0, "/srv")
from notify import Notifier
notifier, what = Notifier(os.environ), sys.argv[1]
if what == "starts":
    notifier.alive()
    time.sleep(2.5)  # a start that takes longer than WatchdogSec
notifier.ready("serves")
if what == "is slow":
    with notifier.slow():
        time.sleep(2.5)  # one call that takes longer than WatchdogSec
if what == "was slow":
    with notifier.slow():
        pass
if what in ("is stuck", "was slow"):
    time.sleep(30)  # stuck: systemd has to end it long before
"""
# By what the service does: how it ends, in systemd's words.
ENDS = {"starts": "success", "is slow": "success", "is stuck": "watchdog", "was slow": "watchdog"}


@pytest.mark.core
def test_the_watchdog_ends_what_is_stuck_and_nothing_that_loads(fleet: Fleet) -> None:
    source = Path(sd_notify.__file__).read_text()
    for name, text in (("notify.py", source), ("service.py", _SERVICE)):
        fleet.shell(1, f"cat > /srv/{name} <<'END'\n{text}\nEND")
    units = {what: f"try-{number}.service" for number, what in enumerate(ENDS)}
    try:
        for what, unit in units.items():
            fleet.shell(1, f"systemd-run --quiet --no-block --unit={unit} --remain-after-exit -p Type=notify "
                           f"-p NotifyAccess=main -p WatchdogSec={WATCHDOG_S} -p LimitCORE=0 "
                           f"python3 /srv/service.py '{what}'")
        over = "systemctl show -P SubState {} | grep -qE 'exited|failed'"
        for unit in units.values():
            fleet.shell(1, f"until {over.format(unit)}; do sleep 0.1; done")
        found = {what: fleet.shell(1, f"systemctl show -P Result {unit}").strip()
                 for what, unit in units.items()}
    finally:
        fleet.shell(1, f"systemctl stop {' '.join(units.values())}; systemctl reset-failed; rm /srv/*.py",
                    check=False)
    assert found == ENDS

"""What the engine's steps make of a board's own settings: power mode and clocks, and the time.

No machine here has power modes, and no container a clock of its own: a stand-in has the words that count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kits import container_boards
from kits.container_boards import Fleet
from kits.deployment_phases import Bench

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.steps.power import power_script
from flowspec_edge.util.resources import resource_dir

pytestmark = [pytest.mark.fleet, container_boards.needs_fleet]

# Stand-ins for a Jetson's tools, with the words of theirs that count.  The mode outlives a reboot, the clocks
# do not; jetson_clocks asks before it writes over a file.
_L4T = """
printf '%s\\n' '< POWER_MODEL ID=0 NAME=15W >' '< POWER_MODEL ID=2 NAME=MAXN_SUPER >' \
    '< PM_CONFIG DEFAULT=0 >' > /etc/nvpmodel.conf
cat > /usr/local/bin/nvpmodel <<'END'
#!/bin/sh
mode=/var/lib/nvpmodel
[ $1 = -q ] && echo "NV Power Mode: some" && cat $mode || echo $2 > $mode
END
cat > /usr/local/bin/jetson_clocks <<'END'
#!/bin/sh
case $1 in
    --store) [ ! -e $2 ] && { cat /run/clocks 2>/dev/null || echo governed; } > $2;;
    --restore) cp $2 /run/clocks;;
    *) echo highest > /run/clocks
esac
END
chmod +x /usr/local/bin/*; echo 0 > /var/lib/nvpmodel
"""
_NO_L4T = "rm -f /etc/nvpmodel.conf /usr/local/bin/nvpmodel /usr/local/bin/jetson_clocks /var/lib/nvpmodel"
_POWER = "cat /var/lib/nvpmodel; cat /run/clocks 2>/dev/null || echo governed"


@pytest.fixture
def jetson(bench: Bench) -> Iterator[Fleet]:
    """Board 1 has power modes."""
    bench.fleet.shell(1, _L4T)
    yield bench.fleet
    bench.fleet.shell(1, f"{_NO_L4T} /run/clocks; rm -rf {paths.POWER_BEFORE}")


def test_mode_and_clocks_last_until_they_are_put_back(running: Bench, jetson: Fleet) -> None:
    unit = (resource_dir("deploy") / "units" / paths.POWER_UNIT).read_text()
    plain = running.state(1)
    fast = replace(plain, release="fast", power_mode="MAXN_SUPER", files={
        **plain.files, f"units/{paths.POWER_UNIT}": unit, "etc/power-mode.sh": power_script("MAXN_SUPER")})
    assert running.well("software", fast) == running.well("release", fast) == [1]
    assert running.well("activate", fast, dry_run=True) == running.well("activate", fast)
    assert running.well("activate", fast) == [0]
    jetson.reboot(1)
    assert jetson.shell(1, _POWER).split() == ["2", "highest"]
    jetson.shell(1, "echo 0 > /var/lib/nvpmodel")  # by hand; the release's mode counts
    jetson.reboot(1)
    assert jetson.shell(1, _POWER).split() == ["2", "highest"]
    assert running.well("activate", fast) == [0]
    assert min(running.well("activate", plain)) > 0  # a release that leaves the mode as it is
    jetson.reboot(1)
    assert jetson.shell(1, _POWER).split() == ["2", "governed"]
    assert min(running.well("activate", fast)) > 0
    assert running.well("down", fast, dry_run=True) == running.well("down", fast)
    assert jetson.shell(1, _POWER).split() == ["0", "governed"]
    assert jetson.shell(1, f"find {paths.UNITS} -name '*flowspec*'; ls {paths.ETC}") == ""


# A container's clock cannot be set: its `date`, root's and the login user's, is told how far it is off.
_DATE = """
echo {off} > /run/off
cat > /usr/local/bin/date <<'END'
#!/bin/sh
case $1 in
    --set=@*) echo "${{1#--set=@}} - $(/usr/bin/date +%s)" | sed 's/[.][0-9]*//' > /run/difference
        echo $(($(cat /run/difference))) > /run/off;;
    *) now=$(/usr/bin/date +%s.%N); echo $((${{now%.*}} + $(cat /run/off))).${{now#*.}}
esac
END
printf '%s\\n' '#!/bin/sh' 'echo NTPSynchronized={ntp}' > /usr/local/bin/timedatectl
chmod +x /usr/local/bin/*
"""


@pytest.mark.parametrize(("off", "ntp", "direction"), [
    (-100_000_000, "no", "behind"), (3600, "no", "ahead"), (20, "no", ""),
    (3600, "yes", ""),  # then one of the two clocks is wrong, and preflight says so
])
def test_a_clock_that_no_time_server_keeps_is_set(bench: Bench, off: int, ntp: str, direction: str) -> None:
    fleet = bench.fleet
    with fleet.changed(1, _DATE.format(off=off, ntp=ntp),
                       "rm /usr/local/bin/date /usr/local/bin/timedatectl /run/off; rm -f /run/difference"):
        (would,) = bench.run("software", bench.state(1), dry_run=True)
        (outcome,) = bench.run("software", bench.state(1))
        left = int(fleet.shell(1, "cat /run/off"))
    assert outcome.error == ""
    assert outcome.changes == would.changes == bool(direction)
    said = re.fullmatch(r"clock(?: set: it was (\d+) s (ahead|behind))?", outcome.steps[0].name)
    assert said
    assert said.group(2) == (direction or None)
    if direction:
        assert int(said.group(1)) == pytest.approx(abs(off), abs=9)  # seconds pass meanwhile
    assert left == pytest.approx(0 if direction else off, abs=9)

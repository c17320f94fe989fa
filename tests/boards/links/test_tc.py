"""The tc commands: accepted without a warning, and their effect."""

from __future__ import annotations

import re
import subprocess

import pytest
from kits import network_beds

from flowspec_edge.boards.commands import LocalRunner
from flowspec_edge.boards.links import tc
from flowspec_edge.errors import UsageError


def in_a_namespace(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["unshare", "--net", "--", "sh", "-es"], input=text, capture_output=True, text=True,
                          check=False)


def bits(shown: str) -> float:
    """A rate as tc prints it."""
    number, unit = re.fullmatch(r"(\d+)([KMG]?)bit", shown).groups()
    return float(number) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[unit]


@network_beds.needs_netns
@pytest.mark.parametrize("mbps", [0.1, 10, 125, 1000, 40_000])
def test_tc_accepts_it_without_a_warning(mbps: float) -> None:
    lines = [*tc.commands("lo", mbps, [22, 7701]), *tc.rate_commands("lo", 2 * mbps)]
    done = in_a_namespace(tc.script([*lines, "tc class show dev lo"]))
    assert (done.returncode, done.stderr) == (0, "")
    shown = r"class htb (\S+) .*?(?:prio (\d) )?rate (\S+) ceil (\S+) "
    classes = {name: (prio, bits(rate), bits(ceil)) for name, prio, rate, ceil in
               re.findall(shown, done.stdout)}
    total = pytest.approx(2 * mbps * 1e6, rel=0.01)
    assert [classes[name][2] for name in ("f5ec:1", "f5ec:10", "f5ec:20")] == [total] * 3
    assert classes["f5ec:1"][1] == classes["f5ec:10"][1] + classes["f5ec:20"][1] == total
    assert classes["f5ec:10"][0] < classes["f5ec:20"][0]


@network_beds.needs_netns
def test_the_kernel_has_no_complaint_about_quanta() -> None:
    """HTB complains in the kernel's log, where tc does not look."""
    marker = subprocess.run(["dmesg"], capture_output=True, text=True, check=False)
    if marker.returncode:
        pytest.skip("the kernel's log cannot be read")
    assert in_a_namespace(tc.script(tc.commands("lo", 1000, [22]))).returncode == 0
    after = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout
    assert "quantum" not in after[len(marker.stdout):]


@network_beds.needs_netns
def test_removal_takes_only_our_qdisc() -> None:
    show = "tc qdisc show dev lo root"
    ours = in_a_namespace(tc.script([*tc.commands("lo", 10, []), tc.removal("lo"),
                                          tc.removal("lo"), show]))
    assert "htb" not in ours.stdout
    assert ours.stderr == ""
    others = ["tc qdisc add dev lo root handle 1: htb", tc.removal("lo"), show]
    other = in_a_namespace(tc.script(others))
    assert "htb 1:" in other.stdout


@network_beds.needs_netns
def test_the_kernel_check_leaves_no_trace() -> None:
    """What it names as missing: tests/boards/doctor/test_checks.py."""
    before = subprocess.run(["tc", "qdisc"], capture_output=True, text=True, check=True).stdout
    tc.check_kernel(LocalRunner())
    assert subprocess.run(["tc", "qdisc"], capture_output=True, text=True, check=True).stdout == before


@pytest.mark.parametrize("mbps", [0, -1, 1e6, float("nan")])
def test_rates_out_of_range(mbps: float) -> None:
    with pytest.raises(UsageError, match="Mbps"):
        tc.commands("eth0", mbps, [])

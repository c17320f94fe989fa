"""The doctor's rules over facts: of systems and boards as they should be, and of others that are not."""

from __future__ import annotations

import os
from typing import Any

import pytest
from kits import network_beds

from flowspec_edge.boards.commands import LocalRunner
from flowspec_edge.boards.doctor.cluster import why_not_shaped
from flowspec_edge.boards.links import tc
from flowspec_edge.boards.probe import system_rules as rules
from flowspec_edge.boards.probe.checks import CHECKS, CheckScope, Subject, faults
from flowspec_edge.boards.probe.facts import BoardFacts, SystemFacts, system_facts
from flowspec_edge.boards.probe.findings import WORST, Finding, merged

# The files of an Orin that is as it should be, by their names below the root; groups are this process'.
ORIN = {
    "sys/firmware/devicetree/base/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >\n"
                         "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n",
    "var/lib/nvpmodel/status": "pmode:0002 fmode:quiet",
    "proc/meminfo": "MemTotal:        7802680 kB\nMemAvailable:    6812340 kB\n",
    "proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n",
    "sys/class/thermal/thermal_zone0/temp": "51250\n",
    "etc/group": f"root:x:0:\nvideo:x:{os.getgid()}:\nrender:x:{os.getgid()}:\n",
}
GROUPS = "root:x:0:\nvideo:x:44:me\nrender:x:104:me\n"
FACTS: dict[str, Any] = {
    "files": {**ORIN, "etc/group": GROUPS}, "python": [3, 10, 12], "user": "root", "sudo": "", "gpu": True,
    "machine": "aarch64", "hostname": "orin-1", "systemd": {"version": 249, "runs": True},
    "torch": {"version": "2.8.0", "file": "/usr/lib/torch/__init__.py", "cuda": [8, 7], "why": ""},
    "disks": {"/opt/flowspec": {"device": 1, "free": 50 * 10**9, "writable": True},
              "/var/lib/flowspec": {"device": 1, "free": 50 * 10**9, "writable": True}},
    "memory": {"total": 8 * 10**9, "available": 7 * 10**9, "held": 0}, "ports": {}, "ntp": "yes",
    "environments": [],
    "timedatectl": "CanNTP=yes\nNTP=yes\nNTPSynchronized=yes\n",
    "interface": "eth0",
    "links": {"eth0": {"wireless": False, "mbps": 1000, "dynamic": False}},
    "desktop": False, "packages": {"nvidia-l4t-core": True}}


def facts(**changes: Any) -> SystemFacts:
    return system_facts({**FACTS, **changes})


def judged(place: CheckScope, subject: Subject) -> dict[str, Finding]:
    """What the doctor finds; no check says worse than its severity."""
    found: list[Finding] = []
    for check in CHECKS:
        if place in check.scopes and check.asks is Subject:
            own = list(check.rule(subject))
            assert all(WORST.index(finding.state) >= WORST.index(check.severity) for finding in own)
            found += own
    return {finding.check: finding for finding in merged(found)}


def checked(given: SystemFacts, storage: str = "", power_mode: str = "") -> dict[str, Finding]:
    """Of a board before the first `deploy up`."""
    return judged("bare", Subject(BoardFacts(system=given), "python3", "cuda", storage=storage,
                                  power_mode=power_mode, address="10.0.0.11", interface="eth0"))


def network(given: SystemFacts, interface: str = "eth0") -> Finding:
    return rules.network(given, "10.0.0.11", interface, None)


def system(changes: dict[str, str] | None = None, power_mode: str = "", **others: Any) -> dict[str, Finding]:
    """Of this machine, by an Orin's files and ``changes`` to them."""
    given = facts(files={**ORIN, **(changes or {})}, **others)
    return judged("here", Subject(BoardFacts(system=given), power_mode=power_mode))


def test_a_board_as_it_should_be() -> None:
    found = checked(facts())
    assert {name: finding for name, finding in found.items() if finding.state != "ok" or finding.advice} == {}
    assert set(found) == {"clock", "board", "python", "torch", "sudo", "systemd", "memory", "swap",
                          "temperature", "power mode", "disk", "time", "groups", "network", "desktop",
                          "apt hold"}
    assert found["torch"].found == ("2.8.0, which sees the GPU (compute capability 8.7), "
                                    "/usr/lib/torch/__init__.py")
    assert found["disk"].found == "50 GB free at /opt/flowspec and /var/lib/flowspec"
    assert found["temperature"].found == "51 °C in the hottest zone"
    assert found["groups"].found == "video, render; flowspec deploy up makes its user flowspec a member"
    assert found["network"] == Finding("network", "ok", "10.0.0.11 at eth0, 1000 Mbps")


READ_ONLY = {"/opt/flowspec": {"device": 1, "free": 5 * 10**9, "writable": False},
             "/var/lib/flowspec": {"device": 2, "free": 10**12, "writable": True}}


@pytest.mark.parametrize(("changes", "check", "state", "says", "advice"), [
    ({"python": [3, 8, 10]}, "python", "failed", "python3 is 3.8.10", "3.10 or newer"),
    ({"torch": {"version": "", "file": "", "cuda": None, "why": "ModuleNotFoundError: torch"}}, "torch",
     "failed", "ModuleNotFoundError: torch", "install "),
    ({"torch": {"version": "2.8.0+cpu", "file": "x", "cuda": None, "why": ""}}, "torch", "failed",
     "sees no CUDA GPU", "install the torch"),
    ({"sudo": "a password is required", "user": "me"}, "sudo", "failed", "me cannot become root",
     "sudoers.d"),
    ({"systemd": {"version": 245, "runs": True}}, "systemd", "failed", "245", "upgrade"),
    ({"disks": READ_ONLY}, "disk", "failed", "mounted read-only", "remount"),
    ({"disks": {path: {**disk, "writable": True} for path, disk in READ_ONLY.items()}}, "disk", "warning",
     "5 GB free at /opt/flowspec", "make room"),
    ({"timedatectl": "CanNTP=yes\nNTP=yes\nNTPSynchronized=no\n"}, "time", "warning",
     "no server has answered", "without internet"),
    ({"files": {**ORIN, "etc/group": GROUPS + "flowspec:x:999:\n"}}, "groups", "failed",
     "the user flowspec is not in video and render", "sudo usermod -aG video,render flowspec"),
])
def test_each_fault_of_a_board_has_a_next_step(changes: dict[str, Any], check: str, state: str, says: str,
                                        advice: str) -> None:
    finding = checked(facts(**changes))[check]
    assert (finding.state, says in finding.found, advice in finding.advice) == (state, True, True), finding


def test_a_directory_that_is_none_has_no_room() -> None:
    found = judged("here", Subject(BoardFacts(system=facts()), absent="/nowhere"))["disk"]
    assert (found.state, found.found) == ("failed", "/nowhere: No such directory")


def test_another_place_for_shards() -> None:
    disks = {**FACTS["disks"], "/data": {"device": 2, "free": 3 * 10**9, "writable": True}}
    found = checked(facts(disks=disks), "/data")["disk"]
    assert (found.state, found.found) == ("warning", "3 GB free at /data")


def test_a_board_that_reports_no_disk_is_unknown() -> None:
    assert checked(facts(disks={}))["disk"].state == "unknown"
    assert checked(facts(), "/not/reported")["disk"].state == "unknown"


def test_a_member_and_a_power_mode_that_is_asked_for() -> None:
    member = GROUPS.replace("me", "me,flowspec") + "flowspec:x:999:\n"
    assert checked(facts(files={**ORIN, "etc/group": member}))["groups"] == Finding("groups", "ok",
                                                                                    "video, render")
    asked = checked(facts(), power_mode="15W")["power mode"]
    assert (asked.state, asked.remedy[0]) == ("warning", ("nvpmodel", "-m", "0"))
    for command in ("flowspec deploy up", "sudo nvpmodel -m 0", "sudo jetson_clocks"):
        assert command in asked.advice


@pytest.mark.parametrize(("link", "says", "advice"), [
    ({"wireless": True}, "eth0 is WiFi", "by cable"),
    ({"mbps": 100}, "eth0 runs at 100 Mbps", "see whether cable and switch are made for 1000 Mbps"),
    ({"dynamic": True}, "10.0.0.11 is leased (DHCP)", "reserve it for this board"),
    ({"wireless": True, "dynamic": True}, "vary; 10.0.0.11 is leased", "by cable; reserve"),
])
def test_networks_that_are_worse_than_they_could_be(link: dict[str, Any], says: str, advice: str) -> None:
    finding = network(facts(links={"eth0": {**FACTS["links"]["eth0"], **link}}))
    assert (finding.state, says in finding.found) == ("warning", True), finding
    assert advice in finding.advice


def test_the_interface_that_has_the_address() -> None:
    other = network(facts(), "enP8p1s0")
    assert (other.state, other.found) == (
        "warning", "10.0.0.11 is at eth0, and the cluster file says enP8p1s0")
    usb = network(facts(interface="l4tbr0"))
    assert (usb.state, "USB device port" in usb.found) == ("failed", True)
    assert network(facts(interface="")).state == "unknown"


def test_the_desktop_and_packages_of_a_jetson() -> None:
    packages = {"nvidia-l4t-core": True, "nvidia-l4t-cuda": False}
    found = checked(facts(desktop=True, packages=packages))
    desktop, hold = found["desktop"], found["apt hold"]
    assert (desktop.state, "0.8 GB" in desktop.found, "multi-user.target" in desktop.advice) == (
        "warning", True, True)
    assert (hold.state, hold.found.startswith("an apt upgrade would replace 1 of 2 ")) == ("warning", True)
    assert hold.advice.startswith("sudo apt-mark hold 'nvidia-l4t-*'")
    assert not hold.remedy
    assert checked(facts(packages={}))["apt hold"].state == "unknown"


def test_a_system_as_it_should_be() -> None:
    found = system()
    assert {name: finding for name, finding in found.items() if finding.state != "ok" or finding.advice} == {}
    assert found["board"].found == "NVIDIA Jetson Orin Nano Developer Kit, L4T 36.4.3 (JetPack 6.1 or 6.2)"
    assert found["memory"].found == "7.0 of 8.0 GB available"
    assert found["power mode"].found == "MAXN_SUPER"
    assert system(nvpmodel="NV Power Mode: 25W\n1\n")["power mode"].found.startswith("25W, and there is MAXN")


@pytest.mark.parametrize(("changes", "check", "state", "says", "advice"), [
    ({"etc/nv_tegra_release": "# R35 (release), REVISION: 4.1\n"}, "board", "failed", "older than 3.10",
     "JetPack 6"),
    ({"etc/nv_tegra_release": "# R41 (release), REVISION: 1.0\n"}, "board", "warning", "L4T 41.1.0", "go on"),
    ({"proc/meminfo": "MemTotal: 7802680 kB\nMemAvailable: 3000000 kB\n"}, "memory", "warning", "3.1 of 8.0",
     "multi-user.target"),
    ({"proc/meminfo": "nothing\n"}, "memory", "unknown", "does not say", ""),
    ({"proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 2097152 0 5\n"
                    "/dev/zram1 partition 2097152 0 5\n"}, "swap", "warning",
     "4.3 GB in /dev/zram0, /dev/zram1", "nvzramconfig"),
    ({"proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 2097152 0 5\n"
                    "/data/swap file 8388604 0 -2\n"}, "swap", "ok", "10.7 GB", ""),
    ({"sys/class/thermal/thermal_zone0/temp": "83000\n"}, "temperature", "warning", "83 °C", "fan"),
    ({"sys/class/thermal/thermal_zone0/temp": "97500\n"}, "temperature", "failed", "98 °C", "cool"),
    ({"var/lib/nvpmodel/status": "pmode:0001"}, "power mode", "warning", "25W, and there is MAXN_SUPER",
     "nvpmodel -m 2"),
    ({"var/lib/nvpmodel/status": ""}, "power mode", "unknown", "does not say", "nvpmodel -q"),
])
def test_each_fault_of_a_system_has_a_next_step(changes: dict[str, str], check: str, state: str,
                                        says: str, advice: str) -> None:
    finding = system(changes)[check]
    assert (finding.state, says in finding.found, advice in finding.advice) == (state, True, True), finding
    assert bool(finding.advice) == bool(advice)


@pytest.mark.parametrize(("revision", "warned"), [
    ("4.3", False), ("4.7", True), ("4.10", True), ("5.0", True)])
def test_releases_that_may_refuse_large_pieces_of_memory(revision: str, warned: bool) -> None:
    release = {"etc/nv_tegra_release": f"# R36 (release), REVISION: {revision}, GCID: 1\n"}
    found = system(release)
    assert ("gpu memory" in found) == warned
    board = Subject(BoardFacts(system=facts(files={**ORIN, **release})), "python3", "cuda")
    assert [finding.check for finding in faults("init", board)] == ["gpu memory"] * warned
    assert faults("up", board) == []  # each deployment would say it again
    if warned:
        assert found["gpu memory"].state == "warning"
        assert "CVE-2025-33177" in found["gpu memory"].found
        assert "256 MB at once" in found["gpu memory"].advice


def test_a_user_without_the_gpus_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    groups = {"etc/group": f"video:x:{os.getgid()}:\nrender:x:4999:\n"}
    finding = system(groups)["groups"]
    assert (finding.state, finding.found) == ("failed", "this user is not in render")
    assert finding.advice.startswith("sudo usermod -aG render ")


@pytest.mark.parametrize(("wanted", "state", "says", "remedy"), [
    ("MAXN_SUPER", "ok", "MAXN_SUPER", ()),
    ("25W", "warning", "MAXN_SUPER, and 25W is asked for", ("nvpmodel", "-m", "1")),
    ("60W", "failed", "60W is asked for, and there is only 15W, 25W, MAXN_SUPER", ()),
])
def test_a_power_mode_that_is_asked_for(wanted: str, state: str, says: str,
                                        remedy: tuple[str, ...]) -> None:
    finding = system(power_mode=wanted)["power mode"]
    assert (finding.state, finding.found) == (state, says)
    assert (finding.remedy[0] if finding.remedy else ()) == remedy


def test_a_machine_without_power_modes_cannot_have_one() -> None:
    finding = system(dict.fromkeys(ORIN, ""), "25W")["power mode"]
    assert finding.state == "failed"
    assert finding.found == "25W is asked for, and there is no /etc/nvpmodel.conf"


@pytest.mark.parametrize(("told", "state", "says"), [
    ("CanNTP=yes\nNTP=yes\nNTPSynchronized=yes\n", "ok", "by NTP"),
    ("CanNTP=yes\nNTP=yes\nNTPSynchronized=no\n", "warning", "no server has answered"),
    ("CanNTP=yes\nNTP=no\nNTPSynchronized=no\n", "warning", "NTP is off"),
    ("CanNTP=no\nNTP=no\n", "warning", "no time service"),
    ("", "unknown", "does not say"),
])
def test_ntp_states(told: str, state: str, says: str) -> None:
    finding = rules.time_service(facts(timedatectl=told))
    assert (finding.state, says in finding.found) == (state, True)
    assert finding.remedy == ((("timedatectl", "set-ntp", "true"),) if "off" in says else ())


def test_only_a_jetson_is_asked_what_only_a_jetson_has() -> None:
    bare = {**ORIN, "etc/nv_tegra_release": ""}
    assert not set(system(bare)) & {"power mode", "groups", "desktop", "apt hold"}


@network_beds.needs_netns
def test_a_kernel_that_cannot_shape_links_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    def shaping() -> Finding:
        board = Subject(BoardFacts(system=facts()), shaping=why_not_shaped(LocalRunner()))
        return judged("bare", board)["link shaping"]

    assert shaping() == Finding("link shaping", "ok", "sch_htb and cls_u32 work")
    wrong = [["tc", "qdisc", "add", "dev", "lo", "root", "no_such_kind"]]
    monkeypatch.setattr(tc, "commands", lambda *_: wrong)
    finding = shaping()
    assert (finding.state, "qdisc kind is unknown" in finding.found) == ("ok", True)
    assert "CONFIG_NET_SCH_HTB=m and CONFIG_NET_CLS_U32=m" in finding.advice


@pytest.mark.parametrize(("offset", "uncertain", "state"), [
    (0.2, 0.1, "ok"), (-1.5, 0.6, "ok"), (1.7, 0.6, "warning"), (-3600.0, 2.0, "warning")])
def test_clocks(offset: float, uncertain: float, state: str) -> None:
    clock = judged("bare", Subject(BoardFacts(offset, uncertain, facts())))["clock"]
    assert clock.state == state

"""software: prepares a board for a release, without disturbing what runs."""

from __future__ import annotations

from collections.abc import Iterator

from flowspec_edge.fleet import paths
from flowspec_edge.fleet.deploy.engine.desired_state import Action, BoardState
from flowspec_edge.fleet.deploy.engine.run import quote
from flowspec_edge.fleet.deploy.steps.environment import environment
from flowspec_edge.fleet.deploy.steps.power import power
from flowspec_edge.fleet.probe.checks import MAX_CLOCK_SKEW_S
from flowspec_edge.fleet.probe.facts import BoardFacts
from flowspec_edge.fleet.probe.onboard.system import GPU_GROUPS

_SHELL = "/usr/sbin/nologin"
# Only root may write programs, models and keys, or read keys.
_DIRECTORIES = (
    (paths.HOME, "root", "755"), (paths.RELEASES, "root", "755"), (paths.VENVS, "root", "755"),
    (paths.WHEELS, "root", "755"), (paths.STATE, paths.USER, "755"), (paths.MODELS, "root", "755"),
    (paths.ETC, "root", "700"))
# Written atomically; only root can read it, and systemd passes it to the service as a credential.
_CLIENT_KEY = f"""[ ! -s {paths.API_KEY} ] || exit 0
umask 377
head -c 33 /dev/urandom | base64 -w 0 > {paths.API_KEY}.new
sync {paths.API_KEY}.new
mv {paths.API_KEY}.new {paths.API_KEY}
sync {paths.ETC}"""


def software(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    yield clock(facts)
    yield account(facts)
    for path, owner, mode in _DIRECTORIES:
        there = facts.modes.get(path) == f"{mode} {owner}"
        yield Action(f"directory {path}", () if there else (
            quote("install", "-d", "-m", mode, "-o", owner, "-g", owner, path),))
    yield from environment(state, facts)
    yield from power(state, facts)
    if state.client_key:
        yield Action("clients' key", () if facts.client_key else (quote("sh", "-ec", _CLIENT_KEY),))


def clock(facts: BoardFacts) -> Action:
    """Set the clock from this machine's if it is off by more than the limit and NTP does not keep it.

    A Jetson developer kit's clock has no battery: after a power failure without internet it is years behind,
    which breaks TLS, package signatures and journal times.
    """
    if facts.ntp == "yes" or abs(facts.ahead) - facts.within <= MAX_CLOCK_SKEW_S:
        return Action("clock")
    off = f"{abs(facts.ahead):.0f} s {'ahead' if facts.ahead > 0 else 'behind'}"
    now = f"""$(date +%s.%N | awk '{{ printf "%.3f", $1 - ({facts.ahead:.3f}) }}')"""
    return Action(f"clock set: it was {off}", (f"date --set=@{now}",))


def account(facts: BoardFacts) -> Action:
    """A user without login, in the GPU's groups that exist here."""
    groups = [group for group in GPU_GROUPS if group in facts.groups]
    step = f"user {paths.USER}"
    if facts.user is None:
        joined = ["--groups", ",".join(groups)] if groups else []
        return Action(step, (quote("useradd", "--system", "--user-group", "--home-dir", paths.STATE,
                                   "--no-create-home", "--shell", _SHELL, *joined, paths.USER),))
    change = [*(["--home", paths.STATE] if facts.user["home"] != paths.STATE else []),
              *(["--shell", _SHELL] if facts.user["shell"] != _SHELL else [])]
    if missing := [group for group in groups if group not in facts.user["groups"]]:
        change += ["--append", "--groups", ",".join(missing)]
    return Action(step, (quote("usermod", *change, paths.USER),) if change else ())

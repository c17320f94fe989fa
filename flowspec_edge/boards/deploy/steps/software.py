"""software: prepares a board for a release, without disturbing running services.

A release runs from an environment, or from an image (``steps.image``).  The environment is a venv on the board's
system Python and torch, filled from wheels without a network:

    /opt/flowspec/wheels/           the newest environment's wheels, so that only new wheels are sent
    /opt/flowspec/venvs/DIGEST/     complete if it has .complete, written after a sync; otherwise made again
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.actions import Action, BoardState, Environment, quote
from flowspec_edge.boards.deploy.steps.image import image
from flowspec_edge.boards.deploy.steps.power import power
from flowspec_edge.boards.images.archive import Image
from flowspec_edge.boards.probe.checks import MAX_CLOCK_SKEW_S
from flowspec_edge.boards.probe.facts import BoardFacts
from flowspec_edge.boards.probe.onboard.system import GPU_GROUPS
from flowspec_edge.util.interpreter import code_command, module_command

_SHELL = "/usr/sbin/nologin"
_CHECK = Path(__file__).with_name("environment_check.py")
_TIMEOUT_S = 1800.0  # unpacking and compiling on an SD card is slow
# Only root may write programs, models and keys, or read keys.
_DIRECTORIES = (
    (paths.HOME, "root", "755"), (paths.RELEASES, "root", "755"), (paths.VENVS, "root", "755"),
    (paths.WHEELS, "root", "755"), (paths.STATE, paths.USER, "755"), (paths.MODELS, "root", "755"),
    (paths.ETC, "root", "700"))
# The key is written atomically. Only root can read it; systemd passes it to the service as a credential.
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
        is_there = facts.modes.get(path) == f"{mode} {owner}"
        yield Action(f"directory {path}", () if is_there else (
            quote("install", "-d", "-m", mode, "-o", owner, "-g", owner, path),))
    yield from image(state.environment, facts) if isinstance(state.environment, Image) else environment(state, facts)
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
    """Return the action that makes a user without login, in the GPU's groups that exist on the board."""
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


def environment(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    """Build and check the environment."""
    target = state.environment
    if not isinstance(target, Environment):
        return
    if facts.venvs.get(target.digest):
        yield Action("environment")
        return
    yield wheels(target, facts)
    venv = f"{paths.VENVS}/{target.digest}"
    pip, *others = sorted(target.wheels, key=lambda name: not name.startswith("pip-"))
    install = quote(
        f"{venv}/bin/python", f"{paths.WHEELS}/{pip}/pip", "install", "--quiet", "--no-index", "--no-deps",
        "--no-compile", "--no-cache-dir", "--ignore-installed", "--disable-pip-version-check",
        "--root-user-action=ignore", *(f"{paths.WHEELS}/{name}" for name in others))
    # The check imports what the services import, and so compiles just what they need.
    yield Action("environment", (
        quote("rm", "-rf", venv),
        quote(*module_command("venv", "--system-site-packages", "--without-pip", venv,
                                   python=target.python)),
        install,
        quote(*code_command(_CHECK.read_text(), python=f"{venv}/bin/python")),
        # A sync first, because the mark must not survive a power failure without the files.  Most of the some
        # 300 MB are on the disk by now; the rest takes seconds on an SD card.
        quote("sync", "-f", venv),
        f"{quote('echo', target.digest)} > {quote(f'{venv}/.complete')}",
    ), timeout_s=_TIMEOUT_S)


def wheels(environment: Environment, facts: BoardFacts) -> Action:
    """Bring exactly the environment's wheels into the board's cache."""
    missing = [name for name, sha256 in sorted(environment.wheels.items()) if facts.wheels.get(name) != sha256]
    stale = sorted(set(facts.wheels) - set(environment.wheels))
    step = f"wheels ({len(missing)} of {len(environment.wheels)})"
    remove = [quote("rm", "-f", "--", *stale)] if stale else []
    checksums = "".join(f"{environment.wheels[name]}  {name}\n" for name in missing)
    receive = ["tar -xf - --no-same-owner",
               f"{quote('printf', '%s', checksums)} | sha256sum --check --quiet --strict -"] if missing else []
    commands = [f"cd {paths.WHEELS} && {' && '.join([*remove, *receive])}"] if remove or receive else []
    return Action(step, tuple(commands), {name: Path(environment.wheelhouse, name) for name in missing},
                  timeout_s=_TIMEOUT_S)

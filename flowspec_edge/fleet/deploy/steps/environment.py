"""The environment: a venv on the board's system Python and torch, filled from wheels without a network.

    /opt/flowspec/wheels/           the newest environment's wheels, so that only new ones are sent
    /opt/flowspec/venvs/DIGEST/     complete if it has .complete, written after a sync; else made anew
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flowspec_edge.fleet import paths
from flowspec_edge.fleet.deploy.engine.desired_state import Action, BoardState, Environment
from flowspec_edge.fleet.deploy.engine.run import quote
from flowspec_edge.fleet.probe.facts import BoardFacts

_CHECK = Path(__file__).with_name("environment_check.py")
_TIMEOUT_S = 1800.0  # unpacking and compiling on an SD card is slow


def environment(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    """Build and check the environment."""
    wanted = state.environment
    if wanted is None:
        return
    if facts.venvs.get(wanted.digest):
        yield Action("environment")
        return
    yield wheels(wanted, facts)
    venv = f"{paths.VENVS}/{wanted.digest}"
    pip, *others = sorted(wanted.wheels, key=lambda name: not name.startswith("pip-"))
    install = quote(
        f"{venv}/bin/python", f"{paths.WHEELS}/{pip}/pip", "install", "--quiet", "--no-index", "--no-deps",
        "--no-compile", "--no-cache-dir", "--ignore-installed", "--disable-pip-version-check",
        "--root-user-action=ignore", *(f"{paths.WHEELS}/{name}" for name in others))
    # The check imports what the services import, and so compiles just what they need.
    yield Action("environment", (
        quote("rm", "-rf", venv),
        quote(wanted.python, "-m", "venv", "--system-site-packages", "--without-pip", venv),
        install,
        quote(f"{venv}/bin/python", "-c", _CHECK.read_text()),
        # The mark must not survive a power failure without the files.  One syncfs per environment: some
        # 300 MB, mostly written by now; the rest takes seconds on an SD card.
        quote("sync", "-f", venv),
        f"{quote('echo', wanted.digest)} > {quote(f'{venv}/.complete')}",
    ), timeout_s=_TIMEOUT_S)


def wheels(wanted: Environment, facts: BoardFacts) -> Action:
    """Bring exactly the environment's wheels into the board's cache."""
    missing = [name for name, sha256 in sorted(wanted.wheels.items()) if facts.wheels.get(name) != sha256]
    stale = sorted(set(facts.wheels) - set(wanted.wheels))
    step = f"wheels ({len(missing)} of {len(wanted.wheels)})"
    remove = [quote("rm", "-f", "--", *stale)] if stale else []
    listed = "".join(f"{wanted.wheels[name]}  {name}\n" for name in missing)
    receive = ["tar -xf - --no-same-owner",
               f"{quote('printf', '%s', listed)} | sha256sum --check --quiet --strict -"] if missing else []
    commands = [f"cd {paths.WHEELS} && {' && '.join([*remove, *receive])}"] if remove or receive else []
    return Action(step, tuple(commands), {name: Path(wanted.wheelhouse, name) for name in missing},
                  timeout_s=_TIMEOUT_S)

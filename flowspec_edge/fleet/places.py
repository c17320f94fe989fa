"""Where things are on a board that ``flowspec deploy`` looks after.

Knows names and paths, the same on every board.  Does not know what is in them, nor how it gets there.

    /opt/flowspec/releases/ID/      a release: release.json, venv (a link), etc/, units/
    /opt/flowspec/venvs/DIGEST/     an environment, by what is installed in it; releases may share one
    /opt/flowspec/wheels/           what the newest environment was made of
    /opt/flowspec/current           → the release that runs, previous → the one before it
    /var/lib/flowspec/models/ID/    a sharded model's manifest.json and this board's own part
    /etc/flowspec/board.key         this board's CURVE key pair, which never leaves it
"""

from __future__ import annotations

HOME = "/opt/flowspec"
RELEASES = f"{HOME}/releases"
VENVS = f"{HOME}/venvs"
WHEELS = f"{HOME}/wheels"
CURRENT = f"{HOME}/current"
PREVIOUS = f"{HOME}/previous"
PYTHON = f"{CURRENT}/venv/bin/python"
STATE = "/var/lib/flowspec"
MODELS = f"{STATE}/models"
CACHE = "/var/cache/flowspec"  # the services' own, made by systemd
ETC = "/etc/flowspec"
KEY = f"{ETC}/board.key"
API_KEY = f"{ETC}/api.key"  # on the draft device, where clients beyond it are let in
UNITS = "/etc/systemd/system"
USER = "flowspec"
DRAFT_UNIT = "flowspec-draft.service"
VERIFY_UNIT = "flowspec-verify@.service"


def verify_unit(stage: int) -> str:
    """The unit that is V``stage``."""
    return f"flowspec-verify@{stage}.service"


def release_dir(release: str) -> str:
    """Where a release lies."""
    return f"{RELEASES}/{release}"


def model_dir(request: str) -> str:
    """Where a board has its part of a sharded model, by the manifest's ``request``."""
    return f"{MODELS}/{request[:16]}"

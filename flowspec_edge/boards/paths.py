"""File layout of a board that ``flowspec deploy`` manages.

    /opt/flowspec/releases/ID/      a release: release.json, venv (a link), etc/, units/
    /opt/flowspec/venvs/DIGEST/     an environment, by its contents; releases may share one.  Where the runtime is an
                                    image: image.json, and programs that run the image (images/launcher.py)
    /opt/flowspec/wheels/           the wheels of the newest environment
    /opt/flowspec/images/           an image's archive, until the board's Docker has loaded it
    /opt/flowspec/current           → the running release; previous → the release before
    /opt/flowspec/unsettled         while a rollout is unfinished (flowspec-draft, flowspec-verify@.service)
    /var/lib/flowspec/models/ID/    a sharded model's manifest.json and this board's part
    /etc/flowspec/board.key         this board's CURVE key pairs, which never leave it
"""

from __future__ import annotations

HOME = "/opt/flowspec"
RELEASES = f"{HOME}/releases"
VENVS = f"{HOME}/venvs"
WHEELS = f"{HOME}/wheels"
IMAGES = f"{HOME}/images"
IMAGE_NAME = "flowspec-board"  # of the images in the board's Docker; their tags are ``images.archive.Image.tag``
CURRENT = f"{HOME}/current"
PREVIOUS = f"{HOME}/previous"
UNSETTLED = f"{HOME}/unsettled"
GOING_BACK = "going back to "  # what it holds if the rollout is a rollback: this, and the release's id
UNTRIED = "untried"  # file of the draft device's release until a token has come through it (flowspec-draft)
PYTHON = f"{CURRENT}/venv/bin/python"
STATE = "/var/lib/flowspec"
MODELS = f"{STATE}/models"
CACHE = "/var/cache/flowspec"  # created by systemd for the services
ETC = "/etc/flowspec"
KEY = f"{ETC}/board.key"
FORMER_KEY = f"{KEY}.old"  # left by an interrupted rotation of an earlier flowspec
API_KEY = f"{ETC}/api.key"  # on the draft device, if it accepts clients from other machines
POWER_BEFORE = f"{ETC}/power-before"  # directory: power mode and clocks before the first `up`
UNITS = "/etc/systemd/system"
USER = "flowspec"
DRAFT_UNIT = "flowspec-draft.service"
POWER_UNIT = "flowspec-power.service"
VERIFY_UNIT = "flowspec-verify@.service"
IMAGE_CONF = "image.conf"  # what the units of services have besides, where the runtime is an image


def verify_unit(stage: int) -> str:
    return f"flowspec-verify@{stage}.service"


def unit_of(role: str, stage: int) -> str:
    return DRAFT_UNIT if role == "draft" else verify_unit(stage)


def release_dir(release: str) -> str:
    return f"{RELEASES}/{release}"


def model_dir(request: str) -> str:
    """Return the directory of a model's parts; ``request``: of the manifest."""
    return f"{MODELS}/{request[:16]}"

"""software, where the runtime is an image: the board's Docker has it, and programs in the place of an environment's.

The archive comes first, over the transfer that shards take (``send_image``), and goes once Docker has loaded it.  Then

    flowspec-board:TAG                          the image, in Docker
    /opt/flowspec/venvs/DIGEST/image.json       its name, and Docker's runtime
    /opt/flowspec/venvs/DIGEST/bin/flowspec     ``images.launcher``, and bin/python, the same program

so that units, keys and the doctor find the software where an environment has it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.actions import Action, Environment, quote
from flowspec_edge.boards.images import launcher
from flowspec_edge.boards.images.archive import FILE, Image
from flowspec_edge.boards.probe.facts import BoardFacts
from flowspec_edge.util.interpreter import code_command

SEND_STEP = "image sent"  # the step of its transfer
_CHECK = Path(__file__).with_name("environment_check.py")
_TIMEOUT_S = 3600.0  # some GB are read and written again, on an SD card perhaps
# Arguments: the archive; the tag to give the image; the ids under which Docker may list it; the tags inside the
# archive, which are removed again unless the board already had them.
_LOAD = """archive=$1; name=$2; ids=$3; new=
for other in $4; do docker image inspect "$other" > /dev/null 2>&1 || new="$new $other"; done
docker load --quiet --input "$archive" > /dev/null
for id in $ids; do
    docker image inspect "$id" > /dev/null 2>&1 || continue
    docker tag "$id" "$name"
    [ -z "$new" ] || docker image rm $new > /dev/null
    exit 0
done
echo "docker has loaded an image that is not $1, which was sent: see its log, journalctl -u docker" >&2
exit 1"""


def lacks(environment: Environment | Image | None, facts: BoardFacts) -> Image | None:
    """Return the image that a board is to have and its Docker lacks; None without one."""
    return environment if isinstance(environment, Image) and environment.tag not in facts.images else None


def image(target: Image, facts: BoardFacts) -> Iterator[Action]:
    """Load the image that was sent, and make and check its programs."""
    name = f"{paths.IMAGE_NAME}:{target.tag}"
    yield Action("image", (
        quote("sh", "-efc", _LOAD, "sh", f"{paths.IMAGES}/{target.tag}/{FILE}", name, " ".join(target.ids),
              " ".join(target.names)),
        quote("rm", "-rf", paths.IMAGES)) if lacks(target, facts) else (), timeout_s=_TIMEOUT_S)
    if facts.venvs.get(target.digest) and not lacks(target, facts):
        yield Action("environment")
        return
    venv = f"{paths.VENVS}/{target.digest}"
    python = target.python if target.python.startswith("/") else f"/usr/bin/env {target.python}"
    program = f"#!{python}\n{inspect.getsource(launcher)}"
    check = code_command(_CHECK.read_text(), "cuda" if target.runtime else "cpu", version("flowspec-edge"),
                         python=f"{venv}/bin/python")
    yield Action("environment", (
        f"rm -rf {venv} && mkdir {venv}", f"tar -xf - --no-same-owner -C {venv}", f"chmod 755 {venv}/bin/*",
        f"{quote('env', f'FLOWSPEC_USER={paths.USER}', *check)} < /dev/null", quote("sync", "-f", venv),
        f"{quote('echo', target.digest)} > {quote(f'{venv}/.complete')}",
    ), {"image.json": json.dumps({"image": name, "runtime": target.runtime}) + "\n", "bin/flowspec": program,
        "bin/python": program}, timeout_s=_TIMEOUT_S)


def images_removed(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the commands that remove images from a board's Docker."""
    return (quote("docker", "image", "rm", *(f"{paths.IMAGE_NAME}:{tag}" for tag in tags)) + " > /dev/null",
            ) if tags else ()

"""Runs the probe (``script``) over ssh, in the board's own Python.

`deploy init`, the preflight of `deploy up` and `doctor --cluster` all use it, so they judge the same facts.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.board_links import interfaces
from flowspec_edge.fleet.commands import LocalRunner, Runner, SshRunner, is_here
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.fleet.paths import HOME, STATE, VERIFY_UNIT
from flowspec_edge.fleet.probe import script, system, torch_check
from flowspec_edge.util.resources import resource_dir

_OWN_IMPORTS = re.compile(r"^from (flowspec_edge|__future__)\b[^(\n]*(\([^)]*\)\n)?", re.MULTILINE)
_TIMEOUT_S = 600.0  # a small board reads torch from its SD card, twice if the first check fails
# Prefixes of the unit settings that sandbox a service.
_PROTECTIONS = ("AmbientCapabilities", "CapabilityBoundingSet", "Device", "Limit", "LockPersonality",
                "MemoryDenyWriteExecute", "NoNewPrivileges", "Private", "Protect", "Restrict", "SystemCall",
                "UMask")

# As root if sudo asks for no password: only root sees which process holds a port.
_START = """
command -v "$1" >/dev/null || { echo '{"python": null}'; exit; }
if [ "$(id -u)" != 0 ] && sudo -n true 2>/dev/null; then exec sudo -n -- "$1" -s -; fi
exec "$1" -s -
"""


def board_facts(inventory: Inventory, device: DeviceEntry, ports: Collection[int] = (),
                paths: Sequence[str] = (HOME, STATE)) -> dict[str, Any]:
    """``script.main``'s facts, and ``ahead``: the board's clock minus this machine's, ± ``within``, in s.

    {"python": None} if the board has no ``board_python``.  FlowspecError for an unreachable board.
    """
    check = torch_check_program(inventory.torch_device(device))
    call = f"main({resolve(device)!r}, {list(paths)!r}, {sorted(ports)!r}, time.time(), {check!r})"
    runner: Runner = (LocalRunner(device.name, timeout_s=_TIMEOUT_S) if is_here(device) else
                      SshRunner(inventory, device, timeout_s=_TIMEOUT_S))
    before = time.time()
    said = runner.run(["sh", "-c", _START, "sh", inventory.cluster.board_python],
                      program(call, interfaces, system, script))
    after = time.time()
    try:
        facts: dict[str, Any] = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
        facts["python"]
    except (LookupError, StopIteration, TypeError, ValueError):
        raise FlowspecError(f"{device.name} ({device.address}): {inventory.cluster.board_python} answers "
                            f"{said.strip()[-80:]!r}: see whether it is a Python") from None
    if "time" in facts:
        after -= facts["seconds"]
        facts |= {"ahead": facts["time"] - (before + after) / 2, "within": (after - before) / 2}
    return facts


def program(call: str, *modules: ModuleType) -> str:
    """One source text: ``modules``, which import nothing of flowspec but each other, followed by ``call``."""
    text = "\n".join(_OWN_IMPORTS.sub("", inspect.getsource(module)) for module in modules)
    return f"from __future__ import annotations\n{text}\n{call}\n"


def torch_check_program(torch_device: str) -> dict[str, Any]:
    """The argument of ``script.torch``."""
    return {"program": f"{inspect.getsource(torch_check)}\n\nmain({torch_device!r})\n",
            "device": torch_device, "protections": protections()}


def protections() -> list[str]:
    """The sandboxing lines of a stage's unit, such as "ProtectHome=yes"."""
    text = (resource_dir("deploy") / "units" / VERIFY_UNIT).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith(_PROTECTIONS)]

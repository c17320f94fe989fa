"""One JSON file with all that this project wants to know of a board: `flowspec doctor --gpu --report FILE`.

It has the doctor's findings, versions, the report on the GPU, a profile with the price of a launch, a line of
tegrastats and the end of the services' journal, without keys, tokens and addresses.  A part that fails holds
its error instead, because boards where something fails are the ones to hear of.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flowspec_edge.boards.doctor.run import check_machine
from flowspec_edge.boards.probe.board import read_board
from flowspec_edge.boards.probe.onboard.tools import last_line, output
from flowspec_edge.errors import FlowspecError, ended
from flowspec_edge.util import procfs
from flowspec_edge.util.interpreter import module_command
from flowspec_edge.util.jetson import jetpack_of

FORMAT = 1
PARTS = 7  # of :func:`board_report`, beside the findings on the GPU
_PACKAGES = ("flowspec-edge", "torch", "transformers", "numpy", "safetensors", "pyzmq", "bitsandbytes",
             "triton")
_PROFILE = ("device", "profile", "--json", "--device")
_PROFILE_S = 1200.0
_TEGRASTATS = ("tegrastats", "--interval", "500")  # prints a line each half second until it is stopped
_TEGRASTATS_S = 3.0
_JOURNAL = ("journalctl", "--unit", "flowspec-*", "--lines", "200", "--output", "json", "--no-pager")
_Z85 = r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]"
_SECRETS = (
    # CURVE's keys, which may begin with a colon or an equals sign: before names of secrets are looked for.
    (re.compile(rf"(?<!\S){_Z85}{{40}}(?!\S)"), "…"),
    (re.compile(r"(?i)\b(bearer)\s+\S+"), r"\1 …"),
    (re.compile(r"(?i)\b([\w-]*(?:key|token|password|secret|authorization))(\"?\s*[=:]\s*)\S+"), r"\1\2…"),
    (re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"), "ADDRESS"),
    (re.compile(r"(?i)(?<![\w:])(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|[0-9a-f:]*::[0-9a-f:]*)(?![\w:])"),
     "ADDRESS"),
    (re.compile(rf"(?<!{_Z85}){_Z85}{{40}}(?!{_Z85})"), "…"),  # those within other words
    (re.compile(r"(?<!\S)(?=\S*\d)(?=\S*[A-Za-z])[^\s/]{24,}"), "…"))  # others, and digests


def board_report(gpu: Mapping[str, Any], device: str, date: str, profile: Sequence[str] = (),
                 report: Callable[[str], None] = lambda doing: None) -> dict[str, Any]:
    """Collect what is known of this board, which takes a few minutes.

    A part that fails is {"error": …}.

    gpu      ``GpuReport.as_json``, or the error for which there is none
    date     today's
    profile  further options of `flowspec device profile`
    report   called with the name of each part as it begins
    """
    parts: dict[str, Callable[[], Any]] = {
        "versions": _versions, "board": lambda: asdict(read_board()),
        "memory": _memory,
        "doctor": lambda: [finding.as_json() for finding in check_machine()],
        "tegrastats": tegrastats, "profile": lambda: _profile(device, profile), "journal": journal}
    report_fields: dict[str, Any] = {"format": FORMAT, "date": date, "gpu": dict(gpu)}
    for name, part in parts.items():
        report(name)
        try:
            report_fields[name] = part()
        except Exception as error:
            report_fields[name] = {"error": str(error) or type(error).__name__}
    return report_fields


def _versions() -> dict[str, Any]:
    l4t = read_board().l4t
    jetpack = jetpack_of(l4t) if l4t else None
    versions: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release(), "l4t": l4t,
                                "machine": platform.machine(), "jetpack": jetpack.name if jetpack else "",
                                "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def _memory() -> dict[str, int | None]:
    """Return this machine's memory in bytes, by the names in /proc/meminfo."""
    sizes = procfs.sizes(Path("/proc/meminfo"))
    return {name: sizes.get(name) for name in ("MemTotal", "MemFree", "MemAvailable", "Cached", "SwapFree")}


def _profile(device: str, options: Sequence[str]) -> Any:
    """Measure a profile in a process of its own, which a faulty kernel may end.

    Raise FlowspecError with the last line of the process if it fails.
    """
    completed = subprocess.run(module_command("flowspec_edge", *_PROFILE, device, *options),
                               stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROFILE_S,
                               check=False)
    if completed.returncode:
        raise FlowspecError(last_line(completed.stderr) or f"its process ended: {ended(completed.returncode)}")
    return json.loads(completed.stdout)


def tegrastats(command: Sequence[str] = _TEGRASTATS) -> str:
    """Return the first line that ``tegrastats`` prints; "" where there is none."""
    try:
        completed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TEGRASTATS_S,
                                   check=False)
        output = completed.stdout
    except subprocess.TimeoutExpired as timeout:
        output = timeout.stdout or b""
    except OSError:
        return ""
    return output.decode(errors="replace").partition("\n")[0].strip()


def journal(command: Sequence[str] = _JOURNAL) -> list[str]:
    """Return the last lines of flowspec's services, "unit: message", by :func:`without_secrets`."""
    messages = []
    for line in output(*command).splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        message = entry.get("MESSAGE")
        if isinstance(message, str):
            messages.append(f"{entry.get('_SYSTEMD_UNIT', '')}: {without_secrets(message)}")
    return messages


def without_secrets(line: str) -> str:
    """Return ``line`` without tokens, keys, digests and addresses; better a word too many than one too few."""
    for pattern, instead in _SECRETS:
        line = pattern.sub(instead, line)
    return line

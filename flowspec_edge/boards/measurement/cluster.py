"""Measures all boards of a cluster over ssh, and writes their profiles beside the cluster file.

Every board runs `flowspec device profile` of its own release.  A board's file is written as soon as it has
been measured, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from flowspec_edge.boards.commands import by_ssh, failure, on_each, python_for, runner_for
from flowspec_edge.boards.inventory import DeviceEntry, Inventory, Unreached, beside
from flowspec_edge.boards.links.between import measure_between
from flowspec_edge.boards.probe.findings import in_one_line
from flowspec_edge.device_profile import LinkCost, Profile, load_profile, profile_names, render
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.files import make_directory, write_atomically
from flowspec_edge.util.tomlfile import parse_toml

DIRECTORY = "profiles"  # beside the cluster file
_LINK_S = 1.0
_LONGEST_S = 1800.0  # of a board's measurement, which takes one or two minutes
_LOOPBACK = "loopback"  # ``Conditions.peer`` of a profile whose link was not measured

Say = Callable[[str, str], None]  # (board, what it does)


@dataclass(frozen=True)
class Outcome:
    """What came of a board's measurement.

    ``file`` is the profile's, None if the board was not measured, for the reason ``why``.
    """

    board: str
    file: Path | None
    measured: bool = False  # in this run
    why: str = ""


def measure_boards(inventory: Inventory, path: Path, arguments: Sequence[str], again: bool, say: Say
                   ) -> list[Outcome]:
    """Measure all boards at once, then the links one by one.

    A board that fails does not stop the others.

    arguments  further options of `flowspec device profile`
    again      also boards that have been measured
    """
    make_directory(path.absolute().parent / DIRECTORY)

    def measure(device: DeviceEntry) -> Outcome:
        file = profile_file(device, path)
        if not again and is_measured(file):
            say(device.name, f"has been measured: {file}")
            return Outcome(device.name, file)
        try:
            profile = _measured(inventory, device, arguments, say)
            write_atomically(file, render(profile.model_copy(update={"name": device.name})))
        except (FlowspecError, OSError) as error:
            why = in_one_line(device, error).removeprefix(f"{device.name}: ")
            say(device.name, f"is not measured: {why}")
            return Outcome(device.name, None, why=why)
        say(device.name, f"is measured: {file}")
        return Outcome(device.name, file, True)

    outcomes = on_each(measure, inventory.device)
    files = {outcome.board: outcome.file for outcome in outcomes if outcome.file}
    for source, target in pairwise(inventory.ring):
        if {source.name, target.name} <= files.keys():
            _measure_link(inventory, source, target, files[source.name], say)
    for outcome in outcomes:
        if outcome.file:
            name_profile(path, outcome.board, outcome.file)
    return outcomes


def profile_file(device: DeviceEntry, path: Path) -> Path:
    """Return where the board's own profile is or will be.

    It is the file that the board's entry names, unless that names a profile of the package.
    """
    if device.profile and device.profile not in profile_names():
        return beside(path, device.profile)
    return path.absolute().parent / DIRECTORY / f"{device.name}.toml"


def is_measured(file: Path) -> bool:
    return file.is_file() and load_profile(str(file)).provenance == "measured"


def _measured(inventory: Inventory, device: DeviceEntry, arguments: Sequence[str], say: Say) -> Profile:
    runner = runner_for(inventory, device)
    program = str(Path(python_for(inventory, device)).with_name("flowspec"))
    device_option = [] if "--device" in arguments else ["--device", inventory.torch_device(device).partition(":")[0]]
    command = runner.command([program, "device", "profile", "--json", *device_option, *arguments])
    try:
        client = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, errors="replace")
    except OSError as error:
        raise FlowspecError(f"{device.name}: cannot run {command[0]}: {error.strerror}") from error
    ending = threading.Timer(_LONGEST_S, client.kill)
    ending.daemon = True
    ending.start()
    with client:
        assert client.stdout is not None
        assert client.stderr is not None
        error_lines: deque[str] = deque(maxlen=20)
        for line in client.stderr:
            error_lines.append(line)
            if progress := re.match(r"flowspec: profile: (.*)", line):
                say(device.name, progress[1])
        text = client.stdout.read()
    hung = not ending.is_alive()
    ending.cancel()
    if hung:
        raise FlowspecError(f"{device.name}: it did not finish within {_LONGEST_S:g} s: see whether the "
                            "board hangs (uptime, dmesg)")
    if client.returncode:
        why = failure("flowspec device profile", command, client.returncode, "".join(error_lines))
        advice = (": it has no flowspec yet: install it there with flowspec deploy up"
                  if client.returncode in (126, 127) else "")
        kind = Unreached if by_ssh(command, client.returncode) else FlowspecError
        raise kind(f"{device.name}: {why}{advice}")
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        raise FlowspecError(f"{device.name}: its flowspec answers with no profile of this release: install "
                            "the same release on all boards, with flowspec deploy up") from error


def _measure_link(inventory: Inventory, source: DeviceEntry, target: DeviceEntry, file: Path, say: Say
                  ) -> None:
    """Put the link to the next board of the ring into the profile, unless one is there already."""
    profile = load_profile(str(file))
    conditions = profile.conditions
    if conditions is None or conditions.peer != _LOOPBACK:
        return
    rate = measure_between(inventory, source, target, _LINK_S)
    if rate.measure is None:
        say(source.name, f"the link to {target.name} is not measured: {rate.error}")
        return
    say(source.name, f"the link to {target.name}: {rate.measure.mbps:.0f} Mbps, "
                     f"{rate.measure.latency_ms:.2f} ms")
    write_atomically(file, render(profile.model_copy(update={
        "link": LinkCost(mbps=round(rate.measure.mbps, 1), latency_ms=round(rate.measure.latency_ms, 4)),
        "source": profile.source.replace("The link is this machine's loopback, not a network.",
                                         f"The link is that to {target.name}."),
        "conditions": conditions.model_copy(update={"peer": target.name})})))


def name_profile(path: Path, board: str, file: Path) -> None:
    """Set ``profile`` of the board's [[device]] in the cluster file; all other lines stay as they are.

    Raise FlowspecError, which says what to write, if the text does not allow that.
    """
    directory = path.absolute().parent
    profile_name = str(file.relative_to(directory)) if file.is_relative_to(directory) else str(file)
    text = path.read_text(encoding="utf-8")
    before = parse_toml(text.encode(), path, Inventory)
    devices = [device.model_copy(update={"profile": profile_name}) if device.name == board else device
               for device in before.device]
    if before.device == devices:
        return
    new_text = _with_profile(text, board, profile_name)
    try:
        is_same = parse_toml(new_text.encode(), path, Inventory) == before.model_copy(update={"device": devices})
    except UsageError:
        is_same = False
    if not is_same:
        raise FlowspecError(f"{path}: cannot set the profile of {board}: write profile = \"{profile_name}\" below "
                            "its [[device]]")
    write_atomically(path.resolve(), new_text)


def _with_profile(text: str, board: str, profile_name: str) -> str:
    """Return ``text`` with the line ``profile`` of the board's table replaced, or added after its name."""
    parts = re.split(r"(?m)^(?=[ \t]*\[)", text)
    for index, part in enumerate(parts):
        head = re.match(r"[ \t]*\[\[[ \t]*device[ \t]*\]\]", part)
        name = re.search(r"(?m)^([ \t]*)name[ \t]*=[ \t]*(\"|')(.*?)\2.*$", part) if head else None
        if name is None or name[3] != board:
            continue
        line = f'{name[1]}profile = "{profile_name}"'
        changed, count = re.subn(r"(?m)^[ \t]*profile[ \t]*=.*$", lambda _, line=line: line, part, count=1)
        if not count:
            changed = f"{part[:name.end()]}\n{line}{part[name.end():]}"
        parts[index] = changed
    return "".join(parts)

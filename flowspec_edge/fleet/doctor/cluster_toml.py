"""Writes the first cluster.toml of discovered boards, with comments on what was found and what to decide."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence

from flowspec_edge.fleet.doctor.discover import DiscoveredBoard
from flowspec_edge.strategies.params import DEFAULT_STRATEGY
from flowspec_edge.util.jetson import jetpack_of

_MUCH_MORE = 1.5  # times the memory of the second largest

_HEAD = """\
# {name}: {count} boards, as `flowspec deploy init` found them.  What to do next:
#   flowspec doctor --cluster {file}       what the boards still lack
#   flowspec deploy plan --cluster {file}  what would be done, and which board would do what
#   flowspec deploy up --cluster {file}    do it

[cluster]
"""
_RUN = "\n# What the cluster is to run.  Relative paths count from this file's directory.\n"
_SETTINGS = (
    ('model = "demo"', 'a checkpoint\'s directory, a sharded model\'s, or "demo" to try'),
    ('# draft = "eagle-head"', "a draft head's directory, where the model's has none"),
    ('dtype = "auto"', "fp16, bf16, int4, …; auto: as the model is"),
    ("context = 4096", "tokens of all requests' texts together that caches hold"),
    ("# at_once = 2", "requests that share the stages; left out: one per stage, at least 2"),
    (f'strategy = "{DEFAULT_STRATEGY}"', "flowspec strategies lists them"),
    ('# power_mode = "MAXN"', "by name, as in /etc/nvpmodel.conf; left out, it stays as it is"),
    ('# serve_host = "0.0.0.0"', "where the draft device answers; left out: itself alone; else with a key"),
)

_ROLES = {
    "planner": """
# Who drafts and who verifies, in which order and with which layers, the planner decides (role = "auto"), from
# the boards' profiles.  These were not measured here: flowspec device profile does that.
""",
    "alike": """
# Not all boards have a profile, so they count as alike: with role = "auto" the first one drafts, and the
# others get equal shares of the layers, in this order.  flowspec device profile measures a board.
""",
    "largest": """
# Not all boards have a profile, so they count as alike.  {largest} has by far the most memory: it drafts, and
# the others get equal shares of the layers, in this order.  flowspec device profile measures a board.
"""}


def render_cluster_toml(boards: Sequence[DiscoveredBoard], name: str, file: str, ssh_config: str = ""
                        ) -> str:
    interface = _most([board.interface for board in boards if board.interface]) or "eth0"
    torch_device = _most([board.torch_device for board in boards])
    shared = [(f"name = {_quoted(name)}", ""),
              (f"interface = {_quoted(interface)}", "that the boards reach one another by"),
              (f"torch_device = {_quoted(torch_device)}",
               "what computes, on stages and on the draft device: cuda or cpu")]
    if ssh_config:
        shared.append((f"ssh_config = {_quoted(ssh_config)}", "for ssh's -F"))
    text = (_HEAD.format(name=name, count=len(boards), file=_printable(shlex.quote(file)))
            + _lines(shared) + _RUN + _lines(_SETTINGS))
    largest = None if all(board.profile for board in boards) else _largest(boards)
    roles = "largest" if largest else "planner" if all(board.profile for board in boards) else "alike"
    text += _ROLES[roles].format(largest=largest.device.name if largest else "")
    for board in boards:
        own = {"interface": board.interface if board.interface not in ("", interface) else "",
               "torch_device": board.torch_device if board.torch_device != torch_device else ""}
        role = "auto" if largest is None else "draft" if board is largest else "verify"
        text += _device(board, role, own)
    return text


def _lines(settings: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{setting:<30} # {why}\n" if why else f"{setting}\n" for setting, why in settings)


def _device(board: DiscoveredBoard, role: str, own: dict[str, str]) -> str:
    device = board.device
    lines = [f"# {_printable(line)}" for line in _about(board)]
    lines += ["[[device]]", f"name = {_quoted(device.name)}", f"address = {_quoted(device.address)}",
              f"role = {_quoted(role)}"]
    if device.ssh_user:
        lines.append(f"ssh_user = {_quoted(device.ssh_user)}")
    if device.ssh_port != 22:
        lines.append(f"ssh_port = {device.ssh_port}")
    if device.ssh_key:
        lines.append(f"ssh_key = {_quoted(device.ssh_key)}")
    lines += [f"{key} = {_quoted(value)}" for key, value in own.items() if value]
    if board.profile:
        lines.append(f"profile = {_quoted(board.profile)}  # by its model and memory; not measured here")
    return "\n" + "\n".join(lines) + "\n"


def _about(board: DiscoveredBoard) -> list[str]:
    facts = board.board
    known = jetpack_of(facts.l4t)
    jetpack = f" (JetPack {known.name})" if known else ""
    found = [", ".join(filter(None, (facts.machine, board.arch, facts.l4t and f"L4T {facts.l4t}{jetpack}")))]
    if facts.total_mb is not None and facts.available_mb is not None:
        found.append(f"memory {facts.total_mb:,.0f} MB, {facts.available_mb:,.0f} MB of it free; "
                     f"disk {board.disk_mb / 1e3:,.0f} GB free")
    found.append(f"Python {board.python}, {describe_torch(board)}")
    found += [f"  → {fault}" for fault in board.faults]
    if facts.power_mode or board.modes:
        modes = f" of {', '.join(board.modes)}" if board.modes else ""
        found.append(f"power mode {facts.power_mode or 'unknown'}{modes}")
    if not board.interface:
        found.append(f"  → no interface of it has the address {board.device.address}: see ip -o -4 addr")
    return found


def describe_torch(board: DiscoveredBoard) -> str:
    if board.torch is None:
        return "no torch that services could use"
    sees = "sees the GPU" if board.cuda else "sees no GPU"
    return f"torch {board.torch}, which {sees}"


def _largest(boards: Sequence[DiscoveredBoard]) -> DiscoveredBoard | None:
    first, second, *_ = sorted(boards, key=lambda board: board.board.total_mb or 0.0, reverse=True)
    much = (first.board.total_mb or 0.0) >= _MUCH_MORE * (second.board.total_mb or 0.0)
    return first if much and second.board.total_mb else None


def _most(values: Sequence[str]) -> str:
    return Counter(values).most_common(1)[0][0] if values else ""


def _printable(line: str) -> str:
    """Without control characters, which TOML forbids in comments."""
    return "".join(letter if letter.isprintable() else " " for letter in line).rstrip()


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)

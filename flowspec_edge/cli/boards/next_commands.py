"""What a user runs after ``flowspec plan`` to get what it recommends."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from flowspec_edge.boards.inventory import ClusterSettings, load_inventory
from flowspec_edge.boards.planning.board_spec import is_cluster
from flowspec_edge.cli.boards.plan_output import PlanReport
from flowspec_edge.model.catalogue import find_known_model, is_repository_name
from flowspec_edge.model.draft_kinds import OWN, head_kinds
from flowspec_edge.model.opened import is_here, shipped_models
from flowspec_edge.stage.quant.sizes import default_head_bits
from flowspec_edge.strategies.params import DEFAULT_STRATEGY


def next_commands(report: PlanReport, model: str, devices: Sequence[str]) -> list[str]:
    """List the commands to run next, in their order; a text in parentheses is for the user to do."""
    plan = report.recommended
    assert plan
    commands, source = _at_hand(report, model)
    head, planned = "", report.size.planned
    if planned.origin == "untrained":
        head, quoted = f"{Path(source).name}-{planned.kind.name}", shlex.quote(source)
        commands.append(f"flowspec models train-head --model {quoted} --kind {planned.kind.name} --data chats.jsonl "
                        f"--out {shlex.quote(head)}   (see: flowspec models head {quoted})")
    if len(plan.boards) == 1:
        return [*commands, *_alone(report, source, head)]
    strategy = plan.best.strategy if plan.best else DEFAULT_STRATEGY
    settings = {"model": source, "dtype": report.size.dtype, "draft": head or report.size.planned.setting(),
                "kv_cache": report.size.kv_cache, "context": report.context,
                "at_once": report.at_once, "strategy": strategy}
    if report.size.head_bits != default_head_bits(report.size.dtype):
        settings["lm_head"] = report.size.head_bits
    clusters = [path for text in devices if is_cluster(path := Path(text))]
    if len(clusters) == len(devices) == 1:
        [file] = clusters
        has = load_inventory(file).cluster
    else:
        file, has = Path("cluster.toml"), ClusterSettings(name="new")
        commands.append(f"flowspec deploy init {' '.join(_hosts(len(plan.boards)))}{_power_mode(report)}")
    changes = [shlex.quote(f"{key}={value}") for key, value in settings.items()
               if getattr(has, key) != value and (value or key != "draft" or has.draft_kind != OWN)]
    if changes:
        commands.append(f"flowspec deploy set {' '.join(changes)} --cluster {shlex.quote(str(file))}")
    return [*commands, f"flowspec deploy up --cluster {shlex.quote(str(file))}"]


def _power_mode(report: PlanReport) -> str:
    """Return the option for the boards' power mode, if all their profiles hold in one and name it."""
    assert report.plan
    profiles = [report.plan.d0.profile, *(stage.board.profile for stage in report.plan.stages)]
    modes = {profile.conditions.power_mode if profile.conditions else "" for profile in profiles}
    return f" --power-mode {modes.pop()}" if len(modes) == 1 and "" not in modes else ""


def _hosts(count: int) -> list[str]:
    """Return places for the addresses of the boards that are used."""
    return [f"BOARD-{i}" for i in range(1, count + 1)] if count <= 3 else ["BOARD-1", "…", f"BOARD-{count}"]


def _at_hand(report: PlanReport, model: str) -> tuple[list[str], str]:
    """Return the commands that bring the model here, and its name or directory afterwards."""
    entry, planned = find_known_model(model), report.size.planned
    if model in shipped_models():
        return [], model
    if entry and not is_here(model):
        comes = planned.kind.in_target or (planned.kind in head_kinds() and planned.origin == "published")
        return [f"flowspec models fetch {entry[0]}{'' if comes else ' --head none'}"], entry[0]
    if is_repository_name(model) and not Path(model).exists():
        directory = Path(model).name
        return [f"hf download {model} --local-dir {directory}"], directory
    path = Path(model)
    if path.name == "config.json" and path.is_file() and not is_here(model):  # plan alone reads the file by itself
        model = str(path.parent)
    if not report.size.from_weights:
        return ["(put the checkpoint's weights beside its config.json)"], model
    return [], entry[0] if entry else model


def _alone(report: PlanReport, source: str, head: str) -> list[str]:
    """Return the commands that run the model on one board, given there; ``head``: the directory of its own, or ""."""
    size, plan = report.size, report.recommended
    assert plan
    draft = f" --draft {setting}" if (setting := size.planned.setting()) else ""
    best = plan.best.strategy if plan.best else DEFAULT_STRATEGY
    options = draft + (f" --strategy {best}" if best != DEFAULT_STRATEGY else "")
    if size.dtype != "int4" and not head:
        return [f"flowspec serve --model {shlex.quote(source)} --stages 1 --dtype {size.dtype}{options}   "
                f"(on {plan.boards[0]})"]
    out = f"{Path(source).name}-{size.dtype}"
    taken = f" --draft {shlex.quote(head)}" if head else ""
    cache = " --kv-cache int8" if size.kv_cache == "int8" else ""
    return [f"flowspec models shard --model {shlex.quote(source)}{taken} --stages 1 --dtype {size.dtype}{cache} "
            f"--out {shlex.quote(out)}",
            f"flowspec serve --model {shlex.quote(out)}{options}   (on {plan.boards[0]})"]

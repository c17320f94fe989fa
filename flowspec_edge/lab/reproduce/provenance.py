"""What a reproduced file says about itself: clock, profile, prompts, seed, version, commit, command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from flowspec_edge.lab.bench.estimates import MEDIAN, METHOD
from flowspec_edge.lab.bench.exactness import exactness_text, types_of
from flowspec_edge.lab.bench.host_info import commit, versions
from flowspec_edge.lab.bench.paper_results import PaperResults
from flowspec_edge.lab.bench.rows import MEAN
from flowspec_edge.lab.bench.samples import LOOP, SHORT
from flowspec_edge.lab.bench.styles import METHODS, style_of
from flowspec_edge.lab.bench.tables import published_depths
from flowspec_edge.lab.reproduce.catalogue import Artefact, Kind
from flowspec_edge.lab.reproduce.records import DRAFTS, HEAD_ACCEPTANCE, MEASURED, Measured, Record
from flowspec_edge.model.opened import DEMO
from flowspec_edge.strategies.registry import groups_note


def about(artefact: Artefact, results: Sequence[Measured], command: str) -> list[str]:
    """Lines for the head of every file."""
    lines = [f"{artefact.description[0].upper()}{artefact.description[1:]}. VIRTUAL TIME: real tokens of the model "
             "below, every duration charged by a profile; nothing was timed on such devices."]
    profiles: dict[str, list[str]] = {}  # by everything else that a measurement says about itself
    for measured in results:
        s = measured.settings
        tasks = "; ".join(f"{t['name']}: {t['prompts']} prompts, SHA-256 {t['sha256'][:12]}"
                          for t in s["tasks"])
        drafts = f"draft {s['draft']}, {DRAFTS[measured.looks_up]}; {measured.acceptance}"
        conditions = (f"model {s['model']}; {tasks}; at most {s['max_new_tokens']} new tokens; {types_of(s)}; "
                      f"seed {s['seed']}; {drafts}; measured {measured.results.date} with "
                      f"{s['versions']['flowspec-edge']}")
        profile = f"{s['profile']['name']} ({s['profile']['provenance']})"
        profiles.setdefault(conditions, []).append(profile)
    for conditions, names in profiles.items():
        distinct = list(dict.fromkeys(names))
        lines.append(f"profile{'s' if len(distinct) > 1 else ''} {', '.join(distinct)}; {conditions}")
    revision = f", commit {commit()}" if commit() else ""
    return [*lines, f"flowspec-edge {versions()['flowspec-edge']}{revision}; {command}"]


def notes(artefact: Artefact, results: Sequence[Measured], records: Sequence[Record], paper: PaperResults
          ) -> list[str]:
    """Footnotes of the tables, each once."""
    lines = [f"{METHOD}; in brackets the {MEDIAN}."] if any(
        r.standard_error is not None for r in records) else []
    if any(r.prompts == 1 for r in records):
        lines.append("One prompt a task: no standard error.")
    lines.append(_EXPLAINED[artefact.kind])
    lines += _counted(records, "short", f"{SHORT[0].upper()}{SHORT[1:]}")
    lines += _counted(records, "repeating", f"Answers of a method that repeat themselves ({LOOP})")
    if note := groups_note(r.method for r in records if r.source == MEASURED):
        lines.append(f"{note}.")
    lines += _describe_omissions(artefact, results)
    lines += _deviations(records, all(measured.settings.get("model") == DEMO for measured in results))
    for measured in results:
        lines.append(f"{measured.measurement.name}: " + exactness_text(
            [s for _, _, report in measured.points() for s in report.samples], measured.settings))
    if any(not measured.results.complete for measured in results):
        lines.append("INCOMPLETE: the measurement was interrupted.")
    if artefact.kind == "speed" and any(len(m.settings["tasks"]) < 2 for m in results):
        lines.append("The paper's columns are means over its six tasks.")
    if artefact.kind == "depth" and any(r.source != MEASURED for r in records):
        text = published_depths(paper.depth[0])
        lines.append(text[0].upper() + text[1:])
    elif any(r.source != MEASURED for r in records):
        lines.append(f"Published, not measured here: {_source(artefact, results, paper)}; other models and "
                     "prompts than ours.")
    return lines


_EXPLAINED: dict[Kind, str] = {
    "speed": "A column named after a task: tokens/s, mean over its prompts; SR: the ratio to Chunk-PP's in "
             "the same run.",
    "acceptance": "ALT: tokens per turn, one slot of the slowest stage; ALR: tokens per round, drafting "
                  "included; counted alike for all methods (docs/explained/method.md), while the paper's "
                  "turns leave drafting out for all but Chunk-PP.",
    "bandwidth": "All links have the same bandwidth, in 10⁶ bits a second, in both directions.",
    "depth": "d0: levels of the initial tree; d_exp: levels of an expansion.",
    "stages": "PipeDec and the static tree draft with a small model; PipeDec's layers hold 32 nodes with 16 "
              "children each. The paper prints ranges over its tasks.",
    "law": "N: tokens; K: steps of the pipeline, from the clock of a simulation in which nothing but the "
           "stages takes time; a: share of tokens that were in the pipeline already, counted.",
}


def _counted(records: Sequence[Record], field: Literal["short", "repeating"], property_name: str) -> list[str]:
    """Say how many answers of each task have a property.

    At one temperature every method gives the same answers, up to near ties.
    """
    counts_by_task = {}
    for r in records:
        count = getattr(r, field)
        if r.source == MEASURED and count is not None:
            counts_by_task[r.task, r.temperature] = (count, r.answers)
    if not counts_by_task or (field == "short" and not any(count for count, _ in counts_by_task.values())):
        return []
    counts = "; ".join(f"T = {temperature:g}: " + ", ".join(
        f"{task} {count} of {answers}" for (task, t), (count, answers) in counts_by_task.items()
        if t == temperature and task != MEAN) for temperature in dict.fromkeys(t for _, t in counts_by_task))
    return [f"{property_name}: {counts}."]


def _describe_omissions(artefact: Artefact, results: Sequence[Measured]) -> list[str]:
    """Name the package's methods that are missing in a table of all methods."""
    if not artefact.every_method:
        return []
    missing = {DRAFTS[measured.looks_up]:
               [name for name in METHODS if name not in measured.measurement.strategies]
               for measured in results}
    omissions = "; ".join(f"{drafts}: {', '.join(names)}" for drafts, names in missing.items() if names)
    return [f"Left out: {omissions}." if omissions else f"All {len(METHODS)} methods of the package are here."]


def _deviations(records: Sequence[Record], is_demo: bool) -> list[str]:
    """Name the figures that are more than two standard errors from the paper's, each kind with its likely reason.

    Reasons that concern the head hold for the demonstration model.
    """
    deviations: dict[tuple[str, str], list[str]] = {}
    for published in (r for r in records if r.source != MEASURED and r.quantity in _BECAUSE):
        ours = [r for r in records if r.source == MEASURED and all(
            getattr(r, name) == getattr(published, name)
            for name in ("conditions", "method", "at", "quantity"))]
        measured = next((r for r in ours if r.task == MEAN), ours[0] if ours else None)
        if measured is None or measured.estimate is None or published.figure is None or not measured.standard_error:
            continue
        if abs(measured.estimate.value - published.figure) > 2 * measured.standard_error:
            deviations.setdefault((measured.quantity, measured.acceptance), []).append(
                f"{style_of(measured.method).label} {measured.estimate.text()} against {published.figure:.2f} "
                f"({published.source}, T = {published.temperature:g})")
    return [" ".join(filter(None, (
        f"More than two standard errors from the paper's {_NAMES[quantity]}, with {acceptance}: "
        f"{', '.join(names)}.", _BECAUSE[quantity],
        (_HEADS if acceptance == HEAD_ACCEPTANCE else _CALIBRATED) if is_demo else "")))
        for (quantity, acceptance), names in deviations.items()]


_NAMES = {"alt": "ALT", "alr": "ALR", "speedup": "SR", "tokens_per_second": "tokens/s"}
_HEADS = ("The demonstration model's vocabulary is small: the right token is nearly always among the head's "
          "ten children, so a round of a method that extends its tree in flight ends much later than the "
          "paper's.")
_CALIBRATED = ("The calibration fits FlowSpec's ALR. The head's first choice is right less often than "
               "a published head's, so Chunk-PP, whose whole tree is drafted at once, accepts less than the "
               "paper's, and ratios to it are higher.")
_BECAUSE = {
    "alr": "", "speedup": "",
    "alt": "The paper's turns leave drafting out for all methods but Chunk-PP, ours count it.",
    "tokens_per_second": "Profiles are estimated from the paper's means.",
}


def _source(artefact: Artefact, results: Sequence[Measured], paper: PaperResults) -> str:
    if artefact.kind == "bandwidth":
        return paper.bandwidth[0].source
    if artefact.kind == "stages":
        return paper.ratio[0].source
    return paper.acceptance_length[0].source if artefact.kind == "law" else paper.source

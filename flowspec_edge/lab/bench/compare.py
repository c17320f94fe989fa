"""Two reports of ``bench run`` beside each other, paired by prompt.

A pair is the same method, task, temperature and prompt in both files.  Prompts are the same if their texts
are (``settings["tasks"][…]["each"]``); files from before that field are paired by a prompt's number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.estimates import MEDIAN, METHOD, Estimate, PromptKey, mean, paired_ratio, speeds
from flowspec_edge.lab.bench.exactness import types_of
from flowspec_edge.lab.bench.results import BenchReport
from flowspec_edge.lab.bench.samples import SHORT, Cell, Sample
from flowspec_edge.lab.bench.tables import NO_VALUE, frame, number, timing
from flowspec_edge.util.terminal import counted_stages, plain

_EXPECTED = frozenset({"commit", "versions", "tasks", "limit", "weights"})  # weights: said with dtype
_VERSION = "flowspec-edge"


@dataclass(frozen=True)
class ComparedRow:
    """A method on a task at a temperature.

    ``first`` and ``second`` are tokens/s of the ``prompts`` that both have, ``ratio`` is the second over the first.

    only_first, only_second  numbers of the prompts that one file alone has a speed for
    different_answers        prompts with other texts; None if a file is too old to know
    different_chunks         prompts in segments of another length, by the stages' times and memory; None likewise
    """

    strategy: str
    task: str
    temperature: float
    drafts: tuple[str, str]
    prompts: int
    first: Estimate | None
    second: Estimate | None
    ratio: Estimate | None
    only_first: list[int]
    only_second: list[int]
    different_answers: int | None
    different_chunks: int | None


@dataclass(frozen=True)
class Comparison:
    """Two files of measurements beside each other.

    files        what each file says of itself
    differences  how the measurements differ beside their code
    alone        methods, tasks and temperatures that one file alone has
    """

    files: list[dict[str, Any]]
    rows: list[ComparedRow]
    alone: list[list[str]]
    differences: list[str]

    def as_json(self) -> dict[str, Any]:
        return {"kind": "comparison", **asdict(self)}


def compare(paths: Sequence[Path], reports: Sequence[BenchReport]) -> Comparison:
    """Raise UsageError if no prompt of a method is in both."""
    prompts = [_Prompts(report) for report in reports]
    rows = [row for cell in prompts[0].cells if (row := _row(cell, *prompts)).prompts]
    if not rows:
        raise UsageError(f"{paths[0]} and {paths[1]} have no prompt with a speed of the same method, task "
                         "and temperature: nothing to compare")
    shared = {(row.strategy, row.task, row.temperature) for row in rows}
    alone = [[f"{name}, {task}, T = {temperature:g}" for name, task, temperature in side.cells
              if (name, task, temperature) not in shared] for side in prompts]
    files = [_about(path, report) for path, report in zip(paths, reports, strict=True)]
    differences = _differences(reports, [side.have_digests for side in prompts])
    if cut := sum(row.different_chunks or 0 for row in rows):
        count = sum(row.prompts for row in rows)
        differences.append(f"segments of prompts: {cut} of {count} prompts were cut into others, by the times and the "
                           "memory of the stages (--set prefill_chunk=64 cuts all alike)")
    return Comparison(files, rows, alone, differences)


class _Prompts:
    """A report's samples by cell, and its prompts by what identifies them in both files."""

    def __init__(self, report: BenchReport) -> None:
        self.cells: dict[Cell, list[Sample]] = {}
        for sample in report.samples:
            self.cells.setdefault(sample.cell, []).append(sample)
        self._each: Mapping[str, Sequence[str]] = {task["name"]: task.get("each") or []
                                                   for task in report.settings["tasks"]}
        self.have_digests = all(self._each.values())

    def numbers(self, cell: Cell, texts: bool) -> dict[object, int]:
        """Return the numbers of the prompts whose answers have a speed, by what identifies a prompt.

        A prompt is identified by its text, or else by its number.
        """
        names, occurrences = self._each.get(cell[1], []) if texts else [], Counter[str]()
        keys: dict[int, object] = {}
        for at, name in enumerate(names):  # the same text twice is two prompts
            keys[at] = name, occurrences[name]
            occurrences[name] += 1
        return {keys.get(key[1], key[1]): key[1] for key in speeds(self.cells.get(cell, []))}


def _row(cell: Cell, first: _Prompts, second: _Prompts) -> ComparedRow:
    samples_before, samples_after = first.cells.get(cell, []), second.cells.get(cell, [])
    texts = first.have_digests and second.have_digests
    a, b = (side.numbers(cell, texts) for side in (first, second))
    both = [(a[key], b[key]) for key in a if key in b]
    before, after = speeds(samples_before), speeds(samples_after)
    pairs = [(after[_at(cell, j)], before[_at(cell, i)]) for i, j in both]
    return ComparedRow(
        *cell, drafts=(_draft(samples_before), _draft(samples_after)), prompts=len(both),
        first=mean([old for _, old in pairs]), second=mean([new for new, _ in pairs]),
        ratio=paired_ratio(pairs),
        only_first=sorted(a[key] for key in a.keys() - b.keys()),
        only_second=sorted(b[key] for key in b.keys() - a.keys()),
        different_answers=_different(both, samples_before, samples_after, "answer"),
        different_chunks=_different(both, samples_before, samples_after, "prompt_chunk"))


def _at(cell: Cell, prompt: int) -> PromptKey:
    return cell[1], prompt


def _draft(samples: Sequence[Sample]) -> str:
    return samples[0].draft if samples else ""


def _different(both: Sequence[tuple[int, int]], samples_before: Sequence[Sample], samples_after: Sequence[Sample],
               field: str) -> int | None:
    values_before, values_after = ({(s.prompt, s.repeat): getattr(s, field) for s in samples}
                                   for samples in (samples_before, samples_after))
    if {"", None} & {*values_before.values(), *values_after.values()}:
        return None
    repeats = {repeat for _, repeat in values_before} & {repeat for _, repeat in values_after}
    return sum(any(values_before.get((i, repeat)) != values_after.get((j, repeat)) for repeat in repeats)
               for i, j in both)


def _about(path: Path, report: BenchReport) -> dict[str, Any]:
    s = report.settings
    return {"file": str(path), "commit": s.get("commit"), "version": s.get("versions", {}).get(_VERSION),
            "date": report.date, "clock": report.clock, "profile": report.profile, "model": s["model"],
            "types": types_of(s), "stages": s["stages"], "draft": s["draft"], "ngram": s.get("ngram"),
            "complete": report.complete}


def _differences(reports: Sequence[BenchReport], have_digests: Sequence[bool]) -> list[str]:
    first, second = reports
    pairs: dict[str, tuple[object, object]] = {
        "clock": (first.clock, second.clock), "profile": (first.profile, second.profile)}
    if first.clock == second.clock == "wall":
        pairs["machine"] = first.machine, second.machine
    for key in dict.fromkeys([*first.settings, *second.settings]):
        if key not in _EXPECTED and key != "profile":
            pairs[key] = first.settings.get(key), second.settings.get(key)
    both = [report.settings.get("weights") for report in (first, second)]
    if None not in both:
        pairs["weights"] = both[0], both[1]
    differences = [f"{key}: {_short(before)} and {_short(after)}" for key, (before, after) in pairs.items()
                   if before != after]
    values = [report.settings.get("profile") for report in (first, second)]
    if first.profile == second.profile and values[0] != values[1]:
        differences.append(f"profile: {first.profile} in both, with other values")
    digests = [{t["name"]: t.get("sha256") for t in report.settings["tasks"]} for report in (first, second)]
    other = [name for name in digests[0] if name in digests[1] and digests[0][name] != digests[1][name]]
    if other and not all(have_digests):
        differences.append(f"prompts of {', '.join(other)}: they are paired by their numbers, since a file is too "
                           "old to have their digests")
    return differences


def _short(value: object) -> str:
    text = NO_VALUE if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


# ---- as a table ------------------------------------------------------------------------------------------

def about_text(about: Mapping[str, Any]) -> str:
    """Say in a line what a file says of itself."""
    commit = f"commit {about['commit']}" if about["commit"] else "no commit"
    return ", ".join([f"{about['file']}: {_VERSION} {about['version'] or 'of unknown version'}", commit,
                      about["date"], timing(about["clock"], about["profile"]), f"model {about['model']}",
                      counted_stages(about['stages']), about["types"], f"draft {about['draft']}",
                      *(["INCOMPLETE"] if not about["complete"] else [])])


def comparison_table(comparison: Comparison) -> Table:
    table = frame(["strategy", "draft", "task"], ["T", "prompts", "A tokens/s", "B tokens/s", "B / A",
                                                  "other answers", "only in A", "only in B"])
    for row in comparison.rows:
        before, after = (draft or NO_VALUE for draft in row.drafts)
        table.add_row(plain(row.strategy), plain(before if before == after else f"{before}, {after}"),
                      plain(row.task), f"{row.temperature:g}", str(row.prompts), _text(row.first),
                      _text(row.second), _text(row.ratio), number(row.different_answers, 0),
                      *map(_numbers, (row.only_first, row.only_second)))
    return table


def comparison_notes(comparison: Comparison) -> list[str]:
    notes = ["tokens/s and B / A are of the prompts that both files have. "
             f"{METHOD}; in brackets the {MEDIAN}. Other answers: prompts whose text is not the same in "
             f"both. Not paired: {SHORT}."]
    for name, only_here in zip("AB", comparison.alone, strict=True):
        if only_here:
            notes.append(f"Only in {name}: {'; '.join(only_here)}.")
    return notes


def _text(estimate: Estimate | None) -> str:
    return estimate.text() if estimate else NO_VALUE


def _numbers(prompts: Sequence[int]) -> str:
    return ",".join(map(str, prompts)) or NO_VALUE

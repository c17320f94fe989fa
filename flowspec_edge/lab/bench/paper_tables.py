"""Tables I, II and III of the FlowSpec paper from benchmark reports, in Markdown; a table of concurrent requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flowspec_edge.lab.bench.estimates import MEDIAN, METHOD
from flowspec_edge.lab.bench.exactness import exactness_text
from flowspec_edge.lab.bench.paper_results import PaperResults
from flowspec_edge.lab.bench.results import BenchReport
from flowspec_edge.lab.bench.rows import BASELINE, MEAN, ReportRow
from flowspec_edge.lab.bench.samples import LOOP, SHORT
from flowspec_edge.lab.bench.styles import style_of
from flowspec_edge.lab.bench.tables import NO_VALUE, concurrency_markdown, markdown_table, number, timing
from flowspec_edge.strategies.registry import groups_note
from flowspec_edge.util.terminal import counted_stages

COMPARED = ("megatron", "galaxy", BASELINE, "pipedec", "flowspec")  # table I's order
ABLATION = (BASELINE, "pruned_pp", "flowspec_no_sbd", "flowspec")
_OMITTED_METHODS = ("autoregressive",)  # as in the paper; shown on request

Cells = list[str]


def paper_tables(reports: Sequence[BenchReport], only: Collection[str] | None = None,
                 published: PaperResults | None = None) -> str:
    """Write the paper's tables; ``only`` these strategies; ``published``: the paper's means, for the last columns.

    Reports of concurrent requests have a table of their own after the paper's.
    """
    shared = [report for report in reports if report.concurrent]
    alone = [report for report in reports if not report.concurrent]
    parts = _paper_parts(alone, only, published) if alone else []
    if shared:
        parts.append("# Concurrent requests")
    for report in shared:
        parts += [concurrency_markdown(report, only), _note(report, None)]
    return "\n\n".join(parts) + "\n"


def _paper_parts(reports: Sequence[BenchReport], only: Collection[str] | None,
                 published: PaperResults | None) -> list[str]:
    parts = ["# Table I: tokens/s, and SR: the ratio to Chunk-PP's in the same run"]
    for report in reports:
        parts += [_heading(report), *_speed_tables(report, _order(report, COMPARED, only), published),
                  _note(report, published)]
    parts.append("# Table II: tokens per turn (ALT) and per round (ALR), means over the tasks")
    for report in reports:
        parts += [_heading(report), _accepted_table(report, _order(report, COMPARED, only), published),
                  f"{_TURNS} {_note(report, published)}"]
    parts.append("# Table III: ablation, tokens/s and SR")
    for report in reports:
        strategies = [name for name in _order(report, ABLATION, only) if name in ABLATION]
        parts += [_heading(report), *_speed_tables(report, strategies, published), _note(report, published)]
    return parts


_TURNS = (
    "A turn is one slot: the time of one full segment in the slowest stage; turns = decode time / slot, so "
    "time in which the stages wait counts. A round lasts from a start, the first drafting included, to the "
    "miss that ends it. Both are counted alike for every method, after truncation at the end of the text "
    "(docs/explained/method.md)."
)


def _heading(report: BenchReport) -> str:
    return (f"## {report.settings['model']} model, {counted_stages(report.settings['stages'])}, "
            f"{timing(report.clock, report.profile)}")


def _order(report: BenchReport, first: Sequence[str], only: Collection[str] | None) -> list[str]:
    measured = dict.fromkeys(row.strategy for row in report.rows)
    names = [name for name in measured if (name in only if only else name not in _OMITTED_METHODS)]
    return [name for name in first if name in names] + [name for name in names if name not in first]


def _speed_tables(report: BenchReport, strategies: Sequence[str], published: PaperResults | None
                  ) -> list[str]:
    if not strategies:
        return ["None of its methods was measured."]
    rows = {(row.strategy, row.task, row.temperature): row for row in (*report.rows, *report.means)}
    tasks = [*dict.fromkeys(row.task for row in report.rows), MEAN]
    tables = []
    for temperature in dict.fromkeys(row.temperature for row in report.rows):
        paper_speeds = published.speeds(report.profile, report.settings["stages"], temperature) if published else []
        header = ["method"]
        for column in (*tasks, *(f"paper, {speed.model}" for speed in paper_speeds)):
            header += [column, "SR"]
        body = []
        for name in strategies:
            line = [style_of(name).label]
            for task in tasks:
                line += _speed(rows.get((name, task, temperature)))
            for speed in paper_speeds:
                line += _published_speed(speed.means.get(name), speed.means[BASELINE])
            body.append(line)
        tables += [f"**T = {temperature:g}**", markdown_table(header, body)]
    return tables


def _accepted_table(report: BenchReport, strategies: Sequence[str], published: PaperResults | None) -> str:
    rows = {(row.strategy, row.temperature): row for row in report.means}
    temperatures = list(dict.fromkeys(row.temperature for row in report.rows))
    paper_acceptances = published.acceptances(report.profile, report.settings["stages"]) if published else []
    header = ["method"]
    for column in (*(f"T = {t:g}" for t in temperatures), *(f"paper, {a.model}" for a in paper_acceptances)):
        header += [f"ALT, {column}", f"ALR, {column}"]
    body = []
    for name in strategies:
        line = [style_of(name).label]
        for temperature in temperatures:
            row = rows.get((name, temperature))
            line += [number(row.alt), number(row.alr)] if row else [NO_VALUE, NO_VALUE]
        for accepted in paper_acceptances:
            line += [f"{kind[name]:.2f}" if name in kind else NO_VALUE
                     for kind in (accepted.alt, accepted.alr)]
        body.append(line)
    return markdown_table(header, body)


def _speed(row: ReportRow | None) -> Cells:
    if row is None:
        return [NO_VALUE, NO_VALUE]
    return [f"{row.speed.text()} {row.exactness.mark}".rstrip() if row.speed else NO_VALUE,
            row.ratio.text() if row.ratio else NO_VALUE]


def _published_speed(speed: float | None, base: float) -> Cells:
    return [NO_VALUE, NO_VALUE] if speed is None else [f"{speed:.2f}", f"{speed / base:.2f}"]


def _note(report: BenchReport, published: PaperResults | None) -> str:
    s, parts = report.settings, []
    if report.clock == "virtual":
        parts.append(f"VIRTUAL TIME: real tokens, durations charged by the profile `{report.profile}`; "
                     "nothing was timed on such devices.")
    else:
        parts.append("Wall clock; all devices share this one machine.")
    drafts: dict[str, list[str]] = {}
    for name, draft in dict.fromkeys((row.strategy, row.draft) for row in report.rows):
        if draft and name not in _OMITTED_METHODS:
            drafts.setdefault(draft, []).append(style_of(name).label)
    if drafts:
        parts.append("; ".join(f"drafts of {draft}: {', '.join(names)}" for draft, names in drafts.items())
                     + f" (`--draft {s['draft']}`).")
    if note := groups_note(dict.fromkeys(row.strategy for row in report.rows)):
        parts.append(f"{note}.")
    parts.append(f"PipeDec's layers hold {s['pipedec_width']} nodes (`--set pipedec_width`).")
    parts.append("; ".join(f"{task['name']}: {task['prompts']} prompts" for task in s["tasks"])
                 + f"; at most {s['max_new_tokens']} new tokens, seed {s['seed']}.")
    if any(row.tokens_per_second_se is not None for row in report.rows):
        parts.append(f"{METHOD}; in brackets the {MEDIAN}.")
    if short := sum(row.short for row in report.rows):
        parts.append(f"{SHORT[0].upper()}{SHORT[1:]}: {short} of {sum(row.answers for row in report.rows)}.")
    parts += _loops(report)
    exact = exactness_text(report.samples, s)
    parts.append(f"**{exact}**" if any(not row.identical for row in report.rows) else exact)
    if not report.complete:
        parts.append("**The run was interrupted: some of it is missing.**")
    if published and published.speeds(report.profile, s["stages"], 0):
        parts.append(f"Columns headed “paper”: {published.source}; SR is the ratio of its means, and its "
                     "turns leave drafting out for all methods but Chunk-PP.")
    elif published:
        parts.append("The paper has no figures for this testbed.")
    return " ".join(parts)


def _loops(report: BenchReport) -> list[str]:
    """How many answers repeat themselves, and the speeds of the others."""
    if not report.means or any(row.repeating is None for row in report.means):
        return []
    lines = []
    for temperature in dict.fromkeys(row.temperature for row in report.means):
        rows = [row for row in report.means if row.temperature == temperature]
        counts = " or ".join(dict.fromkeys(f"{row.repeating} of {row.answers}" for row in rows))
        others = ", ".join(f"{style_of(row.strategy).label} {row.tokens_per_second_other:.2f}" +
                           (f" (SR {row.speedup_other:.2f})" if row.speedup_other is not None else "")
                           for row in rows if row.repeating and row.tokens_per_second_other is not None)
        without = f"; without them, in tokens/s: {others}" if others else ""
        lines.append(f"T = {temperature:g}: {counts}{without}")
    return [f"Answers of a method that repeat themselves ({LOOP}): {'. '.join(lines)}."]

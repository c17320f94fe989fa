from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.segment import Segments
from rich.table import Table

from flowspec_edge.bench.results.estimates import METHOD
from flowspec_edge.bench.results.rows import ReportRow
from flowspec_edge.bench.run.repetition import DEFINITION
from flowspec_edge.util.terminal import plain

_ENERGY = {"joules_per_token": "J/token", "joules_per_token_above_idle": "above idle"}
_WIDEST = 1000  # columns; more than any table needs


def title(clock: str, profile: str | None, stages: int, temperature: float, strategy: str = "") -> str:
    what = f"{timing(clock, profile)}, {stages} stages, T = {temperature:g}"
    return f"{strategy}, {what}" if strategy else what


def timing(clock: str, profile: str | None) -> str:
    if profile is None:
        return "wall clock on this machine"
    return f"VIRTUAL TIME under {profile}" if clock == "virtual" else f"EMULATED {profile}, wall clock"


def show(console: Console, made: Table) -> None:
    """Print a table in full: a narrow terminal wraps lines instead of truncating figures."""
    needed = console.measure(made, options=console.options.update(max_width=_WIDEST)).maximum
    # print(made, width=…) is limited to the console's width.
    options = console.options.update(width=max(console.width, needed))
    console.print(Segments(console.render(made, options)), soft_wrap=True, end="")


def table(rows: Sequence[ReportRow], caption: str) -> Table:
    """The rows in their order; speedup is over Chunk-PP.

    The columns of task, energy, errors and loops appear if they have values.
    """
    several = len({row.task for row in rows}) > 1
    errors = any(row.tokens_per_second_se is not None for row in rows)
    energy = [name for name in _ENERGY if any(getattr(row, name) is not None for row in rows)]
    if energy:
        caption = f"{caption}; J/token: measured, without carrier boards"
    made = Table(title=plain(caption), title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    if several:
        made.add_column("task", no_wrap=True)
    made.add_column("strategy", no_wrap=True)
    made.add_column("draft", no_wrap=True)
    columns = ["tokens/s", "±", "speedup", "ALT", "ALR", "TTFT s", "ITL s"]
    if not errors:
        columns.remove("±")
    counted = any(row.repeating is not None for row in rows)
    looped = any(row.repeating for row in rows)
    columns += ["loops"] * counted + ["looping", "others"] * looped
    columns += [_ENERGY[name] for name in energy]
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("tokens", no_wrap=True)
    previous = None
    for row in rows:
        cells = [plain(row.strategy), plain(row.draft or "–"), f"{row.tokens_per_second:.2f}"]
        if errors:
            cells.append("–" if row.tokens_per_second_se is None else f"{row.tokens_per_second_se:.2f}")
        cells += ["–" if row.speedup is None else f"{row.speedup:.2f}×", f"{row.alt:.3f}", f"{row.alr:.2f}",
                  f"{row.ttft_s:.2f}", f"{row.itl_mean_s:.3f}"]
        if counted:
            cells.append("–" if row.repeating is None else f"{row.repeating}/{row.answers}")
        if looped:
            cells += [_number(row.tokens_per_second_repeating), _number(row.tokens_per_second_other)]
        measured = [getattr(row, name) for name in energy]
        cells += map(_number, measured)
        cells.append(texts(row))
        if several:
            cells.insert(0, "" if row.task == previous else plain(row.task))
        previous = row.task
        made.add_row(*cells)
    notes = [METHOD] if errors else []
    if counted:
        notes.append(f"loops: answers with {DEFINITION}" +
                     ("; looping, others: tokens/s of these answers and of all others" if looped else ""))
    made.caption, made.caption_justify = "\n".join(notes) or None, "left"
    return made


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def texts(row: ReportRow) -> str:
    if not row.identical:
        return "[red]DIFFERENT[/red]"
    return f"{row.near_ties} near tie{'s'[:row.near_ties > 1]}" if row.near_ties else "identical"

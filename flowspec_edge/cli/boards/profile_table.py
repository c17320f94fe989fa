"""A device profile as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from flowspec_edge.device_profile import Profile
from flowspec_edge.util.terminal import plain

_CONTEXT = 1000


def show_profile(console: Console, profile: Profile) -> None:
    console.print(f"[bold]{plain(profile.name)}[/bold]  {profile.kind}, {profile.provenance}",
                  highlight=False)
    console.print(profile.summary, markup=False, highlight=False)
    console.print()
    console.print(_curve(profile))
    console.print()
    console.print(_facts(profile))
    console.print()
    console.print(profile.source.strip(), markup=False, highlight=False)


def _curve(profile: Profile) -> Table:
    curve = profile.stage
    table = Table(title=f"A segment through {curve.layers:g} layer{'s' if curve.layers != 1 else ''}",
                  title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("rows", "ms", f"ms over {_CONTEXT} cached tokens"):
        table.add_column(name, justify="right")
    for rows in curve.rows:
        shown = [profile.stage_seconds(max(1, round(rows)), curve.layers, context) * 1e3
                 for context in (0, _CONTEXT)]
        table.add_row(f"{rows:g}", *(f"{ms:.4g}" for ms in shown))
    return table


def _facts(profile: Profile) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    for name, value in _lines(profile):
        table.add_row(name, plain(value))
    return table


def _lines(profile: Profile) -> list[tuple[str, str]]:
    p = profile
    lines = [
        ("model", f"{p.model.layers} layers, width {p.model.hidden_width}, {p.model.bytes_per_value} bytes a "
                  "value" + (f", {p.model.layer_mb:g} MB a layer" if p.model.layer_mb else "")),
        ("in every segment", f"{p.stage.overhead_ms:g} ms, whatever the layers"),
        ("draft pass", f"EAGLE head {p.draft.pass_ms:g} ms, small model {p.draft.lm_pass_ms:g} ms, "
                       f"SPD's module {p.draft.spd_pass_ms:g} ms" + _more(p.draft.row_ms, "node")),
        ("lm_head", f"{p.lm_head.ms:g} ms" + _more(p.lm_head.row_ms, "row")),
        ("D0's bookkeeping", f"{p.host.bookkeeping_ms:g} ms an output"),
        ("link", f"{p.link.mbps:g} Mbps, {p.link.latency_ms:g} ms"),
    ]
    if p.collective.step_ms:
        lines.append(("collectives", f"{p.collective.step_ms:g} ms a step of a ring, beside its bytes"))
    if p.memory:
        rate = f"; read at {p.memory.gb_per_s:g} GB/s" if p.memory.gb_per_s else ""
        lines.append(("memory", f"{p.memory.usable_mb:.0f} of {p.memory.total_mb:.0f} MB usable, "
                                f"{p.memory.process_mb:.0f} MB a process{rate}"))
    if p.conditions:
        c = p.conditions
        clocks = ", ".join(f"{name} {mhz:g} MHz" for name, mhz in c.clocks_mhz.items())
        lines += [(name, value) for name, value in (
            ("measured", c.date), ("machine", c.machine), ("with", ", ".join(filter(None, (
                c.model, c.dtype, c.device, f"{c.threads} threads" if c.threads else "")))),
            ("power mode", c.power_mode), ("clocks", clocks),
            ("temperature", "" if c.temperature_c is None else f"{c.temperature_c:g} °C"),
            ("link measured with", c.peer)) if value]
    return lines


def _more(ms: float, unit: str) -> str:
    return f"; {ms:g} ms more for each {unit}" if ms else ""

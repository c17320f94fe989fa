"""``flowspec bench plot`` and ``flowspec bench timeline``: pictures of a run."""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.cli.bench_options import FromOption, require_files
from flowspec_edge.cli.options import (
    DeviceOption,
    DtypeOption,
    MaxNewTokensOption,
    ModelOption,
    ProfileOption,
    StagesOption,
    with_dataclasses,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import DEMO
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params

_PLOT_EXAMPLES = """
Examples:

  flowspec bench plot --from out.json --out speed.svg

  flowspec bench plot --from n4.json --from n8.json --from n14.json --out stages.png
"""
_TIMELINE_EXAMPLES = """
Examples:

  flowspec bench timeline --strategy flowspec

  flowspec bench timeline --strategy chunk_pp --turns 10 --skip-turns 20 --out chunk_pp.svg

  flowspec bench timeline --strategy megatron --turns 40
"""


def plot(
    files: FromOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="The figure to write.", metavar="F.svg|F.png",
                                             show_default=False)] = None,
) -> None:
    """Draw tokens/s as bars by task or temperature, or as lines over stages.

    Lines, if the files hold several numbers of stages.
    """
    from flowspec_edge.bench.figures import check_figure
    from flowspec_edge.bench.figures import plot as draw
    from flowspec_edge.bench.report import load_report

    paths = require_files(files)
    if out is None:
        raise UsageError("give --out F.svg or F.png: the figure to write")
    check_figure(out)
    draw([load_report(path) for path in paths], out)


@with_dataclasses(sampling=Sampling, params=Params)
def timeline(
    strategy: Annotated[str, typer.Option("--strategy", help="See: flowspec strategies.")] = "flowspec",
    prompt: Annotated[str | None, typer.Option(
        "--prompt", help="The text to continue; default: a prompt of the demo's.", metavar="TEXT",
        show_default=False)] = None,
    turns: Annotated[int, typer.Option("--turns", min=1, help="How many turns to draw.")] = 12,
    skip_turns: Annotated[int, typer.Option(
        "--skip-turns", min=0, help="Begin so many turns after the first token.")] = 0,
    model: ModelOption = DEMO,
    stages: StagesOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_new_tokens: MaxNewTokensOption = 128,
    profile: ProfileOption = "paper-7b",
    out: Annotated[Path | None, typer.Option(
        "--out", help="Draw it as a figure, too.", metavar="F.svg|F.png", show_default=False)] = None,
    *,
    sampling: Sampling,
    params: Params,
) -> None:
    """Show who is busy when: a real run in virtual time, a line a device.

    It begins with the first token; the prompt is not shown.
    """
    from flowspec_edge.bench.figures import check_figure, gantt
    from flowspec_edge.bench.prompts import Prompt, load_prompts
    from flowspec_edge.bench.table import title
    from flowspec_edge.bench.timeline import draw, window
    from flowspec_edge.cli.cut import dtype_of, stages_of
    from flowspec_edge.cli.measuring import demo_prompts, requests_for, require_runnable
    from flowspec_edge.cli.torch_device import device_of
    from flowspec_edge.config import load_profile
    from flowspec_edge.modeldir import resolve_model
    from flowspec_edge.strategies.registry import strategy_class
    from flowspec_edge.text import Tokenizer

    chosen = strategy_class(strategy)
    found, charged = resolve_model(model), load_profile(profile)
    stages = stages_of(found, stages)
    require_runnable([chosen.name], found, params, "virtual", stages)
    device = device_of(device, found, dtype_of(found, dtype))
    if out is not None:
        check_figure(out)
    text = Prompt("", "", prompt) if prompt is not None else load_prompts(demo_prompts(), 1)[0]
    [request] = requests_for(Tokenizer(found), found, [text], max_new_tokens, sampling, params)

    from dataclasses import replace

    from flowspec_edge.runtime.virtual import VirtualCluster
    from flowspec_edge.torchdevice import memory_errors

    with memory_errors(device):
        cluster = VirtualCluster(found.path, stages, charged, dtype_of(found, dtype), device=device)
        stats = cluster.generate(replace(request, strategy=chosen.name)).stats
    view = window(stats.ttft_s, stats.ttft_s + stats.decode_s, stats.slot_s, turns, skip_turns)
    caption = title("virtual", charged.name, stages, sampling.temperature, strategy)
    drawn = draw(cluster.spans, stages, view, turns)
    if out is not None:
        gantt(cluster.spans, stages, view, caption, out)
    print(f"{caption}\n{drawn}", end="")


plot.__doc__ = f"{cleandoc(plot.__doc__ or '')}\n{_PLOT_EXAMPLES}"
timeline.__doc__ = f"{cleandoc(timeline.__doc__ or '')}\n{_TIMELINE_EXAMPLES}"

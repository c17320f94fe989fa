"""``flowspec bench plot`` and ``flowspec bench timeline``: pictures of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.cli.bench.options import FromOption, require_files
from flowspec_edge.cli.common.clusters import opened
from flowspec_edge.cli.common.option_groups import of_strategy, with_dataclasses
from flowspec_edge.cli.common.options import (
    MOST_REPEATS,
    DeviceOption,
    DtypeOption,
    FigureOption,
    MaxNewTokensOption,
    ModelOption,
    ProfileOption,
    StagesOption,
    StrategyOption,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import DEMO
from flowspec_edge.runtime.cluster.spec import ClusterSpec, Virtual
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params


def plot(
    files: FromOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="The figure to write.", metavar="F.svg|F.png",
                                             show_default=False)] = None,
) -> None:
    """Draw tokens/s as bars by task or temperature; as lines over stages if these differ between files.

    Examples:

      flowspec bench plot --from out.json --out speed.svg
      flowspec bench plot --from n4.json --from n8.json --from n14.json --out stages.png
    """
    from flowspec_edge.bench.render.plots import check_figure
    from flowspec_edge.bench.render.plots import plot as draw
    from flowspec_edge.bench.results.report import load_report

    paths = require_files(files)
    if out is None:
        raise UsageError("give --out F.svg or F.png: the figure to write")
    check_figure(out)
    draw([load_report(path) for path in paths], out)


@with_dataclasses(strategies=of_strategy, sampling=Sampling, params=Params)
def timeline(
    strategy: StrategyOption = "flowspec",
    prompt: Annotated[str | None, typer.Option(
        "--prompt", help="The text to continue; default: a prompt of the demonstration.", metavar="TEXT",
        show_default=False)] = None,
    turns: Annotated[int, typer.Option(
        "--turns", min=1, max=MOST_REPEATS, help="How many turns to draw.")] = 12,
    skip_turns: Annotated[int, typer.Option(
        "--skip-turns", min=0, max=MOST_REPEATS, help="Start so many turns after the first token.")] = 0,
    model: ModelOption = DEMO,
    stages: StagesOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_new_tokens: MaxNewTokensOption = 128,
    profile: ProfileOption = "paper-7b",
    out: FigureOption = None,
    *,
    sampling: Sampling,
    params: Params,
) -> None:
    """Show when each device is busy: a real run in virtual time, one line per device.

    The timeline starts at the first token; prefill is not shown.

    Examples:

      flowspec bench timeline --strategy flowspec
      flowspec bench timeline --strategy chunk_pp --turns 10 --skip-turns 20 --out chunk_pp.svg
      flowspec bench timeline --strategy megatron --turns 40
    """
    from flowspec_edge.bench.render.plots import check_figure, gantt
    from flowspec_edge.bench.render.table import title
    from flowspec_edge.bench.render.timeline import draw, window
    from flowspec_edge.bench.run.tasks import Prompt, load_prompts
    from flowspec_edge.cli.common.options import device_of, dtype_of, stages_of
    from flowspec_edge.cli.common.workload import demo_prompts, requests_for, require_runnable
    from flowspec_edge.fleet.planning.testbed import profile_or_testbed
    from flowspec_edge.model.modeldir import resolve_model
    from flowspec_edge.model.text import Tokenizer
    from flowspec_edge.strategies.registry import strategy_class

    chosen = strategy_class(strategy)
    found, charged = resolve_model(model), profile_or_testbed(profile)
    stages = stages_of(found, stages)
    require_runnable([chosen.name], found, params, "virtual", stages)
    device = device_of(device, found, dtype_of(found, dtype))
    if out is not None:
        check_figure(out)
    text = Prompt("", "", prompt) if prompt is not None else load_prompts(demo_prompts(), 1)[0]
    [request] = requests_for(Tokenizer(found), found, [text], max_new_tokens, sampling, params)

    spec = ClusterSpec(found.path, stages, dtype_of(found, dtype), device=device)
    with opened(spec, Virtual(charged)) as cluster:
        stats = cluster.generate(replace(request, strategy=chosen.name)).stats
    view = window(stats.ttft_s, stats.ttft_s + stats.decode_s, stats.slot_s, turns, skip_turns)
    caption = title("virtual", charged.name, stages, sampling.temperature, strategy)
    drawn = draw(cluster.spans, stages, view, turns)
    if out is not None:
        gantt(cluster.spans, stages, view, caption, out)
    print(f"{caption}\n{drawn}", end="")

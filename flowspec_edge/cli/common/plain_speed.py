"""Whether drafting pays on one machine, where the draft device and all stages share the processors."""

from __future__ import annotations

from dataclasses import replace

from flowspec_edge.cli.common.clusters import ClockSettings
from flowspec_edge.d0.request import ClusterBackend, Request, Result
from flowspec_edge.errors import FlowspecError
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.util.threads import cores

PLAIN = "autoregressive"
_SECONDS = 0.5  # of plain decoding, at the answer's speed
_FEWEST, _MOST = 4, 32  # tokens
_CONTEXT = 128  # tokens before them: more would take longer to read than they take


def shared_processors(clock: ClockSettings, strategy: str, stages: int, device: str) -> str | None:
    """Name the processors or the GPU that the draft device and the stages of this machine share.

    None if ``strategy`` does not draft, there are enough for each, or a profile sets the speed.
    """
    strategy_type = strategy_class(strategy)
    if clock.clock != "wall" or clock.emulated or not strategy_type.drafter:
        return None
    if device != "cpu":
        return f"D0 and {stages} stages share one GPU"
    return f"D0 and {stages} stages share {cores()} processors" if stages + 1 > cores() else None


def sharing_note(shared: str) -> str:
    """Return the note for a service that starts, and has measured nothing."""
    return (f"flowspec: note: {shared}, so plain decoding (--strategy {PLAIN}) may be faster: "
            "flowspec generate measures both")


def plain_speed(cluster: ClusterBackend, request: Request, result: Result) -> float | None:
    """Generate the answer's last tokens once more by plain decoding: tokens/s; None for a short answer."""
    if result.stats.tokens_per_second is None:
        return None
    count = min(_MOST, max(_FEWEST, round(_SECONDS * result.stats.tokens_per_second)))
    if len(result.tokens) < 2 * count:
        return None
    before = [*request.prompt, *result.tokens][:-count][-_CONTEXT:]
    plain = replace(request, prompt=before, strategy=PLAIN, max_new_tokens=count, stop_ids=frozenset(),
                    grammar=None)
    try:
        return cluster.generate(plain).stats.tokens_per_second
    except FlowspecError:  # the answer is complete, and needs no comparison
        return None

"""Strategies by name; a new strategy adds one line here."""

from __future__ import annotations

from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import ModelDir
from flowspec_edge.strategies.autoregressive import Autoregressive
from flowspec_edge.strategies.base import Strategy
from flowspec_edge.strategies.flowspec import FlowSpec, FlowSpecNoSBD, PrunedPP
from flowspec_edge.strategies.flowspec_plus import FlowSpecPlus
from flowspec_edge.strategies.layered import SPD, PipeDec
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.pearl import Pearl
from flowspec_edge.strategies.pipeinfer import PipeInfer
from flowspec_edge.strategies.synchronous import STPP, ChunkPP, Galaxy, Megatron, Speculative

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls for cls in (
        Autoregressive,
        ChunkPP,
        PrunedPP,
        FlowSpecNoSBD,
        FlowSpec,
        FlowSpecPlus,
        PipeDec,
        PipeInfer,
        Pearl,
        SPD,
        Speculative,
        STPP,
        Megatron,
        Galaxy,
    )
}


def strategy_class(name: str) -> type[Strategy]:
    """UsageError, with the known names, for an unknown one."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise UsageError(f"no strategy {name!r}; there are {', '.join(STRATEGIES)}") from None


def draft_kind(chosen: type[Strategy], params: Params, model: ModelDir) -> str | None:
    """The kind of draft model that ``chosen`` uses on ``model``, which may lack it; None: it drafts nothing.

    An EAGLE-3 head replaces a missing default EAGLE-1/2 head.  UsageError for an unusable kind.
    """
    kind = chosen.drafts_with(params)
    if kind == "eagle2" and params.draft == "own" and not model.draft(kind) and model.draft("eagle3"):
        kind = "eagle3"
    if kind == "eagle3" and chosen.parallelism != "pipeline":
        raise UsageError(f"{chosen.name} cannot draft with an EAGLE-3 head: it needs inner states of the "
                         "target, which devices that share each layer do not send; see --draft for another "
                         "kind, or leave this strategy out")
    return kind

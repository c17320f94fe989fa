"""Name to strategy; a new strategy is one file and one line here."""

from __future__ import annotations

from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.strategies.autoregressive import Autoregressive
from flowspec_edge.strategies.base import Strategy
from flowspec_edge.strategies.chunk_pp import ChunkPP
from flowspec_edge.strategies.flowspec import FlowSpec
from flowspec_edge.strategies.flowspec_no_sbd import FlowSpecNoSBD
from flowspec_edge.strategies.flowspec_plus import FlowSpecPlus
from flowspec_edge.strategies.galaxy import Galaxy
from flowspec_edge.strategies.megatron import Megatron
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.pearl import Pearl
from flowspec_edge.strategies.pipedec import PipeDec
from flowspec_edge.strategies.pipeinfer import PipeInfer
from flowspec_edge.strategies.pruned_pp import PrunedPP
from flowspec_edge.strategies.spd import SPD
from flowspec_edge.strategies.speculative import Speculative
from flowspec_edge.strategies.stpp import STPP

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
    """The class of a strategy; a UsageError lists the known names."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise UsageError(f"no strategy {name!r}; there are {', '.join(STRATEGIES)}") from None


def draft_kind(chosen: type[Strategy], params: Params, model: ModelDir) -> str | None:
    """The kind of draft model that ``chosen`` drafts with on ``model``; None if it drafts nothing.

    It may not be there.  Where nobody asked for a kind, a model's EAGLE-3 head stands in for an
    EAGLE-1/2 head that it does not have.  UsageError for what the strategy cannot work with.
    """
    kind = chosen.drafts_with(params)
    if kind == "eagle2" and params.draft == "own" and not model.draft(kind) and model.draft("eagle3"):
        kind = "eagle3"
    if kind == "eagle3" and chosen.parallelism != "pipeline":
        raise UsageError(f"{chosen.name} cannot draft with an EAGLE-3 head: it needs inner states of the "
                         "target, which devices that share each layer do not send; see --draft for another "
                         "kind, or leave this strategy out")
    return kind

"""Name to strategy; a new strategy is one file and one line here."""

from __future__ import annotations

from flowspec_edge.errors import UsageError
from flowspec_edge.strategies.autoregressive import Autoregressive
from flowspec_edge.strategies.base import Strategy
from flowspec_edge.strategies.chunk_pp import ChunkPP
from flowspec_edge.strategies.flowspec import FlowSpec
from flowspec_edge.strategies.flowspec_no_sbd import FlowSpecNoSBD
from flowspec_edge.strategies.galaxy import Galaxy
from flowspec_edge.strategies.megatron import Megatron
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

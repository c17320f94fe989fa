"""Strategies by name: those of this package, and others' (entry points, or ``package.module:Class``)."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

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

ENTRY_POINTS = "flowspec.strategies"  # the group under which a package offers its strategies

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
_loaded: dict[str, type[Strategy]] = {}  # from elsewhere, once named


def strategy_names() -> list[str]:
    """List this package's strategies, then those of entry points, then those loaded by module and class."""
    return list(dict.fromkeys([*STRATEGIES, *_entry_points(), *_loaded]))


def strategy_class(name: str) -> type[Strategy]:
    """Find a strategy by its name, or import it from "package.module:Class"; then its own name works, too.

    UsageError for an unknown name (with the known ones), or if the import fails or is no strategy.
    """
    if chosen := STRATEGIES.get(name) or _loaded.get(name):
        return chosen
    if ":" in name:
        return _load(EntryPoint(name.rpartition(":")[2], name, ENTRY_POINTS))
    if found := _entry_points().get(name):
        return _load(found)
    raise UsageError(f"no strategy {name!r}; there are {', '.join(strategy_names())}")


def _entry_points() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=ENTRY_POINTS) if found.name not in STRATEGIES}


def _load(found: EntryPoint) -> type[Strategy]:
    module, _, attribute = found.value.partition(":")
    try:
        chosen = getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module's own code raises
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"cannot load the strategy {found.value}: {reason}") from error
    if not (inspect.isclass(chosen) and issubclass(chosen, Strategy)) or inspect.isabstract(chosen):
        raise UsageError(f"{found.value} is not a strategy: a complete subclass of flowspec_edge.Strategy")
    name, summary = (getattr(chosen, key, None) for key in ("name", "summary"))
    if not (isinstance(name, str) and name.isidentifier() and isinstance(summary, str)):
        raise UsageError(f"{found.value} needs two class attributes: name, an identifier, and summary")
    known = STRATEGIES.get(name) or _loaded.setdefault(name, chosen)
    if known is not chosen:
        raise UsageError(f"{found.value} has the name of another strategy, {name}: give it its own")
    return chosen


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

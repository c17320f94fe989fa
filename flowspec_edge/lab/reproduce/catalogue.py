"""The papers' tables and figures that can be reproduced, and the measurement that each one needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.styles import METHODS
from flowspec_edge.model.draft_kinds import EAGLE2, LM
from flowspec_edge.strategies.params import Params

if TYPE_CHECKING:
    from flowspec_edge.lab.bench.axes import Value

# The FlowSpec paper's comparison, section V-A: all draft with the head alone.
PAPER = Params(draft=EAGLE2.name, ngram=False, pipedec_width=16)
STAGES_ALONE = str(Path(__file__).with_name("stages_alone.toml"))
SEVEN, THIRTEEN = "paper-7b", "paper-13b-int4"
Kind = Literal["speed", "acceptance", "bandwidth", "depth", "stages", "law"]


@dataclass(frozen=True)
class Measurement:
    """A benchmark, or with an ``axis`` a sweep of it; ``name`` is its file's, ``acceptance`` the option."""

    name: str
    profile: str
    strategies: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0,)
    params: Params = PAPER
    axis: str | None = None
    values: tuple[Value, ...] = ()
    acceptance: str = "head"


@dataclass(frozen=True)
class Artefact:
    """A table or figure of a paper.

    minutes       for 16 prompts of the demonstration in one process, from about 25 ms a token on a core of
                  2 GHz
    every_method  whether it is to have all of this package's methods: notes name those that are left out
    """

    name: str
    paper: str
    description: str
    minutes: int
    kind: Kind
    measurements: tuple[Measurement, ...]
    every_method: bool = False


def _with_look_up(measured: Measurement) -> Measurement:
    """Return the same with n-grams from the text beside the head, for every method that drafts."""
    return replace(measured, name=f"{measured.name}-ngram", params=measured.params.changed(ngram=True))


_METHODS = ("megatron", "galaxy", "chunk_pp", "pipedec", "flowspec")
_COMPARISON = Measurement("comparison-7b", SEVEN, _METHODS, (0.0, 1.0))
_COMPARISON_13B = Measurement("comparison-13b", THIRTEEN, _METHODS[2:], (0.0, 1.0))
_COMPARISONS = tuple(
    replace(measured, name=f"{measured.name}{suffix}", acceptance=acceptance)
    for measured in (_COMPARISON, _COMPARISON_13B) for suffix, acceptance in (("", "head"),
                                                                            ("-calibrated", "paper")))
_COMPARISONS += (_with_look_up(_COMPARISON), _with_look_up(_COMPARISON_13B))
_ABLATION = Measurement("ablation-7b", SEVEN, ("chunk_pp", "pruned_pp", "flowspec_no_sbd", "flowspec"),
                        (0.0, 1.0))
_BANDWIDTH = Measurement("bandwidth-7b", SEVEN, _METHODS, axis="bandwidth", values=(1000, 500, 250, 125))
_DEPTH = Measurement("depth-7b", SEVEN, ("flowspec",), axis="depth",
                     values=tuple((d0, d_exp) for d0 in range(3, 9) for d_exp in range(3, 9)))
_EVERY = Measurement("methods-7b", SEVEN, METHODS, params=Params(draft=EAGLE2.name, ngram=False))
_PIPEDEC = Measurement("pipedec-70b", "pipedec-70b", ("autoregressive", "stpp", "pipedec"),
                       params=Params(draft=LM.name), axis="stages", values=(7, 14, 21))
_SPD = Measurement("spd", STAGES_ALONE, ("autoregressive", "spd"), params=Params(), axis="stages",
                   values=(2, 4, 8, 16))

ARTEFACTS = {artefact.name: artefact for artefact in (
    Artefact("flowspec-table-1", "FlowSpec, Table I",
             "tokens/s and SR of five methods by task, T = 0 and 1, 7B and 13B int4", 42, "speed",
             _COMPARISONS),
    Artefact("flowspec-table-2", "FlowSpec, Table II",
             "tokens per turn (ALT) and per round (ALR), from the measurement of Table I", 42, "acceptance",
             _COMPARISONS),
    Artefact("flowspec-table-3", "FlowSpec, Table III",
             "ablation: Chunk-PP, pruning, expansion, score-based drafting", 14, "speed",
             (_ABLATION, _with_look_up(_ABLATION))),
    Artefact("flowspec-figure-5", "FlowSpec, Figure 5", "tokens/s at 125 to 1000 Mbps, T = 0", 17,
             "bandwidth", (_BANDWIDTH,)),
    Artefact("flowspec-figure-6", "FlowSpec, Figure 6", "tokens/s by tree depths d0 × d_exp, 3 to 8 each", 30,
             "depth", (_DEPTH,)),
    Artefact("pipedec-stages", "PipeDec, Figure 5",
             "7, 14 and 21 stages: PipeDec, a static tree, plain decoding", 10, "stages", (_PIPEDEC,)),
    Artefact("spd-law", "SPD, section 4.2, eq. 4",
             "equivalent acceptance length n·N/K against its law n/(n(1−a)+a)", 10, "law", (_SPD,)),
    Artefact("methods", "this project",
             "every method at T = 0: all with the head alone, and all with the head and n-grams", 26, "speed",
             (_EVERY, _with_look_up(_EVERY)), every_method=True),
)}


def artefacts_named(names: Sequence[str]) -> list[Artefact]:
    """Raise UsageError for an unknown name; "all" names every one."""
    if "all" in names:
        return list(ARTEFACTS.values())
    for name in names:
        if name not in ARTEFACTS:
            near = get_close_matches(name, ARTEFACTS, 1)
            guess = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"nothing to reproduce is called {name!r}; {guess}there are "
                             f"{', '.join(ARTEFACTS)}, and all")
    return [ARTEFACTS[name] for name in dict.fromkeys(names)]

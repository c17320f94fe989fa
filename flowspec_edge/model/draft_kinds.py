"""The kinds of draft models: a record each, from which loading, sharding, planning and messages follow.

A record names the module that reads and runs the kind; ``drafting.load`` imports it on first use.  Nothing
here needs torch.  Kinds of other packages come by entry points.

Also here: the formats of published draft heads, and how a head's config.json shows which one it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kind import DraftKind, Shapes
from flowspec_edge.util.entry_points import EntryPointRegistry, load_object, offered

ENTRY_POINTS = "flowspec.draft_kinds"  # the group under which a package offers its kinds
PASS_TIME_SUFFIX = "_pass_ms"  # the end of the name of the time that a kind brings along


def _is_eagle3(config: Mapping[str, Any], shapes: Shapes) -> bool:
    if "d2t" in shapes or any(name.startswith("midlayer.") or name.endswith("hidden_norm.weight")
                              for name in shapes):
        return True
    fc = shapes.get("fc.weight", ())
    # [H, 2H] joins an embedding and a state, [H, 3 target_H] three states.
    return len(fc) == 2 and fc[1] != 2 * fc[0]


def _is_eagle2(config: Mapping[str, Any], shapes: Shapes) -> bool:
    fc = shapes.get("fc.weight", ())
    return len(fc) == 2 and fc[1] == 2 * fc[0] and not _is_eagle3(config, shapes)


def _is_language_model(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return "layers.0.input_layernorm.weight" in shapes and "fc.weight" not in shapes


EAGLE2 = DraftKind("eagle2", "eagle2", "EAGLE-2 head", "flowspec_edge.drafting.eagle.eagle2", (0, 33),
                   narrows=True, recognise=_is_eagle2, formats=("EAGLE-2",), choice=0, graph_launches=6,
                   usual="one layer and fc", trainer="flowspec_edge.lab.training.eagle:EAGLE2_TRAINER",
                   measured_by=("flowspec", "chunk_pp"))
EAGLE3 = DraftKind("eagle3", "eagle3", "EAGLE-3 head", "flowspec_edge.drafting.eagle.eagle3_formats", (0, 41),
                   recognise=_is_eagle3, formats=("EAGLE-3", "EAGLE-4"), choice=1, inner_states=True, narrows=True,
                   graph_launches=5, usual="one layer, fc and an lm_head of 32,000 tokens",
                   trainer="flowspec_edge.lab.training.eagle:EAGLE3_TRAINER")
LM = DraftKind("lm", "draft-lm", "small language model", "flowspec_edge.drafting.lm", (396, 18),
               recognise=_is_language_model, is_head=False, charged_as="lm_pass_ms", graph_launches=5,
               measured_by=("speculative",))
# ``passes``, by bytes at Llama-2-7B: five layers, fc over five states and lm_head in 2.46 GB, beside one
# layer, fc and lm_head in 0.74.
_DFLASH = DraftKind("dflash", "dflash", "DFlash block drafter", "flowspec_edge.drafting.block.formats",
                    (0, 150), formats=("DFlash", "DFlash2", "JetSpec"), choice=3, is_block=True,
                    inner_states=True, shares_memory=False, passes=3.3, usual="five layers and fc",
                    trainer="flowspec_edge.lab.training.block:TRAINER")
MTP = DraftKind("mtp", "mtp", "own MTP layer", "flowspec_edge.drafting.eagle.mtp", (0, 71),
                formats=("MTP",), in_target="mtp.", narrows=True, looks_up_target=True,
                usual="a layer with attention")  # passes of dense ones alone are recorded: a plan counts on none
NGRAM = DraftKind("ngram", "", "n-grams of the text", "", (0, 0), is_head=False, shares_memory=False,
                  charged_as="")

# Kernel launches are counted on torch 2.8 (tests/drafting/test_launches.py), block drafters' are estimated.
_BUILTIN = {kind.name: kind for kind in (
    EAGLE2,
    replace(EAGLE2, name="eagle2-deep", directory="eagle2-deep", title="second EAGLE-2 head",
            recognise=None, formats=(), files_of=EAGLE2.name, choice=None, trainer="", measured_by=()),
    EAGLE3,
    LM,
    _DFLASH,
    replace(_DFLASH, name="dspark", directory="dspark", title="DSpark block drafter", launches=(0, 160),
            formats=("DSpark",), choice=2, trainer="flowspec_edge.lab.training.block:MARKOV_TRAINER"),
    MTP,
    NGRAM,
)}


@cache
def _from_outside(name: str) -> DraftKind:
    """Import the record of another package; UsageError if it cannot be used beside those here."""
    reference = offered(ENTRY_POINTS)[name].value
    offered_kind = load_object(reference, "kind of draft model", "package.module:NAME")
    if not isinstance(offered_kind, DraftKind):
        raise UsageError(f"{reference} is not a kind of draft model: a flowspec_edge.model.draft_kind.DraftKind")
    if offered_kind.name != name:
        raise UsageError(f"{reference} is named {offered_kind.name!r}, but its entry point {name!r}: give both one "
                         "name")
    used_directories = {kind.directory for kind in _BUILTIN.values()}
    directory = offered_kind.directory
    if offered_kind.in_target or not directory.replace("-", "_").isidentifier() or directory in used_directories:
        raise UsageError(f"the kind of draft model {reference} needs a directory of its own in a model: a name of "
                         f"letters, digits, - and _, other than {', '.join(sorted(used_directories - {''}))}")
    if not offered_kind.layers and offered_kind.charged_as not in ("pass_ms", "lm_pass_ms", ""):
        raise UsageError(f"the kind of draft model {reference} is charged as {offered_kind.charged_as}, and does not "
                         "say how many layers a pass reads")
    if offered_kind.layers and offered_kind.charged_as != f"{name}{PASS_TIME_SUFFIX}":
        raise UsageError(f"the kind of draft model {reference} reads {offered_kind.layers} layers in a pass, and is "
                         f"charged as {offered_kind.charged_as!r}: its own time is {name}{PASS_TIME_SUFFIX}")
    return offered_kind


DRAFT_KINDS: Mapping[str, DraftKind] = EntryPointRegistry(
    _BUILTIN, ENTRY_POINTS, lambda name: _BUILTIN.get(name) or _from_outside(name))
OWN = "own"  # in the place of a kind: the one that a strategy or a model has by itself
# Those that are layers of a target's own checkpoint: families name them, so other packages have none.
OWN_LAYERS = tuple(kind for kind in _BUILTIN.values() if kind.in_target)
# Kinds that a configuration names; any other draft there is a head's directory.
NAMED = (*OWN_LAYERS, NGRAM)
# What a configuration names; what a plan is made for ("head": a head or own layer that there is, else one yet to
# be trained; "auto": else n-grams).
_NAMED = (OWN, *(kind.name for kind in NAMED))
_DRAFT_CHOICES = ("auto", "head", *(kind.name for kind in NAMED))
if TYPE_CHECKING:  # a type checker knows no literals that are computed
    NamedDraft = str
    PlannedDraftName = str
else:
    NamedDraft, PlannedDraftName = Literal[_NAMED], Literal[_DRAFT_CHOICES]


class _Drafts(Collection[str]):
    """What a user may let any strategy draft with, heads first.

    advice  how a head in a directory is given instead: the end of a sentence
    """

    advice = ("; a head's directory is given to flowspec models shard --draft DIR, or linked as "
              f"MODEL/{EAGLE2.directory} or by the name of its kind")

    def __contains__(self, name: object) -> bool:
        return name == OWN or (name in DRAFT_KINDS and not DRAFT_KINDS[str(name)].bound)

    def __iter__(self) -> Iterator[str]:
        kinds = sorted(DRAFT_KINDS.values(), key=lambda kind: not kind.is_head)
        return iter([OWN, *(kind.name for kind in kinds if not kind.bound)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


DRAFTS = _Drafts()


def stored_kinds() -> list[DraftKind]:
    """List the kinds that have files."""
    return [kind for kind in DRAFT_KINDS.values() if kind.directory]


def head_kinds() -> list[DraftKind]:
    """List the kinds of draft that a model is run with unless the user names one.

    The preferred kind is the first: the others stand in for it.
    """
    kinds = [kind for kind in stored_kinds() if kind.choice is not None]
    return sorted(kinds, key=lambda kind: kind.choice or 0)


def timed_kinds() -> list[DraftKind]:
    """List the kinds that bring along a time of their own, a field of a profile's [draft]."""
    return [kind for kind in stored_kinds() if kind.layers]


def trained_kinds() -> list[DraftKind]:
    """List the kinds that ``flowspec models train-head`` trains."""
    return [kind for kind in stored_kinds() if kind.trainer]


def draft_kind_named(name: str) -> DraftKind:
    """Return the kind of draft of this name; UsageError for one that no kind with files has."""
    draft_kind = DRAFT_KINDS.get(name)
    if draft_kind is None or not draft_kind.directory:
        raise UsageError(f"unknown kind of draft model {name!r}; there is: "
                         f"{', '.join(kind.name for kind in stored_kinds())}")
    return draft_kind


def recognise_kind(config: Mapping[str, Any], shapes: Shapes) -> DraftKind | None:
    """Return the kind of the draft model that has this config.json and these tensors."""
    format_kind = kind_of_format(recognise_format(config) or "")
    if format_kind and format_kind.is_block:  # whose fc looks like an EAGLE-3 head's
        return format_kind
    # Kinds of other packages first: they know theirs, which the rules here would take for a head or a model.
    kinds = sorted(stored_kinds(), key=lambda kind: kind.name in _BUILTIN)
    return next((kind for kind in kinds if kind.recognise and kind.recognise(config, shapes)), None)


# Formats of published heads, the preferred first.
FORMATS = ("EAGLE-2", "EAGLE-3", "EAGLE-4", "DFlash", "DFlash2", "DSpark", "JetSpec", "Domino", "P-EAGLE", "MTP",
           "Medusa", "Hydra", "Gemma 4 assistant")


def kind_of_format(name: str) -> DraftKind | None:
    """Return the kind of draft model that a format is read as; None: it cannot be run."""
    return next((kind for kind in stored_kinds() if name in kind.formats), None)


# ``speculators_model_type`` of vllm-project/speculators, and ``projector_type`` of SpecForge.
_TYPES = {"eagle": "EAGLE-2", "eagle3": "EAGLE-3", "dflash": "DFlash", "dflash2": "DFlash2",
          "dspark": "DSpark", "domino": "Domino", "peagle": "P-EAGLE", "mtp": "MTP"}
# Parts of names in ``architectures``, the first that fits; those of EAGLE heads are not listed.
_ARCHITECTURES = {"dflash2": "DFlash2", "dflash": "DFlash", "dspark": "DSpark", "jetspec": "JetSpec",
                  "domino": "Domino", "peagle": "P-EAGLE", "medusa": "Medusa", "hydra": "Hydra",
                  "mtpdraft": "MTP", "gemma4assistant": "Gemma 4 assistant"}


def recognise_format(config: Mapping[str, Any]) -> str | None:
    """Return the format that a config.json names; None if it names none, as EAGLE heads and language models."""
    return next(_formats_named(config), None)


def _formats_named(config: Mapping[str, Any]) -> Iterator[str]:
    block = config.get("dflash_config")
    block = block if isinstance(block, dict) else {}
    if (type_name := config.get("speculators_model_type")) is not None:
        yield _TYPES.get(str(type_name), f"speculators' {type_name}")
    if (type_name := block.get("projector_type")) is not None:
        yield _TYPES.get(str(type_name), f"DFlash with {type_name}")
    if block.get("selector_rank"):
        yield "DFlash2"
    if block.get("causal_head"):
        yield "JetSpec"
    if config.get("markov_rank") == 0:  # DeepSpec's class for both
        yield "DFlash"
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        plain = str(name).lower()
        yield from (drafter for part, drafter in _ARCHITECTURES.items() if part in plain)
    if block:
        yield "DFlash"
    for field, drafter in (("markov_rank", "DSpark"), ("medusa_num_heads", "Medusa"),
                           ("hydra_num_heads", "Hydra")):
        if field in config:
            yield drafter
    if str(config.get("model_type", "")).startswith("gemma4_assistant"):
        yield "Gemma 4 assistant"

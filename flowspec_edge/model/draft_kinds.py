"""The kinds of draft models: a record each, from which loading, sharding, planning and messages follow.

A record names the module that reads and runs the kind; ``drafting.load`` imports it on first use.  Nothing
here needs torch.

Also here: the formats of published draft heads, and how a head's config.json shows which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from flowspec_edge.errors import UsageError

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by their authors' names


@dataclass(frozen=True)
class DraftKind:
    """One kind of draft model.

    directory       in the directory of a model's parts; "" for the kind that has no files
    title           what it is called after "its" or "an": "EAGLE-2 head"
    module          its ``FORMAT`` reads and runs it: see ``drafting.format``
    recognise       whether a config.json and the tensors beside it are of this kind; None: not by them
    formats         published formats that are read as this kind; those of block drafters are recognised by it
    files_of        the kind that its files are of, if its directory alone shows that it is another
    choice          place among the heads that draft unless another kind is named, the lowest first; None: it
                    drafts only if it or a strategy that needs it is named
    is_head         a small network on the target's states: its matrices are packed as lm_head is, and its
                    embeddings stay in their file
    is_block        drafts all depths of a tree in one pass
    in_target       of a layer of the target's own checkpoint, how the names of its tensors begin; "": it has
                    files of its own
    looks_up_target its embeddings are always the target's
    bound           one strategy alone uses it, and that strategy uses no other
    inner_states    needs states from within the target, which a pipeline's stages alone send
    shares_memory   its caches and recorded passes live in memory that is allocated at the start
    charged_as      the measured time of ``DraftCost`` that a pass takes ``passes`` times; "": it takes none
    launches        kernel launches of a pass: within the layers of a small model, and others
    graph_launches  all of them where passes are CUDA graphs; None: they are not recorded
    usual           the size that a plan assumes for one that is not on this machine
    made_by         the command that makes one for a model, if that takes no choice of a kind
    trainer         MODULE:NAME of what trains one for ``flowspec models train-head`` (``lab.training.heads``)
    measured_by     strategies whose requests measure a pass for a profile, in the time that ``charged_as`` names
    """

    name: str
    directory: str
    title: str
    module: str
    launches: tuple[int, int]
    recognise: Callable[[Mapping[str, Any], Shapes], bool] | None = None
    formats: tuple[str, ...] = ()
    files_of: str = ""
    choice: int | None = None
    is_head: bool = True
    is_block: bool = False
    in_target: str = ""
    looks_up_target: bool = False
    bound: bool = False
    inner_states: bool = False
    shares_memory: bool = True
    charged_as: Literal["pass_ms", "lm_pass_ms", "spd_pass_ms", ""] = "pass_ms"
    passes: float = 1.0
    graph_launches: int | None = None
    usual: str = ""
    made_by: str = ""
    trainer: str = ""
    measured_by: tuple[str, ...] = ()

    @property
    def by_name_only(self) -> bool:
        """Whether a head of this kind drafts only if its name is given."""
        return self.is_head and self.choice is None


def _is_eagle3(config: Mapping[str, Any], shapes: Shapes) -> bool:
    if "d2t" in shapes or any(name.startswith("midlayer.") or name.endswith("hidden_norm.weight")
                              for name in shapes):
        return True
    fc = shapes.get("fc.weight", ())
    # [H, 2H] joins an embedding and a state, [H, 3 target_H] three states.
    return len(fc) == 2 and fc[1] != 2 * fc[0] and not _is_spd(config, {})


def _is_eagle2(config: Mapping[str, Any], shapes: Shapes) -> bool:
    fc = shapes.get("fc.weight", ())
    return (len(fc) == 2 and fc[1] == 2 * fc[0] and not _is_eagle3(config, shapes)
            and not _is_spd(config, shapes))


def _is_spd(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return isinstance(config.get("target_layers"), int) and "d2t" not in shapes


def _is_language_model(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return ("layers.0.input_layernorm.weight" in shapes and "fc.weight" not in shapes
            and not _is_spd(config, shapes))


EAGLE2 = DraftKind("eagle2", "eagle2", "EAGLE-2 head", "flowspec_edge.drafting.eagle.eagle2", (0, 32),
                   recognise=_is_eagle2, formats=("EAGLE-2",), choice=0, graph_launches=6,
                   usual="one layer and fc", trainer="flowspec_edge.lab.training.eagle:EAGLE2_TRAINER",
                   measured_by=("flowspec", "chunk_pp"))
EAGLE3 = DraftKind("eagle3", "eagle3", "EAGLE-3 head", "flowspec_edge.drafting.eagle.eagle3_formats", (0, 38),
                   recognise=_is_eagle3, formats=("EAGLE-3",), choice=1, inner_states=True, graph_launches=5,
                   usual="one layer, fc and an lm_head of 32,000 tokens",
                   trainer="flowspec_edge.lab.training.eagle:EAGLE3_TRAINER")
LM = DraftKind("lm", "draft-lm", "small language model", "flowspec_edge.drafting.lm", (354, 18),
               recognise=_is_language_model, is_head=False, charged_as="lm_pass_ms", graph_launches=4,
               measured_by=("speculative",))
SPD = DraftKind("spd", "spd", "SPD module", "flowspec_edge.lab.spd.drafter", (0, 38), recognise=_is_spd,
                is_head=False, looks_up_target=True, bound=True, shares_memory=False,
                charged_as="spd_pass_ms", made_by="flowspec models train-spd", measured_by=("spd",))
# ``passes``, by bytes at Llama-2-7B: five layers, fc over five states and lm_head in 2.46 GB, beside one
# layer, fc and lm_head in 0.74.
_DFLASH = DraftKind("dflash", "dflash", "DFlash block drafter", "flowspec_edge.drafting.block.formats",
                    (0, 150), formats=("DFlash", "DFlash2", "JetSpec"), choice=3, is_block=True,
                    inner_states=True, shares_memory=False, passes=3.3, usual="five layers and fc",
                    trainer="flowspec_edge.lab.training.block:TRAINER")
MTP = DraftKind("mtp", "mtp", "own MTP layer", "flowspec_edge.drafting.eagle.mtp", (0, 110),
                formats=("MTP",), in_target="mtp.", looks_up_target=True, usual="a layer with attention")
NGRAM = DraftKind("ngram", "", "n-grams of the text", "", (0, 0), is_head=False, shares_memory=False,
                  charged_as="")

# Kernel launches are counted on torch 2.8 (tests/drafting/test_launches.py), block drafters' are estimated.
DRAFT_KINDS = {kind.name: kind for kind in (
    EAGLE2,
    replace(EAGLE2, name="eagle2-deep", directory="eagle2-deep", title="second EAGLE-2 head",
            recognise=None, formats=(), files_of=EAGLE2.name, choice=None, trainer="", measured_by=()),
    EAGLE3,
    LM,
    SPD,
    _DFLASH,
    replace(_DFLASH, name="dspark", directory="dspark", title="DSpark block drafter", launches=(0, 160),
            formats=("DSpark",), choice=2, trainer="flowspec_edge.lab.training.block:MARKOV_TRAINER"),
    MTP,
    NGRAM,
)}
# Kinds that have files.
STORED = tuple(kind for kind in DRAFT_KINDS.values() if kind.directory)
# Those that a model is run with unless it is told otherwise, the preferred first: the others stand in for it.
HEADS = tuple(sorted((kind for kind in STORED if kind.choice is not None), key=lambda kind: kind.choice or 0))
# Those that are layers of a target's own checkpoint.
OWN_LAYERS = tuple(kind for kind in STORED if kind.in_target)
# Those that ``flowspec models train-head`` trains.
TRAINED = tuple(kind for kind in STORED if kind.trainer)
OWN = "own"  # in the place of a kind: the one that a strategy or a model has by itself
# Kinds that a configuration names; any other draft there is a head's directory.
NAMED = (*OWN_LAYERS, NGRAM)
# What a user may let any strategy draft with, heads first; what a configuration names; what a plan is made for
# ("head": a head or own layer that there is, else one yet to be trained; "auto": else n-grams); what is trained.
_DRAFTS = (OWN, *(kind.name for kind in sorted(DRAFT_KINDS.values(), key=lambda kind: not kind.is_head)
                  if not kind.bound))
_NAMED = (OWN, *(kind.name for kind in NAMED))
_WANTED = ("auto", "head", *(kind.name for kind in NAMED))
_TRAINED = tuple(kind.name for kind in TRAINED)
if TYPE_CHECKING:  # a type checker knows no literals that are computed
    Draft = str
    NamedDraft = str
    WantedDraft = str
    TrainedDraft = str
else:
    Draft, NamedDraft = Literal[_DRAFTS], Literal[_NAMED]
    WantedDraft, TrainedDraft = Literal[_WANTED], Literal[_TRAINED]


def draft_kind_named(name: str) -> DraftKind:
    """UsageError for a name that no kind with files has."""
    found = DRAFT_KINDS.get(name)
    if found is None or not found.directory:
        raise UsageError(f"unknown kind of draft model {name!r}; there is: "
                         f"{', '.join(kind.name for kind in STORED)}")
    return found


def recognise_kind(config: Mapping[str, Any], shapes: Shapes) -> DraftKind | None:
    """The kind of the draft model that has this config.json and these tensors."""
    named = FORMATS.get(recognise_format(config) or "")
    if named and DRAFT_KINDS[named].is_block:  # whose fc looks like an EAGLE-3 head's
        return DRAFT_KINDS[named]
    return next((kind for kind in STORED if kind.recognise and kind.recognise(config, shapes)), None)


# Format of published heads -> kind of draft model; None: cannot be run.  The order is that of preference.
FORMATS: dict[str, str | None] = {
    name: next((kind.name for kind in STORED if name in kind.formats), None)
    for name in ("EAGLE-2", "EAGLE-3", "DFlash", "DFlash2", "DSpark", "JetSpec", "Domino", "P-EAGLE", "MTP",
                 "Medusa", "Hydra", "Gemma 4 assistant")
}
# ``speculators_model_type`` of vllm-project/speculators, and ``projector_type`` of SpecForge.
_TYPES = {"eagle": "EAGLE-2", "eagle3": "EAGLE-3", "dflash": "DFlash", "dflash2": "DFlash2",
          "dspark": "DSpark", "domino": "Domino", "peagle": "P-EAGLE", "mtp": "MTP"}
# Parts of names in ``architectures``, the first that fits; those of EAGLE heads are not listed.
_ARCHITECTURES = {"dflash2": "DFlash2", "dflash": "DFlash", "dspark": "DSpark", "jetspec": "JetSpec",
                  "domino": "Domino", "peagle": "P-EAGLE", "medusa": "Medusa", "hydra": "Hydra",
                  "mtpdraft": "MTP", "gemma4assistant": "Gemma 4 assistant"}


def recognise_format(config: Mapping[str, Any]) -> str | None:
    """The format that a config.json names; None if it names none, as EAGLE heads and language models."""
    return next(_named(config), None)


def _named(config: Mapping[str, Any]) -> Iterator[str]:
    block = config.get("dflash_config")
    block = block if isinstance(block, dict) else {}
    if (given := config.get("speculators_model_type")) is not None:
        yield _TYPES.get(str(given), f"speculators' {given}")
    if (given := block.get("projector_type")) is not None:
        yield _TYPES.get(str(given), f"DFlash with {given}")
    if block.get("selector_rank"):
        yield "DFlash2"
    if block.get("causal_head"):
        yield "JetSpec"
    if config.get("markov_rank") == 0:  # DeepSpec's class for both
        yield "DFlash"
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        plain = str(name).lower()
        yield from (known for part, known in _ARCHITECTURES.items() if part in plain)
    if block:
        yield "DFlash"
    for field, known in (("markov_rank", "DSpark"), ("medusa_num_heads", "Medusa"),
                         ("hydra_num_heads", "Hydra")):
        if field in config:
            yield known
    if str(config.get("model_type", "")).startswith("gemma4_assistant"):
        yield "Gemma 4 assistant"

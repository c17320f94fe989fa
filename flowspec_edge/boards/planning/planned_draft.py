"""Choose the draft model that a plan assumes.

Its memory is counted in ``model_size``, its pass is charged here and in ``draft_turn``, and every text names it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowspec_edge.device_profile import Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.model.catalogue import find_known_model
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, EAGLE2, NGRAM, OWN, OWN_LAYERS, PlannedDraftName, head_kinds
from flowspec_edge.model.families import FAMILIES, UNKNOWN
from flowspec_edge.model.opened import OpenModel, missing_own_layer

Origin = Literal["here", "published", "untrained", "text"]
DEPTHS = 8  # of a tree in the default strategy: a pass for each, or one of a block drafter for all


@dataclass(frozen=True)
class PlannedDraft:
    """What D0 drafts with by a plan.

    origin      "here": on this machine; "published": the catalogue knows it; "untrained": there is
                none yet, and its size is that of the usual one; "text": n-grams
    repository  of a published one, OWNER/NAME
    """

    kind: DraftKind
    origin: Origin
    repository: str = ""

    @property
    def by_ngrams(self) -> bool:
        return self.kind == NGRAM

    @property
    def name(self) -> str:
        """The end of a sentence about the model: "its EAGLE-3 head"."""
        if self.by_ngrams:
            return self.kind.title
        return f"an {self.kind.title} yet to be trained" if self.origin == "untrained" else (
            f"its {self.kind.title}")

    def as_json(self) -> dict[str, str]:
        return {"kind": self.kind.name, "origin": self.origin, "repository": self.repository}

    def setting(self) -> str:
        """Return what ``--draft`` or ``draft`` of a cluster file must name to get it; "" if nothing."""
        return self.kind.name if self.by_ngrams or self.kind.by_name_only else ""


@dataclass(frozen=True)
class StoredDraft:
    """A draft model that is on this machine; ``directory``: its own, or of the target whose layer it is."""

    kind: DraftKind
    directory: Path


NGRAMS = PlannedDraft(NGRAM, "text")


def _choose(draft: PlannedDraftName, local_drafts: Collection[str], published: Sequence[tuple[str, str]]
            ) -> PlannedDraft:
    """Choose the draft of a model that has the kinds ``local_drafts``, and for which (kind, repository) are published.

    Heads come first, as when a model is run: an MTP layer drafts only if it is named.
    """
    requested_kind = DRAFT_KINDS.get(draft)
    if requested_kind == NGRAM:
        return NGRAMS
    for kinds in ((requested_kind,),) if requested_kind else (head_kinds(), OWN_LAYERS):
        if kind := next((kind for kind in kinds if kind.name in local_drafts), None):
            return PlannedDraft(kind, "here")
        names = {kind.name for kind in kinds}
        if head := next(((kind, name) for kind, name in published if kind in names), None):
            return PlannedDraft(DRAFT_KINDS[head[0]], "published", head[1])
    if draft == "auto":
        return NGRAMS
    return PlannedDraft(requested_kind or EAGLE2, "untrained")


def planned_for(name_or_path: str, draft: PlannedDraftName, local_drafts: Collection[str], family: str,
                model: OpenModel | None = None, from_weights: bool = False) -> PlannedDraft:
    """Return the draft of a model of ``family`` that has draft models of the kinds ``local_drafts``.

    Raise UsageError without the MTP layer that is wanted: a ``model`` whose weights are here must have it.
    """
    entry = find_known_model(name_or_path)
    kind = DRAFT_KINDS.get(draft)
    if kind and kind.in_target and kind.name not in local_drafts and (
            from_weights or kind not in FAMILIES.get(family, UNKNOWN).draft_layers):
        raise UsageError(missing_own_layer(kind, model, family))
    published = [(head.kind or "", head.repository) for head in entry[1].runnable] if entry else []
    return _choose(draft, local_drafts, published)


def level_seconds(d0: Profile, kind: DraftKind, nodes: int) -> float:
    """Return D0's time to draft a level of a tree: a pass, or a level's share of a block drafter's only pass."""
    if kind == NGRAM:
        return 0.0
    seconds = d0.draft_seconds(kind.name, nodes)
    return seconds / DEPTHS if kind.is_block else seconds


def charged_as(d0: Profile, planned: DraftKind, simulated: str) -> Profile:
    """Return a copy of ``d0`` whose pass time makes ``simulated`` draft as slowly as ``planned`` would."""
    if simulated in (planned.name, NGRAM.name, OWN):
        return d0
    launches = d0.launch.per_pass(simulated)[1] * d0.launch.us * 1e-6 if d0.launch else 0.0
    pass_seconds = max(0.0, level_seconds(d0, planned, 0) - launches)
    return d0.model_copy(update={"draft": d0.draft.model_copy(update={"pass_ms": pass_seconds * 1e3})})

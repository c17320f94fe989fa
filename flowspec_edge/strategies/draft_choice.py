"""What a strategy drafts with on a model, and what to do if the model lacks it: for every command alike."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, DRAFTS, EAGLE2, NAMED, NGRAM, OWN, head_kinds
from flowspec_edge.model.opened import OpenModel, missing_own_layer
from flowspec_edge.strategies.parameters import Parameters

if TYPE_CHECKING:
    from flowspec_edge.strategies.base import Strategy  # needs numpy

_P = TypeVar("_P", bound=Parameters)


class HasDrafts(Protocol):
    """A model, as far as its draft models go."""

    def draft(self, kind: str) -> object:
        """Return the draft model of ``kind``; None if there is none."""


class Written(NamedTuple):
    """How a user writes settings.

    setting  of a name and its value
    kinds    what ``draft`` may name
    """

    setting: str
    kinds: Collection[str]

    def __call__(self, name: str, value: str) -> str:
        return self.setting.format(name=name, value=value)


AS_OPTION = Written("--{name} {value}", DRAFTS)
# A cluster file's; any other value of its ``draft`` is the directory of a head.
AS_LINE = Written('{name} = "{value}"', frozenset(kind.name for kind in NAMED))


def draft_kind(strategy: type[Strategy], params: Parameters, model: HasDrafts) -> str | None:
    """Return the kind of draft model that ``strategy`` uses on ``model``, which may lack it; None: it drafts nothing.

    An EAGLE-3 head, then a block drafter, replaces a missing EAGLE-1/2 head.  UsageError for an unusable
    kind.
    """
    kind = strategy.drafts_with(params)
    if kind == EAGLE2.name and not model.draft(kind):
        kind = next((other.name for other in head_kinds() if model.draft(other.name)), kind)
    if kind is not None and DRAFT_KINDS[kind].inner_states and strategy.parallelism != "pipeline":
        raise UsageError(f"{strategy.name} cannot draft with the model's {DRAFT_KINDS[kind].title}: it needs "
                         "inner states of the target, which devices that share each layer do not send; see "
                         "--draft for another kind, or leave this strategy out")
    return kind


def draft_label(strategy: type[Strategy], params: Parameters, kind: str | None) -> str:
    """Name what a request drafts with, for a table: ``kind``, "+ngram" if it also looks up in the text, or "none"."""
    looked_up = f"+{NGRAM.name}" if kind not in (None, NGRAM.name) and strategy.looks_up(params) else ""
    return f"{kind or 'none'}{looked_up}"


def require_draft(strategy: type[Strategy], params: Parameters, model: OpenModel, write: Written = AS_OPTION
                  ) -> None:
    """Raise UsageError if ``model`` lacks the draft model that ``strategy`` uses."""
    kind = draft_kind(strategy, params, model)
    if kind is not None and kind != NGRAM.name and model.draft(kind) is None:
        raise UsageError(missing_draft(strategy, kind, model, write))


def missing_draft(strategy: type[Strategy], kind: str, model: OpenModel, write: Written, besides: str = ""
                  ) -> str:
    """Say that ``model`` lacks the draft model of ``kind``, and what to do.

    besides  what was found in its place, as a clause
    """
    draft_kind = DRAFT_KINDS[kind]
    if draft_kind.in_target:
        return missing_own_layer(draft_kind, model)
    plain = f"do not draft: {write('strategy', 'autoregressive')}"
    if model.sharded:
        add = "shard it again with --draft DIR"
    elif draft_kind.is_head:
        add = f"add one, as flowspec models head {model.display_path} says"
    elif draft_kind.made_by:
        add = f"make it with: {draft_kind.made_by} --model {model.display_path}"
    else:
        add = f"put one into {draft_kind.directory}/"
    others = [] if draft_kind.bound else [kind for kind in model.drafts if kind.name in write.kinds]
    draft_advice = f", draft with its {others[0].title}: {write('draft', others[0].name)}" if others else ""
    looked_up = f", look up in the text: {write('draft', NGRAM.name)}" if not draft_kind.bound else ""
    return (f"{strategy.name} drafts with {draft_kind.directory}/, which {model.display_path} does not have{besides}: "
            f"{add}{draft_advice}{looked_up}, or {plain}")


def with_a_draft(strategy: type[Strategy], params: _P, model: OpenModel, write: Written = AS_OPTION
                 ) -> tuple[_P, str]:
    """Let ``strategy`` look up in the text if the model has no draft model that would draft unless it is named.

    Returns the parameters, and a note about the change, or "".
    """
    in_target = [kind for kind in model.drafts if kind.in_target]
    drafter = DRAFT_KINDS.get(strategy.drafter or "", NGRAM)
    if params.draft != OWN or drafter is NGRAM or drafter.bound or len(model.drafts) > len(in_target):
        return params, ""
    lacks, other = (("head", f"its {in_target[0].title}: {write('draft', in_target[0].name)}") if in_target else
                    ("draft model", f"a head: flowspec models head {model.display_path}"))
    return (replace(params, draft=NGRAM.name),
            f"{model.display_path} has no {lacks}, so {strategy.name} looks up in the text; for {other}")

"""The memory footprint of a model's parts in bytes, computed from their shapes; without torch for known models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flowspec_edge.boards.planning.model_parts import HeadShape, ModelParts, PartShape, shipped_parts
from flowspec_edge.boards.planning.planned_draft import NGRAMS, PlannedDraft, StoredDraft, planned_for
from flowspec_edge.model.candidates import candidates_for, default_count
from flowspec_edge.model.catalogue import find_known_model
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import PlannedDraftName
from flowspec_edge.model.expert_counts import correlated
from flowspec_edge.model.families import FAMILIES, UNKNOWN
from flowspec_edge.model.manifest import CacheBits, HeadBits, reserved
from flowspec_edge.model.opened import model_path
from flowspec_edge.stage.quant.sizes import (
    default_head_bits,
    draft_bits,
    factor_bytes,
    matrix_bytes,
    packed_as,
    rescored_bytes,
)
from flowspec_edge.strategies.tree_strategy import TreeParameters

PlanDtype = Literal["fp32", "bf16", "fp16", "int4"]
_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "int4": 2}  # bytes of a value outside the decoder's matrices


@dataclass(frozen=True)
class ModelBytes:
    """A model's parts in bytes, in the element type ``dtype``.

    Token embeddings stay in their file.

    max_positions    the model's limit on tokens of prompt and answer together
    layer            weights of one decoder layer (the largest)
    layer_values     its parameters, a number
    lm_head          the embeddings themselves if the model ties the two
    head_bits        of lm_head
    draft            the draft head's fc and layers, and if it has one (EAGLE-3) its own lm_head, or its copy
                     of the target's rows of a smaller draft vocabulary; its size is that of a usual one for
                     the target's shape unless ``planned`` is here
    draft_unread     of ``draft``: experts that no row of a level of the tree chooses, on average
    draft_lm_head    what a draft pass reads of the target's lm_head: 0 for a head with its own, some rows beside a
                     candidate head, whose factor is in ``draft``
    candidates       of the candidate head; 0: there is none
    kv_row           keys and values of one row in one layer, on average; draft_kv_row: in the draft head
    row_values       of a pass's activations, a number a row: what a layer's matrices give, and three times the states
    queries          values of a row's queries in one layer, on average, of layers that see the whole text; a number
    window           rows that layers with a window see; ``windowed``: their share of all layers
    state            of recurrent layers, in one layer, on average: states, snapshots and entries of a
                     request, and snapshots of a text that it may go on with; ``state_read``: what a
                     pass reads of it
    from_weights     whether weight files were present and agreed
    planned          what D0 drafts with
    layer_launches   kernel launches of a decoder layer, without those of experts
    experts          of a sparse model's layer, of ``expert`` bytes each, of which a row chooses ``experts_per_token``;
                     0 for a dense one
    """

    name: str
    dtype: PlanDtype
    layers: int
    hidden_width: int
    vocabulary: int
    max_positions: int
    layer: int
    layer_values: int
    norm: int
    lm_head: int
    draft: int
    draft_lm_head: int
    head_bits: HeadBits
    kv_row: int
    draft_kv_row: int
    kv_cache: CacheBits
    from_weights: bool
    planned: PlannedDraft
    layer_launches: int = UNKNOWN.launches
    window: int | None = None
    windowed: float = 0.0
    experts: int = 0
    expert: int = 0
    experts_per_token: int = 0
    state: int = 0
    state_read: int = 0
    draft_unread: int = 0
    candidates: int = 0
    queries: int = 0
    row_values: int = 0

    @property
    def bytes_per_value(self) -> int:
        """Return the bytes a value of a hidden state on the wire."""
        return _WIDTH[self.dtype]

    @property
    def draft_estimated(self) -> bool:
        """Whether the draft head is not here, so that its size is a usual one's."""
        return self.planned.origin in ("published", "untrained")

    @property
    def d0_weights(self) -> int:
        """Return the bytes of lm_head and the draft head."""
        return self.lm_head + self.draft

    @property
    def values(self) -> int:
        """Parameters of the target: decoder layers, embeddings and lm_head."""
        return self.layers * self.layer_values + 2 * self.vocabulary * self.hidden_width

    def without_head(self) -> ModelBytes:
        """Return the parts for drafts by n-grams: D0 holds lm_head alone."""
        return replace(self, draft=0, draft_unread=0, draft_lm_head=0, draft_kv_row=0, planned=NGRAMS)

    @property
    def target_weights(self) -> int:
        return self.layers * self.layer + self.norm

    def layer_read(self, rows: float, correlation: float = 0.0) -> float:
        """Return the bytes of a layer's weights that a pass of ``rows`` reads, whose experts have this correlation."""
        if not self.experts:
            return self.layer
        touched = correlated(self.experts, self.experts_per_token, rows, correlation)
        return self.layer - self.expert * (self.experts - touched)

    def layer_cache(self, rows: int, requests: int, tentative: int) -> int:
        """Return the bytes of a cache of ``rows`` rows and of the requests' states in an average layer.

        The rows of a window are as ``manifest.reserved`` says.
        """
        window_rows = reserved(self.window, rows, requests, tentative)
        by_row = round(self.kv_row * (self.windowed * window_rows + (1 - self.windowed) * rows))
        return by_row + requests * self.state

    def segment_bytes(self, rows: int) -> int:
        """Return the bytes of a segment's hidden states; its header is not counted."""
        return rows * self.hidden_width * self.bytes_per_value


def model_bytes(name_or_path: str, dtype: PlanDtype, lm_head: HeadBits | None = None,
                kv_cache: CacheBits = "16bit", draft: PlannedDraftName = "head", using: StoredDraft | None = None,
                candidates: int | None = None) -> ModelBytes:
    """Return a model's parts in bytes, in the element type ``dtype``.

    The model is given by name or directory, a checkpoint or its config.json, or OWNER/NAME on the hub, of which
    only config.json is fetched.

    dtype       "int4": 4 bits for the matrices of the decoder layers, 16 bits for all else, but for lm_head and a
                draft head's matrices (``sizes.draft_bits``)
    lm_head     its bits; None: the sharder's default for ``dtype``
    kv_cache    of the stages; the draft head's is in 16 bits
    draft       see ``planned_draft``
    using       this draft model instead, of any kind
    candidates  of the candidate head; None: the sharder's default

    Raise UsageError if there is no model that stages can run, or no MTP layer where one is wanted.  Raise
    FlowspecError for damaged or incomplete weights.
    """
    if using is None and (entry := _catalogue_entry(name_or_path)):
        name, shape = entry
        planned = planned_for(name_or_path, draft, (), shape.family)
    else:
        from flowspec_edge.boards.planning.read_parts import read_model  # imports torch

        name, planned, shape = read_model(name_or_path, dtype == "int4", draft, using)
    return _sized(name, shape, planned, dtype, lm_head or default_head_bits(dtype), kv_cache, candidates)


def usual_heads_of(name_or_path: str) -> tuple[int, int, dict[str, HeadShape]]:
    """Return the width and vocabulary of a model, and the usual head of every kind for it.

    The model is given as for :func:`model_bytes`.
    """
    if entry := _catalogue_entry(name_or_path):
        _, shape = entry
        return shape.hidden, shape.vocabulary, shape.drafts
    from flowspec_edge.boards.planning.read_parts import target_decoder, usual_heads  # imports torch

    target = target_decoder(name_or_path)
    return target.hidden_size, target.vocab_size, usual_heads(target)


def _catalogue_entry(name_or_path: str) -> tuple[str, ModelParts] | None:
    """Return a model of the catalogue that is not on this machine, with its name; None if it is no such model."""
    entry = find_known_model(name_or_path)
    shape = shipped_parts().get(entry[0]) if entry and model_path(name_or_path) is None else None
    return (entry[0], shape) if entry and shape else None


def ranking_bytes(kind: DraftKind, head: HeadShape, vocabulary: int, hidden: int, width: int, bits: HeadBits,
                  candidates: int | None = None) -> tuple[int, int, int]:
    """Return what lets a head rank by the target's lm_head in ``bits``.

    The values are bytes of it in memory beside lm_head, bytes of lm_head that a pass reads, and candidates.
    ``candidates`` as for :func:`model_bytes`.
    """
    if head.own_lm_head:
        return 0, 0, 0
    packed = packed_as(bits)
    matrix = matrix_bytes(vocabulary, hidden, width, packed)
    if head.drafted < vocabulary:
        copied = bits == "16bit"  # see ``OutputHead.restrict_to``
        return (head.drafted * hidden * width, 0, 0) if copied else (0, matrix, 0)
    candidate_head = candidates_for(default_count(vocabulary) if candidates is None else candidates, vocabulary, hidden)
    if candidate_head is None or not kind.narrows:
        return 0, matrix, 0
    return (factor_bytes(candidate_head.rank, vocabulary, hidden, width, packed_as(draft_bits(bits))),
            rescored_bytes(TreeParameters().width * candidate_head.count, vocabulary, hidden, width, packed),
            candidate_head.count)


def _sized(name: str, shape: ModelParts, planned: PlannedDraft, dtype: PlanDtype, bits: HeadBits, kv_cache: CacheBits,
           candidates: int | None) -> ModelBytes:
    width = _WIDTH[dtype]
    packed = packed_as("int4" if dtype == "int4" else "16bit")
    matrix = matrix_bytes(shape.vocabulary, shape.hidden, width, packed_as(bits))
    drafting = packed_as(draft_bits(bits))
    head = None if planned.by_ngrams else shape.drafts[planned.kind.name]
    beside, rows_read, count = ranking_bytes(planned.kind, head, shape.vocabulary, shape.hidden, width, bits,
                                             candidates) if head else (0, 0, 0)
    draft_bytes = head.part.nbytes(width, drafting) + beside if head else 0
    layers = [layer.nbytes(width, packed, shape.group) for layer in shape.layers]
    cache = shape.caches[kv_cache][str(width)]
    experts = shape.experts
    return ModelBytes(
        name=name, dtype=dtype, layers=shape.count, hidden_width=shape.hidden, vocabulary=shape.vocabulary,
        max_positions=shape.max_positions, layer=max(layers), layer_values=max(layer.values for layer in shape.layers),
        norm=shape.norm * width, lm_head=matrix, draft=draft_bytes,
        draft_unread=round(head.unread(width, drafting)) if head else 0, draft_lm_head=rows_read, head_bits=bits,
        candidates=count,
        kv_row=cache.kv_row, draft_kv_row=head.kv_row * width if head else 0, kv_cache=kv_cache,
        from_weights=shape.from_weights, planned=planned,
        layer_launches=FAMILIES.get(shape.family, UNKNOWN).launches,
        window=cache.window, windowed=cache.windowed,
        experts=experts.count if experts else 0, experts_per_token=experts.chosen if experts else 0,
        expert=experts.expert.nbytes(width, packed, shape.group) if experts else 0,
        state=cache.state, state_read=cache.state_read, queries=shape.queries,
        row_values=_row_values(shape))


def _row_values(shape: ModelParts) -> int:
    def outputs(part: PartShape) -> int:
        return sum(matrices.rows * matrices.count for matrices in part.matrices)

    widest, experts = max(map(outputs, shape.layers)), shape.experts
    unused = (experts.count - experts.chosen) * outputs(experts.expert) if experts else 0
    return widest - unused + 3 * shape.hidden

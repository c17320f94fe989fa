"""Draft models to shard with a target.  Reads headers only; loading a draft model detects damaged weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from flowspec_edge.drafting import checkpoint as weights
from flowspec_edge.drafting.checkpoint import EMBEDDING, LM_HEAD, plain_name
from flowspec_edge.drafting.format import TargetFacts, format_of, own_layer_format_of
from flowspec_edge.errors import UsageError
from flowspec_edge.model.config import cache_values
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import recognise_kind, stored_kinds
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.weights import located
from flowspec_edge.model.weights.checkpoint import Checkpoint
from flowspec_edge.stage.quant.base import Scheme
from flowspec_edge.util.weight_file import SAFETENSORS, TensorInfo

log = logging.getLogger(__name__)

_LOOKED_UP = (EMBEDDING, "markov_head.markov_w1.weight", "candidate_selector.predecessor_codebook",
              "candidate_selector.successor_codebook")


@dataclass(frozen=True)
class DraftFiles:
    """A draft model's files, which are copied unchanged.

    Of a layer of the target's own checkpoint none, but its ``tensors``.

    config      of its layers, as its format reads it
    files       those in ``directory`` that a loader reads
    embeddings  whether it looks up the target's embeddings
    kv_row      elements of one row's keys and values in its cache
    copied_values  of the target's lm_head, if that is in 16 bits: its rows of the draft vocabulary
    ranks_by_target  whether it ranks by all of the target's lm_head, for which a candidate head can stand
    """

    kind: DraftKind
    directory: Path
    config: Any
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    embeddings: bool
    kv_row: int
    fingerprint: str
    copied_values: int = 0
    ranks_by_target: bool = False

    @property
    def parameters(self) -> int:
        return sum(prod(t.shape) for t in self.tensors.values() if t.dtype.is_floating_point)

    def weight_bytes(self, width: int, scheme: Scheme | None = None) -> int:
        """Bytes in memory, with ``width`` bytes per parameter, and a head's matrices quantised by ``scheme``.

        Integer tensors keep their size. A head's own embeddings stay in a safetensors file.
        """
        fixed = sum(t.nbytes for t in self.tensors.values() if not t.dtype.is_floating_point)
        head = self.kind.is_head
        in_file = head and any(path.suffix == SAFETENSORS for path in self.files)
        saved = 0
        for name, t in self.tensors.items():
            if (head and scheme is not None and len(t.shape) == 2 and t.dtype.is_floating_point
                    and plain_name(name) not in _LOOKED_UP and scheme.fits(*t.shape)):
                saved += prod(t.shape) * width - scheme.nbytes(*t.shape)
        looked_up = sum(prod(t.shape) for name, t in self.tensors.items()
                        if in_file and plain_name(name) == EMBEDDING)
        copied = self.copied_values if scheme is None else 0
        return (self.parameters - looked_up + copied) * width + fixed - saved


def drafts_of(model: OpenModel, paths: Sequence[Path]) -> list[DraftFiles]:
    """Return ``model``'s own draft models; those at ``paths`` replace any of the same kind.

    UsageError for a directory without a draft model or with one of another kind, and for two of one kind.
    """
    drafts: dict[DraftKind, DraftFiles] = {}
    for kind in stored_kinds():
        if not kind.in_target and (path := model.draft(kind.name)) is not None:
            draft = open_draft(path)
            weights.refuse_other_kind(path, kind, draft.kind)
            drafts[kind] = replace(draft, kind=kind)
    new: dict[DraftKind, DraftFiles] = {}
    for path in paths:
        draft = open_draft(path)
        if draft.kind in new:
            raise UsageError(f"{new[draft.kind].directory} and {path} are both draft models of the kind "
                             f"{draft.kind.name!r}: give one")
        new[draft.kind] = draft
    layers = [_own_layer(kind, home) for kind in stored_kinds()
              if kind.in_target and (home := model.draft(kind.name)) is not None]
    return [*{**drafts, **new}.values(), *(layer for layer in layers if layer)]


def _own_layer(kind: DraftKind, directory: Path) -> DraftFiles | None:
    """Return a draft layer in a target's checkpoint; None, with a warning, if it cannot be taken along."""
    layer_format, checkpoint = own_layer_format_of(kind), Checkpoint(directory)
    config = layer_format.config(directory)
    shapes = layer_format.tensors(config)
    bad = next((name for name, shape in shapes.items() if name not in checkpoint
                or checkpoint.stored([name])[name].shape != shape
                or not checkpoint.stored([name])[name].dtype.is_floating_point), None)
    if bad is not None:
        log.warning("%s: the model's %s is left out: tensor %s is missing, or not as config.json asks for",
                    directory, kind.title, bad)
        return None
    return DraftFiles(kind, directory, config, (), checkpoint.stored(shapes), embeddings=True,
                      ranks_by_target=kind.narrows,
                      kv_row=cache_values(layer_format.fields(config)), fingerprint=checkpoint.digest(shapes))


def open_draft(directory: Path) -> DraftFiles:
    """Open a draft model; UsageError if it is of no known kind, FlowspecError for damaged files."""
    raw = weights.read_config(directory, "a draft model", blocks=True)
    located.warn_of_unread(directory)
    checkpoint = Checkpoint(directory)
    stored = checkpoint.stored(checkpoint.names)
    kind = _kind(directory, raw, {plain_name(name): info for name, info in stored.items()})
    draft_format = format_of(kind)
    ignored_names = draft_format.unread()
    tensors = {name: info for name, info in stored.items() if plain_name(name) not in ignored_names}
    bare = {plain_name(name) for name in tensors}
    config = draft_format.config(directory)
    layer = draft_format.fields(config)
    drafted = layer.get("draft_vocab_size")
    copies = drafted and drafted < layer["vocab_size"] and LM_HEAD not in bare
    return DraftFiles(kind, directory, config, _files(directory), tensors,
                      embeddings=kind.looks_up_target or draft_format.needs_embedding(directory),
                      kv_row=cache_values(layer), fingerprint=checkpoint.digest(checkpoint.names),
                      copied_values=drafted * layer["hidden_size"] if copies else 0,
                      ranks_by_target=kind.narrows and not copies and LM_HEAD not in bare)


def check_fit(draft: DraftFiles, target: TargetFacts) -> None:
    """Raise FlowspecError, with both numbers, for a draft model of another target."""
    shapes = {plain_name(name): tuple(t.shape) for name, t in draft.tensors.items()}
    format_of(draft.kind).check_fit(draft.directory, draft.config, shapes, target)


def _kind(directory: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DraftKind:
    kind = recognise_kind(config, {name: tuple(info.shape) for name, info in tensors.items()})
    if kind is None:
        raise UsageError(f"{directory} holds no known draft model: neither an EAGLE head (fc.weight) nor "
                         "a causal language model (layers.0.input_layernorm.weight)")
    return kind


def _files(directory: Path) -> tuple[Path, ...]:
    files = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    location = located.locate(directory)
    source_files = {location.source, *location.files} if location else set()
    return tuple(path for path in files if path in source_files or not located.is_weight_file(path))

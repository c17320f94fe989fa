"""Draft models to shard with a target.  Reads headers only; loading a draft model detects damaged weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from flowspec_edge.drafting import checkpoint as weights
from flowspec_edge.drafting.block.formats import block_config, check_layers
from flowspec_edge.drafting.checkpoint import EMBEDDING, LM_HEAD, plain_name
from flowspec_edge.drafting.eagle.eagle2 import head_config, require_fit
from flowspec_edge.drafting.eagle.eagle3 import states_of
from flowspec_edge.drafting.eagle.eagle3_formats import head3_config, head3_layers
from flowspec_edge.drafting.eagle.mtp import mtp_config, mtp_tensors
from flowspec_edge.drafting.lm import require_padding
from flowspec_edge.drafting.spd.module import module_config
from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_formats import FORMATS, recognise_format
from flowspec_edge.model.modeldir import BLOCKS, DRAFT_PARTS, ModelDir, cache_values
from flowspec_edge.model.weights import located
from flowspec_edge.model.weights.checkpoint import Checkpoint
from flowspec_edge.stage.quant.base import Scheme
from flowspec_edge.util.weight_file import SAFETENSORS, TensorInfo

log = logging.getLogger(__name__)

_DEEP_EAGLE2 = "eagle2-deep"  # recognised by its directory alone: its files are those of any EAGLE-2 head
_LOOKED_UP = (EMBEDDING, "markov_head.markov_w1.weight", "candidate_selector.predecessor_codebook",
              "candidate_selector.successor_codebook")


@dataclass(frozen=True)
class DraftFiles:
    """A draft model's files, which are copied unchanged; of an MTP layer none, but its ``tensors``.

    kind        a key of ``DRAFT_PARTS``
    files       those in ``directory`` that a loader reads
    embeddings  whether it looks up the target's embeddings
    kv_row      elements of one row's keys and values in its cache
    copied_values  of the target's lm_head, if that is in 16 bits: its rows of the draft vocabulary
    """

    kind: str
    directory: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    embeddings: bool
    kv_row: int
    fingerprint: str
    copied_values: int = 0

    @property
    def parameters(self) -> int:
        return sum(prod(t.shape) for t in self.tensors.values() if t.dtype.is_floating_point)

    def weight_bytes(self, width: int, scheme: Scheme | None = None) -> int:
        """Bytes in memory, with ``width`` bytes per parameter, and a head's matrices quantised by ``scheme``;
        integer tensors keep their size. A head's own embeddings stay in a safetensors file."""
        fixed = sum(t.nbytes for t in self.tensors.values() if not t.dtype.is_floating_point)
        head = self.kind.startswith("eagle") or self.kind in (*BLOCKS, "mtp")
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


def drafts_of(model: ModelDir, given: Sequence[Path]) -> list[DraftFiles]:
    """``model``'s own draft models; those ``given`` replace any of the same kind.

    UsageError for a directory without a draft model, and for two of one kind.
    """
    found = {kind: open_draft(path) for kind in DRAFT_PARTS
             if kind != "mtp" and (path := model.draft(kind)) is not None}
    deep = found.get(_DEEP_EAGLE2)
    if deep and deep.kind == "eagle2":
        found[_DEEP_EAGLE2] = replace(deep, kind=_DEEP_EAGLE2)
    new: dict[str, DraftFiles] = {}
    for path in given:
        draft = open_draft(path)
        if draft.kind in new:
            raise UsageError(f"{new[draft.kind].directory} and {path} are both draft models of the kind "
                             f"{draft.kind!r}: give one")
        new[draft.kind] = draft
    own = model.draft("mtp")
    layer = _own_layer(own) if own is not None else None
    return [*{**found, **new}.values(), *([layer] if layer else [])]


def _own_layer(directory: Path) -> DraftFiles | None:
    """The MTP layer in a target's checkpoint; None, with a warning, if it cannot be taken along."""
    config, checkpoint = mtp_config(directory), Checkpoint(directory)
    shapes = mtp_tensors(config)
    bad = next((name for name, shape in shapes.items() if name not in checkpoint
                or checkpoint.stored([name])[name].shape != shape
                or not checkpoint.stored([name])[name].dtype.is_floating_point), None)
    if bad is not None:
        log.warning("the MTP layer in %s is left out: tensor %s is missing, or not as config.json asks for",
                    directory, bad)
        return None
    return DraftFiles("mtp", directory, (), checkpoint.stored(shapes), embeddings=True,
                      kv_row=cache_values(config.to_dict()), fingerprint=checkpoint.digest(shapes))


def open_draft(directory: Path) -> DraftFiles:
    """UsageError if there is no draft model of a known kind; FlowspecError for damaged files."""
    config = weights.read_config(directory, "a draft model", blocks=True)
    located.warn_of_unread(directory)
    checkpoint = Checkpoint(directory)
    stored = checkpoint.stored(checkpoint.names)
    kind = _kind(directory, config, {plain_name(name): info for name, info in stored.items()})
    layer: Any = (head3_config(directory) if kind == "eagle3" else
                  block_config(directory) if kind in BLOCKS else
                  head_config(directory) if kind == "eagle2" else None)
    # A head of EAGLE-1 or 2 ranks by the target's lm_head; converters store a copy.
    unread = {LM_HEAD} if kind == "eagle2" else set()
    tensors = {name: info for name, info in stored.items() if plain_name(name) not in unread}
    bare = {plain_name(name) for name in tensors}
    drafted = getattr(layer, "draft_vocab_size", None)
    copies = drafted and drafted < layer.vocab_size and LM_HEAD not in bare
    return DraftFiles(kind, directory, _files(directory), tensors,
                 embeddings=kind == "spd" or (kind != "lm" and EMBEDDING not in bare),
                 kv_row=cache_values(config if layer is None else layer.to_dict()),
                 fingerprint=checkpoint.digest(checkpoint.names),
                 copied_values=drafted * layer.hidden_size if copies else 0)


def check_fit(draft: DraftFiles, target: Path, width: int, vocabulary: int, layers: int) -> None:
    """FlowspecError, with both numbers, for a draft model of another target; by config.json and by tensors.

    target      the directory with the target's tokenizer
    width       of the target's hidden states
    vocabulary  tokens of the target's embeddings
    """
    if draft.kind == "mtp":
        return  # is the target's own
    directory, shapes = draft.directory, {plain_name(name): t.shape
                                          for name, t in draft.tensors.items()}
    if draft.kind == "lm":
        own = int(weights.read_config(directory, "a draft model")["vocab_size"])
        if own != vocabulary:
            require_padding(directory, target, own, vocabulary)
        return
    fc = shapes.get("fc.weight")
    if draft.kind == "eagle3":
        config: Any = head3_config(directory)
        head3_layers(directory, config, layers)
        widths = [config.target_hidden_size, *([fc[1] // states_of(config)] if fc else [])]
        widths += [] if EMBEDDING in shapes else [config.hidden_size]
    elif draft.kind in BLOCKS:
        block = config = block_config(directory)
        check_layers(directory, block, layers)
        widths = [block.hidden_size, *([fc[1] // len(block.captured)] if fc else [])]
    else:
        config = module_config(directory) if draft.kind == "spd" else head_config(directory)
        widths = [config.hidden_size, *([fc[0]] if fc else [])]
    vocabularies = [config.vocab_size, *([shapes[EMBEDDING][0]] if EMBEDDING in shapes else [])]
    for what, sizes, targets in (("width", widths, width), ("vocabulary", vocabularies, vocabulary)):
        for size in sizes:
            require_fit(directory, what, size, targets)


def _kind(directory: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> str:
    fc = tensors.get("fc.weight")
    if (named := FORMATS.get(recognise_format(config) or "")) in BLOCKS:
        return str(named)
    if "d2t" in tensors or any(name.startswith("midlayer.") or name.endswith("hidden_norm.weight")
                               for name in tensors):
        return "eagle3"
    if isinstance(config.get("target_layers"), int):
        return "spd"
    if fc is not None and len(fc.shape) == 2:
        # [H, 2H] joins an embedding and a state, [H, 3 target_H] three states.
        return "eagle2" if fc.shape[1] == 2 * fc.shape[0] else "eagle3"
    if "layers.0.input_layernorm.weight" in tensors:
        return "lm"
    raise UsageError(f"{directory} holds no known draft model: neither an EAGLE head (fc.weight) nor "
                     "a causal language model (layers.0.input_layernorm.weight)")


def _files(directory: Path) -> tuple[Path, ...]:
    files = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    found = located.locate(directory)
    read = {found.source, *found.files} if found else set()
    return tuple(path for path in files if path in read or not located.is_weight_file(path))

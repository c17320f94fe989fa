"""Draft models beside a target: which kind a directory holds, and what D0 must have for it.

Knows the published names of tensors and settings that tell the kinds apart; reads headers only.  Does not
load draft models: whether one is sound is found when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from flowspec_edge.drafting import weights
from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import DRAFT_PARTS, ModelDir
from flowspec_edge.stage.checkpoint import Checkpoint, Stored

_EMBEDDING = "embed_tokens.weight"
_SECOND = "eagle2-deep"  # by its place only: nothing in its files tells it from another EAGLE-2 head
_PREFIX = re.compile(r"^(module\.)?(model\.)?")  # of a training framework's wrapper, and of a whole model


@dataclass(frozen=True)
class Draft:
    """A draft model's files, as they are copied.

    kind        a key of ``DRAFT_PARTS``
    files       all in ``directory`` that a loader reads
    tensors     what its weights hold
    embeddings  whether it looks up the target's embeddings
    kv_row      keys and values of one row in its cache, in elements
    fingerprint of its weights
    """

    kind: str
    directory: Path
    files: tuple[Path, ...]
    tensors: dict[str, Stored]
    embeddings: bool
    kv_row: int
    fingerprint: str

    @property
    def parameters(self) -> int:
        return sum(prod(t.shape) for t in self.tensors.values() if t.dtype.is_floating_point)

    def weight_bytes(self, width: int) -> int:
        """In memory, with ``width`` bytes a parameter; what is not a parameter stays as it is stored."""
        fixed = sum(t.nbytes for t in self.tensors.values() if not t.dtype.is_floating_point)
        return self.parameters * width + fixed


def drafts_of(model: ModelDir, given: Sequence[Path]) -> list[Draft]:
    """The draft models in ``model``'s own directory, and those ``given``, which take their places.

    UsageError for a directory that holds no draft model, and for two of one kind.
    """
    found = {kind: open_draft(path) for kind in DRAFT_PARTS if (path := model.draft(kind)) is not None}
    deep = found.get(_SECOND)
    if deep and deep.kind == "eagle2":
        found[_SECOND] = replace(deep, kind=_SECOND)
    new: dict[str, Draft] = {}
    for path in given:
        draft = open_draft(path)
        if draft.kind in new:
            raise UsageError(f"{new[draft.kind].directory} and {path} are both draft models of the kind "
                             f"{draft.kind!r}: give one")
        new[draft.kind] = draft
    return list({**found, **new}.values())


def open_draft(directory: Path) -> Draft:
    """The draft model in ``directory``.

    UsageError if there is none, or none of a kind that is known; FlowspecError for damaged files.
    """
    config = weights.read_config(directory, "a draft model")
    checkpoint = Checkpoint(directory)
    tensors = checkpoint.stored(checkpoint.names)
    bare = {_PREFIX.sub("", name): stored for name, stored in tensors.items()}
    kind = _kind(directory, config, bare)
    return Draft(kind, directory, _files(directory), tensors,
                 embeddings=kind == "spd" or (kind in ("eagle2", "eagle3") and _EMBEDDING not in bare),
                 kv_row=_kv_row(config), fingerprint=checkpoint.digest(checkpoint.names))


def _kind(directory: Path, config: dict[str, Any], tensors: dict[str, Stored]) -> str:
    """From the tensors, named without prefixes."""
    fc = tensors.get("fc.weight")
    if "d2t" in tensors or any(name.startswith("midlayer.") for name in tensors):
        return "eagle3"
    if isinstance(config.get("target_layers"), int):
        return "spd"
    if fc is not None and len(fc.shape) == 2:
        # [H, 2H] joins an embedding and a state, [H, 3 target_H] three states.
        return "eagle2" if fc.shape[1] == 2 * fc.shape[0] else "eagle3"
    if "layers.0.input_layernorm.weight" in tensors:
        return "lm"
    raise UsageError(f"{directory} holds no draft model that is known: neither an EAGLE head (fc.weight) nor "
                     "a causal language model (layers.0.input_layernorm.weight)")


def _files(directory: Path) -> tuple[Path, ...]:
    """All visible files; where there are safetensors, the same weights in PyTorch's format stay behind."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    if any(path.suffix == ".safetensors" for path in files):
        files = [path for path in files if ".bin" not in path.suffixes]
    return tuple(files)


def _kv_row(config: dict[str, Any]) -> int:
    heads = int(config.get("num_attention_heads") or 0)
    keys = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or (int(config.get("hidden_size") or 0) // max(1, heads)))
    return 2 * keys * width * int(config.get("num_hidden_layers") or 1)

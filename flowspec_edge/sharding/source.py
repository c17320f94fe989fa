"""What is to be cut: a model's directory or its name on the Hugging Face hub, checked before work begins.

Knows where the target's config, tokenizer and weights lie, and whether the weights are all there.  Does
not know what will be written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.modeldir import ModelDir, resolve_model, shipped_models
from flowspec_edge.sharding import hub
from flowspec_edge.sharding.drafts import Draft, drafts_of
from flowspec_edge.stage import keys
from flowspec_edge.stage.checkpoint import Checkpoint, Stored, check_shape
from flowspec_edge.stage.quant_import import Importer, importer
from flowspec_edge.stage.shard import load_config, skeleton

# Everything beside the weights that D0 may want; the config is written anew.
_BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Weights(Protocol):
    """What the sharder reads: ``stage.checkpoint.Checkpoint``, or something that makes weights up."""

    directory: Path

    @property
    def names(self) -> list[str]: ...

    def __contains__(self, name: object) -> bool: ...

    def stored(self, names: list[str]) -> dict[str, Stored]: ...

    def pieces(self, name: str, rows: int = 0) -> Iterator[tuple[int, Tensor]]: ...

    def tensors(self, names: list[str]) -> dict[str, Tensor]: ...

    def digest(self, names: list[str]) -> str: ...


@dataclass(frozen=True)
class Linear:
    """A matrix of a decoder layer that may be quantised: its name without ``.weight``, and its shape."""

    prefix: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Source:
    """A model that can be cut.

    name       as the manifest gives it
    revision   the commit of a model from the hub
    config     transformers' configuration object
    raw        config.json as it was read
    weights    the target's tensors
    tensors    name -> shape and dtype of every tensor of the model that is stored in plain form
    linears    the decoder layers' matrices, by layer
    imported   what reads matrices that others have quantised; None for a plain checkpoint
    beside     files of the tokenizer and the like
    drafts     draft models that go along
    """

    name: str
    revision: str | None
    config: Any
    raw: bytes
    weights: Weights
    tensors: dict[str, Stored]
    linears: list[list[Linear]]
    imported: Importer | None
    beside: tuple[Path, ...]
    drafts: tuple[Draft, ...]

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def tied(self) -> bool:
        return keys.LM_HEAD not in self.tensors

    @property
    def dtype(self) -> torch.dtype:
        """Of the embeddings, which nobody quantises: the checkpoint's own."""
        return self.tensors[keys.EMBEDDING].dtype

    @property
    def config_sha256(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def plain_config(self) -> bytes:
        """config.json for the parts: without what it says of a quantisation that is no longer there."""
        if self.imported is None:
            return self.raw
        fields = json.loads(self.raw)
        fields.pop("quantization_config", None)
        return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def open_source(model: str, drafts: Sequence[Path] = ()) -> Source:
    """The model in the directory ``model``, or of that name in the package or on the hub.

    UsageError for one that is not there, that stages cannot run or that is cut already; FlowspecError
    that names a missing, misshapen or unexpected tensor.
    """
    revision = None
    if model in shipped_models() or Path(model).is_dir() or not hub.is_name(model):
        found = resolve_model(model)
    else:
        directory, revision = hub.download(model)
        found = resolve_model(directory)
    if found.sharded:
        raise UsageError(f"{found.path} is sharded already: give the checkpoint that it was made from")
    return describe(found, Checkpoint(found.target), drafts, model if revision else found.name, revision)


def describe(model: ModelDir, weights: Weights, drafts: Sequence[Path], name: str,
             revision: str | None = None) -> Source:
    """Check ``weights`` against ``model``'s configuration; errors as :func:`open_source`."""
    config = load_config(model.target, quantised=True)
    core = skeleton(config)
    reads = importer(config)
    linears = [[Linear(f"model.layers.{i}.{path}", *module.weight.shape)
                for path, module in layer.named_modules() if isinstance(module, nn.Linear)]
               for i, layer in enumerate(core.layers)]
    wanted, packed = keys.whole_model(core), set()
    if reads is not None:
        for linear in (linear for layer in linears for linear in layer):
            names = reads.names(linear.prefix, weights)
            packed |= set(names)
            wanted -= {f"{linear.prefix}.weight"} if names else set()
    tied = bool(config.tie_word_embeddings)
    gone = keys.missing(wanted, weights.names, tied)
    if gone:
        raise FlowspecError(f"{weights.directory} has no tensor {gone[0]}: the checkpoint is incomplete, or "
                            "not of this architecture")
    spare = set(weights.names) - wanted - packed
    keys.refuse_unexpected(weights.directory, spare - _zero_biases(weights, spare, packed), ())
    if tied:
        wanted -= {keys.LM_HEAD}
    tensors = weights.stored(sorted(wanted))
    _check(weights.directory, tensors, core)
    beside = tuple(path for file in _BESIDE if (path := model.target / file).is_file())
    return Source(name, revision, config, (model.target / "config.json").read_bytes(), weights, tensors,
                  linears, reads, beside, tuple(drafts_of(model, drafts)))


def _check(directory: Path, tensors: dict[str, Stored], core: Any) -> None:
    """Shapes as the configuration asks for, and elements that can be converted."""
    shapes = {f"model.{name}": value.shape for name, value in core.state_dict().items()}
    shapes[keys.LM_HEAD] = shapes[keys.EMBEDDING]
    for name, stored in tensors.items():
        check_shape(directory, name, stored.shape, shapes[name])
        if stored.dtype not in _FLOATS:
            raise FlowspecError(f"{directory}: tensor {name} is stored as {stored.dtype}, which cannot be "
                                "converted: take the checkpoint in 16 bits")


def _zero_biases(weights: Weights, spare: set[str], packed: set[str]) -> set[str]:
    """Biases of zero that tools write for quantised linears which have none."""
    quantised = {name.rpartition(".")[0] for name in packed}
    biases = {name for name in spare if name.endswith(".bias") and name.removesuffix(".bias") in quantised}
    return {name for name in biases if not any(bool(piece.any()) for _, piece in weights.pieces(name))}

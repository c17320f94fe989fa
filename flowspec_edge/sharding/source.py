"""The model to shard: a directory or a Hugging Face repository, checked before work begins."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowspec_edge.drafting.format import TargetFacts
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.catalogue import download, is_repository_name
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.families import text_config
from flowspec_edge.model.opened import OpenModel, is_here, resolve_model
from flowspec_edge.model.weights.checkpoint import check_shape, missing_tensor
from flowspec_edge.model.weights.gguf_file import GgufFile
from flowspec_edge.model.weights.located import display_path
from flowspec_edge.sharding.drafts import DraftFiles, check_fit, drafts_of
from flowspec_edge.stage.families.decoder import skeleton
from flowspec_edge.stage.quant.awq_gptq import Importer, importer
from flowspec_edge.stage.quant.gguf_blocks import GgufImporter, gguf_importer
from flowspec_edge.stage.weights import tensor_names
from flowspec_edge.util.bounded_read import read_bytes
from flowspec_edge.util.weight_file import TensorInfo

log = logging.getLogger(__name__)

# Files besides the weights that D0 may need; config.json is rewritten.
_EXTRA_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
           torch.float8_e5m2)  # float8 without scales: each value is exact in 16 bits


class WeightSource(Protocol):
    """The part of Checkpoint's interface that the sharder uses."""

    directory: Path

    @property
    def names(self) -> list[str]: ...

    @property
    def gguf(self) -> GgufFile | None: ...

    def __contains__(self, name: object) -> bool: ...

    def stored(self, names: list[str]) -> dict[str, TensorInfo]: ...

    def pieces(self, name: str, rows: int = 0) -> Iterator[tuple[int, Tensor]]: ...

    def tensors(self, names: list[str]) -> dict[str, Tensor]: ...

    def digest(self, names: list[str]) -> str: ...


@dataclass(frozen=True)
class Linear:
    """A decoder layer's matrix that may be quantised; ``prefix`` is its name without ``.weight``."""

    prefix: str
    rows: int
    columns: int


@dataclass(frozen=True)
class SourceModel:
    """A checkpoint or GGUF file whose tensors can be read.

    raw          config.json as it was read
    tensors      of all tensors stored in plain form, those of the MTP layer among them
    linears      the decoder layers' matrices, by layer
    imported     repacks matrices that are stored in 4 bits (AWQ, GPTQ, GGUF), and others of a GGUF file; None if none
                 is in 4 bits
    packed       prefixes of these matrices
    extra_files  tokenizer files and the like
    """

    name: str
    revision: str | None
    config: DecoderConfig
    raw: bytes
    weights: WeightSource
    tensors: dict[str, TensorInfo]
    linears: list[list[Linear]]
    imported: Importer | GgufImporter | None
    packed: frozenset[str]
    extra_files: tuple[Path, ...]
    drafts: tuple[DraftFiles, ...]

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def tied(self) -> bool:
        return tensor_names.LM_HEAD not in self.tensors

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embeddings, which no format quantises."""
        return self.tensors[tensor_names.EMBEDDING].dtype

    @property
    def config_sha256(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def plain_config(self) -> bytes:
        """config.json of the language model, without the section about AWQ, GPTQ or MXFP4."""
        raw = json.loads(self.raw)
        fields = text_config(raw)
        if fields.pop("quantization_config", None) is None and fields == raw:
            return self.raw
        return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def open_source(model: str, drafts: Sequence[Path] = ()) -> SourceModel:
    """Return a model by directory, by name in the package, or by repository on the hub.

    UsageError for a model that does not exist, that stages cannot run or that is already sharded;
    FlowspecError that names a missing, misshapen or unexpected tensor, or a draft model of another target.
    """
    revision = None
    if is_here(model) or not is_repository_name(model):
        open_model = resolve_model(model, quantised=True)
    else:
        directory, revision = download(model)
        open_model = resolve_model(directory, quantised=True)
    if open_model.sharded:
        raise UsageError(f"{open_model.path} is sharded already: give the checkpoint that it was made from")
    return describe(open_model, open_model.checkpoint(), drafts, model if revision else open_model.name, revision)


def describe(model: OpenModel, weights: WeightSource, drafts: Sequence[Path], name: str,
             revision: str | None = None) -> SourceModel:
    """Check ``weights`` against ``model``'s configuration; errors as for ``open_source``."""
    config = model.decoder
    core = skeleton(config)
    reads = importer(model.config) or gguf_importer(weights.gguf)
    linears = [[Linear(f"model.layers.{i}.{path}", *module.weight.shape)
                for path, module in layer.named_modules() if isinstance(module, nn.Linear)]
               for i, layer in enumerate(core.layers)]
    expected, packed, prefixes = tensor_names.whole_model(core), set[str](), set[str]()
    if reads is not None:
        for linear in (linear for layer in linears for linear in layer):
            if names := reads.names(linear.prefix, weights):
                packed |= set(names)
                prefixes.add(linear.prefix)
        expected -= {f"{prefix}.weight" for prefix in prefixes} if reads.only_int4 else set()
    tied = config.tie_word_embeddings
    missing = tensor_names.missing(expected, weights.names, tied)
    if missing:
        prefix = missing[0].removesuffix(".weight")
        if f"{prefix}.qweight" in weights:
            raise FlowspecError(f"{display_path(weights.directory)}: {prefix} is in 4 bits: take a checkpoint that has "
                                "all but the linears of decoder layers in 16 bits, routers included")
        raise missing_tensor(weights.directory, missing[0])
    spare = set(weights.names) - expected - packed
    tensor_names.check_no_unexpected(weights.directory, spare - _zero_biases(weights, spare, packed), ())
    if tied and _one_matrix(weights):
        expected -= {tensor_names.LM_HEAD}
    tensors = weights.stored(sorted(expected))
    _check(weights.directory, tensors, core)
    extra = tuple(path for file in _EXTRA_FILES if (path := model.target / file).is_file())
    vocabulary, width = tensors[tensor_names.EMBEDDING].shape
    draft_files = tuple(drafts_of(model, drafts))
    for draft in draft_files:
        check_fit(draft, TargetFacts(model.target, width, vocabulary, len(core.layers)))
        tensors |= draft.tensors if draft.kind.in_target else {}
    return SourceModel(name, revision, config, read_bytes(model.target / "config.json"), weights, tensors,
                       linears, reads if prefixes else None, frozenset(prefixes), extra, draft_files)


def _one_matrix(weights: WeightSource) -> bool:
    """Whether lm_head is the embeddings, which config.json ties.

    PyTorch's files hold both of a tied model.  A stored lm_head with other values counts, as in transformers.
    """
    if tensor_names.LM_HEAD not in weights:
        return True
    pieces = weights.pieces(tensor_names.LM_HEAD), weights.pieces(tensor_names.EMBEDDING)
    for (_, head_rows), (_, embedding_rows) in zip(*pieces, strict=True):
        if head_rows.shape != embedding_rows.shape or not torch.equal(head_rows, embedding_rows):
            log.warning("%s: config.json ties %s to %s, but both are stored, with different values: each is "
                        "used", weights.directory, tensor_names.LM_HEAD, tensor_names.EMBEDDING)
            return False
    return True


def _check(directory: Path, tensors: dict[str, TensorInfo], core: Any) -> None:
    shapes = {f"model.{name}": value.shape for name, value in core.state_dict().items()}
    shapes[tensor_names.LM_HEAD] = shapes[tensor_names.EMBEDDING]
    for name, stored in tensors.items():
        check_shape(directory, name, stored.shape, shapes[name])
        if stored.dtype not in _FLOATS:
            raise FlowspecError(f"{display_path(directory)}: tensor {name} is stored as {stored.dtype}, which cannot "
                                "be converted: take the checkpoint in 16 bits")


def _zero_biases(weights: WeightSource, spare: set[str], packed: set[str]) -> set[str]:
    """Biases of zero that some tools write for quantised linears without a bias."""
    quantised = {name.rpartition(".")[0] for name in packed}
    biases = {name for name in spare if name.endswith(".bias") and name.removesuffix(".bias") in quantised}
    return {name for name in biases if not any(bool(piece.any()) for _, piece in weights.pieces(name))}

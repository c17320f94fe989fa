"""The memory footprint of a model's parts in bytes, computed without loading the model.

Sizes follow from config.json, through transformers' classes on the meta device; weight files must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from flowspec_edge.boards.planning.planned_draft import NGRAMS, PlannedDraft, StoredDraft, choose
from flowspec_edge.drafting.format import head_format_of
from flowspec_edge.errors import UsageError
from flowspec_edge.model.catalogue import download_config, find_known, is_repository_name
from flowspec_edge.model.config import parse_config, position_limit
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, OWN_LAYERS, WantedDraft, head_kinds
from flowspec_edge.model.experts import correlated
from flowspec_edge.model.families import UNKNOWN, family_of
from flowspec_edge.model.manifest import CacheBits, HeadBits, reserved
from flowspec_edge.model.opened import OpenModel, missing_own_layer, model_path, refuse_two_targets, resolve_model
from flowspec_edge.model.weights.checkpoint import Checkpoint, check_shape
from flowspec_edge.model.weights.located import locate
from flowspec_edge.sharding.drafts import open_draft
from flowspec_edge.sharding.plan import IN_16_BITS
from flowspec_edge.stage.families import skeleton
from flowspec_edge.stage.layers.kinds import layer_kinds
from flowspec_edge.stage.layers.kv_cache import row_bytes
from flowspec_edge.stage.layers.recurrent import GatedDelta
from flowspec_edge.stage.quant.awq_gptq import importer
from flowspec_edge.stage.quant.base import DEFAULT_GROUP, Scheme
from flowspec_edge.stage.quant.gguf_blocks import GgufImporter, gguf_importer
from flowspec_edge.stage.quant.schemes import default_head_bits, draft_scheme, head_scheme, scheme
from flowspec_edge.strategies.tree_strategy import TreeParameters

PlanDtype = Literal["fp32", "bf16", "fp16", "int4"]
_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "int4": 2}  # bytes of a value outside the decoder's matrices


@dataclass(frozen=True)
class ModelBytes:
    """A model's parts in bytes, in the element type ``dtype``. Token embeddings stay in their file.

    max_positions    the model's limit on tokens of prompt and answer together
    layer            weights of one decoder layer (the largest)
    layer_values     its parameters, a number
    lm_head          the embeddings themselves if the model ties the two
    head_bits        of lm_head
    draft            the draft head's fc and layers, and if it has one (EAGLE-3) its own lm_head, or its copy
                     of the target's rows of a smaller draft vocabulary; its size is that of a usual one for
                     the target's shape unless ``planned`` is here
    draft_unread     of ``draft``: experts that no row of a level of the tree chooses, on average
    draft_lm_head    what a draft pass reads of the target's lm_head: 0 for a head with its own
    kv_row           keys and values of one row in one layer, on average; draft_kv_row: in the draft head
    window           rows that layers with a window see; ``windowed``: their share of all layers
    state            of recurrent layers, in one layer, on average: states, snapshots and entries of a
                     request, and snapshots of a text that it may go on with; ``state_read``: what a
                     pass reads of it
    from_weights     whether weight files were present and agreed
    planned          what D0 drafts with
    layer_launches   kernel launches of a decoder layer, without those of experts
    experts          of a sparse model's layer, of ``expert`` bytes each, of which a row chooses ``chosen``;
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
    chosen: int = 0
    state: int = 0
    state_read: int = 0
    draft_unread: int = 0

    @property
    def bytes_per_value(self) -> int:
        """Of a hidden state on the wire."""
        return _WIDTH[self.dtype]

    @property
    def draft_estimated(self) -> bool:
        """Whether the draft head is not here, so that its size is a usual one's."""
        return self.planned.origin in ("published", "untrained")

    @property
    def d0_weights(self) -> int:
        """lm_head and the draft head."""
        return self.lm_head + self.draft

    @property
    def values(self) -> int:
        """Parameters of the target: decoder layers, embeddings and lm_head."""
        return self.layers * self.layer_values + 2 * self.vocabulary * self.hidden_width

    def without_head(self) -> ModelBytes:
        """For drafts by n-grams: D0 holds lm_head alone."""
        return replace(self, draft=0, draft_unread=0, draft_lm_head=0, draft_kv_row=0, planned=NGRAMS)

    @property
    def target_weights(self) -> int:
        return self.layers * self.layer + self.norm

    def layer_read(self, rows: float, correlation: float = 0.0) -> float:
        """Bytes of a layer's weights that a pass of ``rows`` reads, whose experts have this correlation."""
        if not self.experts:
            return self.layer
        touched = correlated(self.experts, self.chosen, rows, correlation)
        return self.layer - self.expert * (self.experts - touched)

    def layer_cache(self, rows: int, requests: int, tentative: int) -> int:
        """Bytes in an average layer of a cache of ``rows`` rows, as ``manifest.reserved`` says, and of the
        requests' states."""
        held = reserved(self.window, rows, requests, tentative)
        by_row = round(self.kv_row * (self.windowed * held + (1 - self.windowed) * rows))
        return by_row + requests * self.state

    def segment_bytes(self, rows: int) -> int:
        """The hidden states of a segment, without its header."""
        return rows * self.hidden_width * self.bytes_per_value


def model_bytes(name_or_path: str, dtype: PlanDtype, lm_head: HeadBits | None = None,
                kv_cache: CacheBits = "16bit", draft: WantedDraft = "head", using: StoredDraft | None = None
                ) -> ModelBytes:
    """Of a model by name or directory, a checkpoint or its config.json, or OWNER/NAME on the hub, of which
    only config.json is fetched.

    "int4": 4 bits for the matrices of the decoder layers, 16 bits for all else, but for lm_head, which is
    in ``lm_head``, and a draft head's matrices (``draft_scheme``); None: the sharder's default for ``dtype``.
    ``kv_cache``: of the stages; the draft head's is in 16 bits.  ``draft``: see ``planned_draft.choose``; ``using``:
    this one instead, of any kind.
    UsageError if there is no model that stages can run, or no MTP layer where one is wanted; FlowspecError
    for damaged or incomplete weights.
    """
    name, target, here, config = _locate(name_or_path)
    known = find_known(name)
    if importer(config) is not None:
        raise UsageError(f"{name} is a quantised checkpoint: give the 16 bit one, and --dtype int4")
    core = _decoder(_Shape(config.to_json_string(), config))
    from_weights = target is not None and locate(target) is not None
    if target and from_weights:
        _check(target, config, core)
    published = [(head.kind or "", head.repository) for head in known[1].runnable] if known else []
    wanted = DRAFT_KINDS.get(draft)
    if (wanted and wanted.in_target and draft not in here
            and (from_weights or wanted not in family_of(config).draft_layers)):
        raise UsageError(missing_own_layer(wanted, OpenModel(target) if target else None, config.model_type))
    planned = PlannedDraft(using.kind, "here") if using else choose(draft, here, published)
    draft_dir = using.directory if using else here.get(planned.kind.name)
    files = open_draft(draft_dir) if draft_dir and not planned.kind.is_head else None
    head = None if planned.by_ngrams or files else (
        head_format_of(planned.kind).on_meta(draft_dir) if draft_dir else assumed_head(config, planned.kind))
    width, vocabulary = _WIDTH[dtype], int(config.vocab_size)
    repack = gguf_importer(Checkpoint(target).gguf) if target and from_weights and dtype == "int4" else None
    packed = scheme("int4", repack.group if repack else DEFAULT_GROUP) if dtype == "int4" else None
    bits = lm_head or default_head_bits(dtype)
    quantised, drafting = head_scheme(bits), draft_scheme(bits)
    matrix = _matrix((vocabulary, int(config.hidden_size)), width, quantised)
    held, rows_read, draft_row = 0, 0, 0
    if head:
        of_the_targets, rows_read = _ranking(head, matrix, width, quantised)
        held = head_bytes(head, width, drafting) + of_the_targets
        draft_row = _kv_row(head.config, width) * head_format_of(planned.kind).cached_layers(head)
    elif files:  # a model of its own, which is not packed
        held, draft_row = files.weight_bytes(width), files.kv_row * width
    kinds = layer_kinds(config, kv_cache)
    windows = [kind.window for kind in kinds if kind.window is not None]
    mixtures = [layer.mlp.experts for layer in core.layers if hasattr(layer.mlp, "experts")]
    sparse = mixtures[0] if mixtures else []
    recurrent = [kind for kind in kinds if isinstance(kind, GatedDelta)]
    own = [_own_schemes(repack, i, layer) for i, layer in enumerate(core.layers)]
    layers = [module_bytes(layer, width, packed, these) for layer, these in zip(core.layers, own, strict=True)]
    largest = layers.index(max(layers))
    return ModelBytes(
        name=name, dtype=dtype, layers=int(config.num_hidden_layers),
        hidden_width=int(config.hidden_size), vocabulary=vocabulary,
        max_positions=position_limit(config.to_dict()),
        layer=layers[largest],
        layer_values=max(_numel(layer.parameters()) for layer in core.layers),
        norm=_numel(core.norm.parameters()) * width, lm_head=matrix,
        draft=held,
        draft_unread=round(unread_experts(head, width, drafting)) if head else 0,
        draft_lm_head=rows_read, head_bits=bits,
        kv_row=-(-sum(kind.row_bytes(width) for kind in kinds) // len(kinds)),
        window=min(windows, default=None), windowed=len(windows) / len(kinds),
        draft_kv_row=draft_row,
        kv_cache=kv_cache,
        from_weights=from_weights, planned=planned,
        layer_launches=family_of(config).launches,
        experts=len(sparse),
        expert=module_bytes(sparse[0], width, packed, _below(own[largest], "mlp.experts.0.")) if sparse else 0,
        chosen=int(config.num_experts_per_tok) if sparse else 0,
        state=sum(kind.request_bytes(width) for kind in recurrent) // len(kinds),
        state_read=sum(kind.read_bytes() for kind in recurrent) // len(kinds),
    )


def target_config(name_or_path: str) -> Any:
    """transformers' configuration of the target, without a download of weights; errors as for
    :func:`model_bytes`."""
    return _locate(name_or_path)[3]


def _locate(name_or_path: str) -> tuple[str, Path | None, Mapping[str, Path], Any]:
    """(name, directory of the target or None, its draft models here by kind, the target's configuration)."""
    path = model_path(name_or_path)
    given = Path(name_or_path)
    if path is None and given.name == "config.json" and given.is_file():
        path = given.parent
    if path is None and (known := find_known(name_or_path)):
        name, entry = known
        return name, None, {}, parse_config(entry.config, f"the catalogue's {name}")
    if path is None and is_repository_name(name_or_path):
        return given.name, None, {}, OpenModel(download_config(name_or_path), quantised=True).parsed_config
    model = OpenModel(path, quantised=True) if path else resolve_model(name_or_path)  # an error that says what there is
    refuse_two_targets(model)
    if model.sharded:
        raise UsageError(f"{model.path} is sharded already: give the checkpoint that it was made from, or "
                         f"see the sizes of its parts with: flowspec models inspect {model.path}")
    here = {kind.name: path for kind in (*head_kinds(), *OWN_LAYERS) if (path := model.draft(kind.name))}
    return model.name, model.target, here, model.parsed_config


@dataclass(frozen=True)
class _Shape:
    """A configuration that equals every other with the same text."""

    text: str
    config: Any = field(compare=False)


@lru_cache(maxsize=1)  # a plan asks for one model over and over; with 512 experts a layer it takes seconds
def _decoder(of: _Shape) -> Any:
    """``skeleton``'s, to read only."""
    return skeleton(of.config)


def _check(target: Path, config: Any, core: Any) -> None:
    checkpoint = Checkpoint(target)
    wanted = {f"model.{name}": parameter.shape for name, parameter in core.named_parameters()}
    if not config.tie_word_embeddings:
        wanted["lm_head.weight"] = core.embed_tokens.weight.shape
    stored = checkpoint.stored(wanted)
    for name, shape in wanted.items():
        check_shape(target, name, stored[name].shape, shape)


def _ranking(head: nn.Module, matrix: int, width: int, how: Scheme | None) -> tuple[int, int]:
    """Bytes that a head without an lm_head of its own holds of the target's ``matrix``, and that a pass reads
    of it: see ``OutputHead.chosen``."""
    if getattr(head, "lm_head", None) is not None:
        return 0, 0
    config: Any = head.config
    drafted = int(getattr(config, "draft_vocab_size", None) or config.vocab_size)
    copied = drafted < config.vocab_size and how is None
    return (drafted * config.hidden_size * width, 0) if copied else (0, matrix)


def assumed_head(config: Any, kind: DraftKind) -> nn.Module:
    """A usual head of ``kind`` for a target of ``config``, on the meta device."""
    return head_format_of(kind).usual(config, kind)


def head_bytes(head: nn.Module, width: int, how: Scheme | None) -> int:
    """Bytes in memory of a head, whose embeddings stay in their file."""
    embeddings: Any = head.embed_tokens
    return module_bytes(head, width, how) - int(embeddings.weight.numel()) * width


def _own_schemes(repack: GgufImporter | None, index: int, layer: nn.Module) -> dict[str, Scheme | None]:
    """How a GGUF file's linears of a layer are stored."""
    if repack is None:
        return {}
    return {name: repack.scheme_of(f"model.layers.{index}.{name}") for name, part in layer.named_modules()
            if isinstance(part, nn.Linear)}


def _below(schemes: Mapping[str, Scheme | None], path: str) -> dict[str, Scheme | None]:
    return {name.removeprefix(path): how for name, how in schemes.items() if name.startswith(path)}


def module_bytes(module: nn.Module, width: int, how: Scheme | None,
                 own: Mapping[str, Scheme | None] = MappingProxyType({})) -> int:
    """Bytes in memory with its linears stored by ``how``, or by their ``own`` scheme; all else in ``width`` bytes a
    value."""
    linears = {name: m.weight.shape for name, m in module.named_modules()
               if isinstance(m, nn.Linear) and not name.endswith(IN_16_BITS)}
    kept = _numel(module.parameters()) - sum(map(prod, linears.values()))
    return kept * width + sum(_matrix(shape, width, own.get(name, how)) for name, shape in linears.items())


def unread_experts(head: nn.Module, width: int, how: Scheme | None) -> float:
    """Bytes of the experts that no row of a level of the default tree chooses, on average, if rows choose
    independently; 0 for a head without experts."""
    mixtures: list[Any] = [module for module in head.modules() if hasattr(module, "experts")]
    config: Any = head.config
    return sum((len(mixture.experts) - correlated(len(mixture.experts), config.num_experts_per_tok,
                                                  TreeParameters().width, 0.0))
               * module_bytes(mixture.experts[0], width, how) for mixture in mixtures)


def _matrix(shape: Sequence[int], width: int, how: Scheme | None) -> int:
    rows, columns = shape
    return how.nbytes(rows, columns) if how and how.fits(rows, columns) else rows * columns * width


def _numel(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _kv_row(config: Any, width: int) -> int:
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return row_bytes(int(heads), int(head_dim), width, "16bit")

"""Reads the shapes of a model's parts from its config.json, through modules on the meta device.

Weight files must agree.

``python -m flowspec_edge.boards.planning.read_parts`` writes those of the catalogue's models to models/parts.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import nn

from flowspec_edge.boards.planning.model_parts import (
    FILE,
    CacheBytes,
    ExpertsShape,
    HeadShape,
    Matrices,
    ModelParts,
    PartShape,
)
from flowspec_edge.boards.planning.planned_draft import PlannedDraft, StoredDraft, planned_for
from flowspec_edge.drafting.format import TargetFacts, head_format_of
from flowspec_edge.errors import UsageError
from flowspec_edge.model.catalogue import download_config, find_known_model, is_repository_name, known_models
from flowspec_edge.model.config import parse_config
from flowspec_edge.model.decoder_config import DecoderConfig, decoder_config
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import OWN_LAYERS, PlannedDraftName, head_kinds
from flowspec_edge.model.manifest import CacheBits, HeadBits
from flowspec_edge.model.opened import OpenModel, model_path, refuse_two_targets, resolve_model
from flowspec_edge.model.weights.checkpoint import Checkpoint, check_shape
from flowspec_edge.model.weights.located import locate
from flowspec_edge.sharding.drafts import check_fit, drafts_of, open_draft
from flowspec_edge.sharding.plan import IN_16_BITS
from flowspec_edge.stage.families.decoder import Decoder, skeleton
from flowspec_edge.stage.families.feed_forward import Mixture
from flowspec_edge.stage.layers.kinds import KeysValues, layer_kinds
from flowspec_edge.stage.layers.kv_cache import row_bytes
from flowspec_edge.stage.layers.recurrent import GatedDelta
from flowspec_edge.stage.quant.awq_gptq import importer
from flowspec_edge.stage.quant.base import Scheme
from flowspec_edge.stage.quant.gguf_blocks import GgufImporter, gguf_importer
from flowspec_edge.stage.quant.sizes import DEFAULT_GROUP
from flowspec_edge.util.resources import resource_dir

_WIDTHS = (2, 4)  # bytes of a value


def read_model(name_or_path: str, packed: bool, draft: PlannedDraftName, using: StoredDraft | None
               ) -> tuple[str, PlannedDraft, ModelParts]:
    """Return a model's name, what D0 drafts with, and shapes; arguments and errors as for ``model_size.model_bytes``.

    packed  whether the layers' matrices are planned in 4 bits: those of a GGUF file keep their blocks then
    """
    location = _locate(name_or_path)
    name, target, local_drafts, config = location.name, location.target, location.drafts, location.decoder
    if importer(location.fields) is not None:
        raise UsageError(f"{name} is a quantised checkpoint: give the 16 bit one, and --dtype int4")
    if location.model:
        facts = TargetFacts(location.model.target, config.hidden_size, config.vocab_size, config.num_hidden_layers)
        for stored in drafts_of(location.model, ()):
            if using is None or stored.kind != using.kind:  # as when it is sharded
                check_fit(stored, facts)
    core = _decoder(config)
    from_weights = target is not None and locate(target) is not None
    if target and from_weights:
        _check(target, config, core)
    planned = PlannedDraft(using.kind, "here") if using else planned_for(
        name_or_path, draft, local_drafts, config.model_type, OpenModel(target) if target else None, from_weights)
    directory = using.directory if using else local_drafts.get(planned.kind.name)
    drafts = {} if planned.by_ngrams else {planned.kind.name: _draft_shape(config, planned.kind, directory)}
    repack = gguf_importer(Checkpoint(target).gguf) if target and from_weights and packed else None
    return name, planned, _shape(config, core, drafts, repack, from_weights)


def target_decoder(name_or_path: str) -> DecoderConfig:
    """Return what a target's layers are, without a download of weights; errors as for :func:`read_model`."""
    return _locate(name_or_path).decoder


def target_config(name_or_path: str) -> Any:
    """Return the target's configuration as transformers reads it, without a download of weights.

    Errors as for :func:`read_model`.
    """
    return _locate(name_or_path).parsed()


@dataclass(frozen=True)
class _Located:
    """A model that was found by its name or directory.

    model    None if it is not on this machine; ``target``: its directory
    drafts   its draft models here, by kind
    fields   of config.json
    decoder  what they mean
    parsed   makes transformers' configuration
    """

    name: str
    model: OpenModel | None
    drafts: Mapping[str, Path]
    fields: Mapping[str, Any]
    decoder: DecoderConfig
    parsed: Callable[[], Any]

    @property
    def target(self) -> Path | None:
        return self.model.target if self.model else None


def _locate(name_or_path: str) -> _Located:
    path = model_path(name_or_path)
    local = Path(name_or_path)
    if path is None and local.name == "config.json" and local.is_file():
        path = local.parent
    if path is None and (catalogue_entry := find_known_model(name_or_path)):
        name, entry = catalogue_entry
        origin = f"the catalogue's {name}"
        return _Located(name, None, {}, entry.config, decoder_config(entry.config, origin),
                        partial(parse_config, entry.config, origin))
    if path is None and is_repository_name(name_or_path):
        remote = OpenModel(download_config(name_or_path), quantised=True)
        return _Located(local.name, None, {}, remote.config, remote.decoder, lambda: remote.parsed_config)
    model = OpenModel(path, quantised=True) if path else resolve_model(name_or_path)  # an error that says what there is
    refuse_two_targets(model)
    if model.sharded:
        raise UsageError(f"{model.path} is sharded already: give the checkpoint that it was made from, or "
                         f"see the sizes of its parts with: flowspec models inspect {model.path}")
    local_drafts = {kind.name: path for kind in (*head_kinds(), *OWN_LAYERS) if (path := model.draft(kind.name))}
    decoder = model.decoder  # first: it says what else a directory without a configuration is
    return _Located(model.name, model, local_drafts, model.config, decoder, lambda: model.parsed_config)


@lru_cache(maxsize=1)  # a plan asks for one model over and over; with 512 experts a layer it takes seconds
def _decoder(config: DecoderConfig) -> Decoder:
    """Return the decoder of ``skeleton``, to read only."""
    return skeleton(config)


def _check(target: Path, config: DecoderConfig, core: Decoder) -> None:
    checkpoint = Checkpoint(target)
    shapes = {f"model.{name}": parameter.shape for name, parameter in core.named_parameters()}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = core.embed_tokens.weight.shape
    stored = checkpoint.stored(shapes)
    for name, shape in shapes.items():
        check_shape(target, name, stored[name].shape, shape)


def _shape(config: DecoderConfig, core: Any, drafts: dict[str, HeadShape], repack: GgufImporter | None,
           from_weights: bool) -> ModelParts:
    group = repack.group if repack else DEFAULT_GROUP
    stored_bits = [_stored_bits(repack, i, layer) for i, layer in enumerate(core.layers)]
    layers = [part_shape(layer, bits) for layer, bits in zip(core.layers, stored_bits, strict=True)]
    sizes = [layer.nbytes(2, "int4" if repack else None, group) for layer in layers]
    largest = sizes.index(max(sizes))
    mixtures = [layer.experts for layer in core.layers if layer.experts is not None]
    return ModelParts(
        family=config.model_type, count=config.num_hidden_layers, layers=_distinct(layers),
        norm=_numel(core.norm.parameters()), hidden=config.hidden_size, vocabulary=config.vocab_size,
        max_positions=config.max_position_embeddings,
        experts=ExpertsShape(
            count=len(mixtures[0]), chosen=config.num_experts_per_tok,
            expert=part_shape(mixtures[0][0], _below(stored_bits[largest], "mlp.experts.0."))) if mixtures else None,
        drafts=drafts,
        caches={bits: {str(width): _cache_bytes(config, bits, width) for width in _WIDTHS}
                for bits in get_args(CacheBits)},
        group=group, from_weights=from_weights, queries=_queries(config))


def _distinct(layers: Iterable[PartShape]) -> list[PartShape]:
    shapes: list[PartShape] = []
    for layer in layers:
        if layer not in shapes:
            shapes.append(layer)
    return shapes


def _cache_bytes(config: DecoderConfig, kv_cache: CacheBits, width: int) -> CacheBytes:
    kinds = layer_kinds(config, kv_cache)
    windows = [kind.window for kind in kinds if kind.window is not None]
    recurrent = [kind for kind in kinds if isinstance(kind, GatedDelta)]
    return CacheBytes(
        kv_row=-(-sum(kind.row_bytes(width) for kind in kinds) // len(kinds)),
        window=min(windows, default=None), windowed=len(windows) / len(kinds),
        state=sum(kind.request_bytes(width) for kind in recurrent) // len(kinds),
        state_read=sum(kind.read_bytes() for kind in recurrent) // len(kinds))


def _queries(config: DecoderConfig) -> int:
    kinds = layer_kinds(config, "16bit")
    growing = [kind for kind in kinds if isinstance(kind, KeysValues) and kind.window is None]
    return sum(kind.kv_heads * kind.groups * kind.head_dim for kind in growing) // len(kinds)


def _draft_shape(target: DecoderConfig, kind: DraftKind, directory: Path | None) -> HeadShape:
    """Return the shape of the draft model in ``directory``.

    If that is None, return the shape of a usual head for ``target``.
    """
    if directory and not kind.is_head:  # a model of its own, which is not packed
        files = open_draft(directory)
        values = files.weight_bytes(2) - files.weight_bytes(1)
        return HeadShape(part=PartShape(kept=values, matrices=[]), own_lm_head=True, drafted=0, kv_row=files.kv_row)
    return head_shape(kind, head_format_of(kind).on_meta(directory) if directory else assumed_head(target, kind))


def assumed_head(target: DecoderConfig, kind: DraftKind) -> nn.Module:
    """Return a usual head of ``kind`` for ``target``, on the meta device."""
    return head_format_of(kind).usual(target, kind)


def head_shape(kind: DraftKind, head: nn.Module) -> HeadShape:
    config: Any = head.config
    embeddings: Any = head.embed_tokens
    part = part_shape(head)
    mixtures = [module for module in head.modules() if isinstance(module, Mixture)]
    looked_up = sum(_numel(module.parameters()) for module in head.modules() if isinstance(module, nn.Embedding))
    looked_up -= int(embeddings.weight.numel())
    candidates = int(config.num_candidates) if getattr(config, "candidate_rank", 0) else 0
    return HeadShape(
        part=PartShape(kept=part.kept - int(embeddings.weight.numel()), matrices=part.matrices),
        own_lm_head=getattr(head, "lm_head", None) is not None,
        drafted=int(getattr(config, "draft_vocab_size", None) or config.vocab_size),
        kv_row=(row_bytes(config.num_key_value_heads, config.head_dim, 1, "16bit")
                * head_format_of(kind).cached_layers(head)),
        looked_up=looked_up, candidates=candidates,
        rescored=Matrices(rows=config.draft_vocab_size, columns=config.hidden_size) if candidates else None,
        experts=[ExpertsShape(count=len(mixture.experts), chosen=config.num_experts_per_tok,
                              expert=part_shape(mixture.experts[0])) for mixture in mixtures])


def part_shape(module: nn.Module, stored_bits: Mapping[str, HeadBits] = MappingProxyType({})) -> PartShape:
    """Return the shape of a part; ``stored_bits`` says how a GGUF file stores each linear, by name."""
    linears = {name: m.weight.shape for name, m in module.named_modules()
               if isinstance(m, nn.Linear) and not name.endswith(IN_16_BITS)}
    unquantised = _numel(module.parameters()) - sum(map(prod, linears.values()))
    counts = Counter((*shape, stored_bits.get(name)) for name, shape in linears.items())
    return PartShape(kept=unquantised, matrices=[Matrices(rows=rows, columns=columns, count=count, stored=bits)
                                                 for (rows, columns, bits), count in counts.items()])


def _stored_bits(repack: GgufImporter | None, index: int, layer: nn.Module) -> dict[str, HeadBits]:
    """Return how a GGUF file's linears of a layer are stored."""
    if repack is None:
        return {}
    return {name: _bits(repack.scheme_of(f"model.layers.{index}.{name}")) for name, part in layer.named_modules()
            if isinstance(part, nn.Linear)}


def _bits(scheme: Scheme | None) -> HeadBits:
    return "16bit" if scheme is None else "int8" if scheme.kind == "int8" else "int4"


def _below(bits: Mapping[str, HeadBits], path: str) -> dict[str, HeadBits]:
    return {name.removeprefix(path): head_bits for name, head_bits in bits.items() if name.startswith(path)}


def _numel(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def read_shipped(name: str) -> ModelParts:
    """Return a model of the catalogue, with a draft model of every kind that a plan can choose for it."""
    fields, origin = known_models()[name].config, f"the catalogue's {name}"
    config = decoder_config(fields, origin)
    return _shape(config, skeleton(config), usual_heads(config), None, False)


def usual_heads(target: DecoderConfig) -> dict[str, HeadShape]:
    """Return a usual head of every kind that a target can have."""
    return {kind.name: _draft_shape(target, kind, None) for kind in (*head_kinds(), *target.family.draft_layers)}


def main() -> None:
    lines = [f'"{name}":{read_shipped(name).model_dump_json(exclude_defaults=True)}' for name in known_models()]
    (resource_dir("models") / FILE).write_text('{"models":{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

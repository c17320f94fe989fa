"""Block heads as they are published: one configuration and one set of names for all of them.

- z-lab (DFlash and DFlash2, MIT): a Qwen3's config.json with ``block_size``, ``num_target_layers`` and
  ``dflash_config``; the root's own slot ranks nothing; embeddings and lm_head are the target's.  Layers with
  a window are causal unless ``is_causal`` says otherwise, for all layers; vLLM reads ``causal`` of
  ``dflash_config``, too.  JetSpec (MIT) adds ``causal_head``.  SpecForge (MIT) puts a Markov head's settings
  into ``dflash_config``, too.
- deepseek-ai/DeepSpec (DSpark and, with ``markov_rank`` 0, DFlash; MIT): ``target_layer_ids`` and the rest
  at the top, own copies of embeddings and lm_head; every slot ranks the tokens after it.
- vllm-project/speculators (all three; Apache-2.0): ``transformer_layer_config``, perhaps an lm_head of its
  own over a draft vocabulary; layers with a window are causal unless it is said otherwise, in DFlash2 if it
  is said, and it is the same text for all slots.

A confidence head is read past: the draft's scores are learned to be probabilities anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowspec_edge.drafting import checkpoint
from flowspec_edge.drafting.block.drafter import BlockDrafter
from flowspec_edge.drafting.block.head import BlockConfig, BlockHead
from flowspec_edge.drafting.checkpoint import EMBEDDING
from flowspec_edge.drafting.eagle.eagle2 import check_target_ids
from flowspec_edge.drafting.eagle.head_config import published
from flowspec_edge.drafting.format import HeadFormat, Loaded, Surroundings, require_fit
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.config import check_config
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.draft_kind import DraftKind, Shapes
from flowspec_edge.model.draft_kinds import recognise_format
from flowspec_edge.model.families import QWEN3
from flowspec_edge.model.weights.checkpoint import StoredTensor
from flowspec_edge.util.weight_file import Embedding, as_embedding

_TITLE = "a block drafter"
_FORMATS = ("DFlash", "DFlash2", "DSpark", "JetSpec")
# Settings of DFlash2, in speculators with these values by default; and what z-lab's heads for some targets
# multiply or cap, by the value that changes nothing.
_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_SCALES = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": 0}
_MOST_SLOTS = 64
_NOT_READ = ("confidence_head.", "t2d")


def load_block_head(directory: Path, embedding: Tensor | Embedding | None, dtype: torch.dtype,
                    layers: int, in_file: bool = False,
                    quantise: Callable[[nn.Module], None] = lambda module: None) -> BlockHead:
    """Load a head as ``eagle2.load_head`` does.

    ``layers``: the target's; FlowspecError if the head captures one beyond them.
    """
    config = block_config(directory)
    check_layers(directory, config, layers)
    files = checkpoint.HeadFiles(directory)
    file_embedding = files.own_embedding(config, dtype) if in_file else None
    stored = _rename_tensors(checkpoint.plain_names(files.read(_TITLE, file_embedding is None), directory))
    config = replace(config, own_lm_head="lm_head.weight" in stored)
    if config.draft_vocab_size != config.vocab_size and not config.own_lm_head:
        raise FlowspecError(f"{directory}: tensor lm_head.weight is missing from the block drafter, which "
                            f"drafts {config.draft_vocab_size} of {config.vocab_size} tokens")
    if config.draft_vocab_size == config.vocab_size:
        stored.pop("d2t", None)  # the identity
    shared: Embedding | None = None
    if embedding is not None:
        shared = as_embedding(embedding)
        require_fit(directory, "width", config.hidden_size, shared.embedding_dim)
        require_fit(directory, "vocabulary", config.vocab_size, shared.num_embeddings)
        shared = None if EMBEDDING in stored else shared
    head = checkpoint.build(BlockHead, config, stored, directory, _TITLE, dtype, file_embedding or shared, quantise)
    if config.draft_vocab_size != config.vocab_size:
        check_target_ids(directory, head.target_ids(), config.vocab_size)
    return head


def block_config(directory: Path) -> BlockConfig:
    """Read config.json; UsageError or FlowspecError if it is missing or unusable; ``own_lm_head`` is set later."""
    path = directory / "config.json"
    raw = checkpoint.read_config(directory, _TITLE, blocks=True)
    if (name := recognise_format(raw)) not in _FORMATS:
        raise FlowspecError(f"{path}: this is no {' or '.join(_FORMATS)}, but {name or 'no draft head'}")
    inner = raw.get("transformer_layer_config")
    if isinstance(inner, dict):
        fields, settings = inner, _speculators(raw, name)
        check_config(inner, path)
    elif "target_layer_ids" in raw:
        fields, settings = raw, {**_outputs(raw, path), "from_root": True}
    else:
        block = raw.get("dflash_config")
        block = block if isinstance(block, dict) else {}
        is_causal = raw.get("is_causal")
        is_causal = block.get("causal") if is_causal is None else is_causal
        fields, settings = raw, {**_outputs({**raw, **block}, path),
                                 "from_root": bool(block.get("shift_label")),
                                 "all_causal": bool(is_causal or block.get("causal_head")),
                                 "window_causal": is_causal is None}
    if (family := fields.get("model_type", QWEN3.name)) != QWEN3.name:
        raise FlowspecError(f"{path}: block drafters with layers of {family!r} are not supported, only of "
                            f"{QWEN3.name!r}")
    layer = checkpoint.layer_config(fields, path, QWEN3)
    windows = tuple(layer.sliding_window if kind == "sliding_attention" else None for kind in layer.layer_types)
    causal = tuple(settings.get("all_causal", False) or (settings.get("window_causal", False) and window is not None)
                   for window in windows)
    block_size, mask_token = (_number(settings.get(key), key, path) for key in ("block_size", "mask_token_id"))
    rank = _number(settings.get("markov_rank") or 0, "markov_rank", path)
    more: dict[str, Any] = {key: _number(settings.get(key), key, path) if name == "DFlash2" else 0 for key in _DFLASH2}
    config = BlockConfig(
        **vars(layer), windows=windows, causal=causal, window_from_root=isinstance(inner, dict),
        captured=settings["captured"], from_root=settings["from_root"], block_size=block_size,
        mask_token_id=mask_token, markov_rank=rank, markov_gated=_gated(settings, path) if rank else False,
        draft_vocab_size=settings.get("draft_vocab_size") or layer.vocab_size, **more)
    for key, neutral in _SCALES.items():
        if (value := settings.get(key)) not in (None, neutral):
            raise FlowspecError(f"{path}: a head with {key} {value!r} is not supported, only with {neutral}")
    _check(config, path)
    return config


def check_layers(directory: Path, config: BlockConfig, layers: int) -> None:
    """Raise FlowspecError for a state of a layer that the target lacks."""
    if min(config.captured) < 0 or max(config.captured) > layers:
        raise FlowspecError(f"{directory / 'config.json'}: the head's states after "
                            f"{', '.join(map(str, config.captured))} layers reach past the target, which has "
                            f"{layers} layers; a head works with the target that it was trained for only")


def save_block_head(head: BlockHead, directory: Path, dtype: torch.dtype) -> None:
    """Write a head in the form of z-lab and SpecForge, without embeddings and lm_head, which are the target's."""
    config = head.config
    block: dict[str, Any] = {"mask_token_id": config.mask_token_id, "shift_label": config.from_root,
                             "target_layer_ids": [depth - 1 for depth in config.captured]}
    if config.markov_rank:
        block |= {"projector_type": "dspark", "markov_rank": config.markov_rank,
                  "markov_head_type": "gated" if config.markov_gated else "vanilla"}
    fields = {**published(config), "model_type": QWEN3.name, "layer_types": list(config.layer_types),
              "architectures": ["DSparkDraftModel" if config.markov_rank else "DFlashDraftModel"],
              "block_size": config.block_size, "dflash_config": block,
              "use_sliding_window": config.sliding_window is not None,
              **({} if config.sliding_window is None else {"sliding_window": config.sliding_window}),
              **({"is_causal": config.causal[0]} if len(set(config.causal)) == 1 else {}),
              "torch_dtype": str(dtype).removeprefix("torch.")}
    stored = {name: weight for name, weight in head.state_dict().items() if name != EMBEDDING}
    checkpoint.write(directory, fields, stored, dtype)


def _speculators(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Its layer ids count inputs of layers, as in its EAGLE-3 heads."""
    ids: Any = raw.get("aux_hidden_state_layer_ids")
    markov = name == "DSpark"
    settings = {key: raw.get(key) for key in ("block_size", "mask_token_id", "draft_vocab_size")}
    if markov:
        settings |= {"markov_rank": raw.get("markov_rank", 256),
                     "markov_head_type": raw.get("markov_head_type", "vanilla")}
    return {**settings, **{key: raw.get(key, value) for key, value in _DFLASH2.items()},
            "captured": tuple(ids) if _are_numbers(ids) else (),
            "from_root": bool(raw.get("sample_from_anchor", markov)),
            "window_causal": not raw.get("sliding_window_non_causal", name == "DFlash2")}


def _outputs(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """Translate layer ids that count outputs of layers into ``captured``; -1 is the embeddings."""
    ids = settings.get("target_layer_ids")
    if ids is None:
        count = [_number(settings.get(key), key, path) for key in ("num_target_layers", "num_hidden_layers")]
        return {**settings, "captured": default_layers(*count)}
    return {**settings, "captured": tuple(layer + 1 for layer in ids) if _are_numbers(ids) else ()}


def default_layers(layers: int, states: int) -> tuple[int, ...]:
    """Return the layers of the target whose outputs z-lab's heads read by default.

    These are spread evenly from layer 1 to layer ``layers`` - 3; a single one is the middle layer.  The returned
    numbers are one higher, because they count the embeddings as 0.
    """
    if states == 1:
        return (layers // 2 + 1,)
    return tuple(2 + round(i * (layers - 4) / (states - 1)) for i in range(states))


def _are_numbers(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and all(type(layer) is int for layer in ids)


def _number(value: Any, key: str, path: Path) -> int:
    if type(value) is not int or value < 0:
        raise FlowspecError(f"{path}: {key} must be a whole number, not {value!r}")
    return value


def _gated(settings: dict[str, Any], path: Path) -> bool:
    kind = settings.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated"):
        raise FlowspecError(f"{path}: a Markov head of the type {kind!r} is not supported, only 'vanilla' "
                            "and 'gated'")
    return bool(kind == "gated")


def _check(config: BlockConfig, path: Path) -> None:
    if not config.captured:
        raise FlowspecError(f"{path}: the list of the target's layers that the head reads is missing")
    least = 1 if config.from_root else 2
    if not least <= config.block_size <= _MOST_SLOTS:
        raise FlowspecError(f"{path}: block_size must be {least} to {_MOST_SLOTS}, not {config.block_size}")
    if config.selector_rank or config.conv_kernel_size:
        _check_dflash2(config, path)
    for key, value in (("mask_token_id", config.mask_token_id),
                       ("draft_vocab_size", config.draft_vocab_size - 1)):
        if not 0 <= value < config.vocab_size:
            raise FlowspecError(f"{path}: {key} does not fit into the vocabulary of {config.vocab_size}")


def _check_dflash2(config: BlockConfig, path: Path) -> None:
    for key, most in (("conv_kernel_size", config.block_size), ("conv_group_size", config.hidden_size),
                      ("selector_rank", config.vocab_size), ("selector_top_k", config.vocab_size)):
        if not 1 <= getattr(config, key) <= most:
            raise FlowspecError(f"{path}: {key} must be 1 to {most}, not {getattr(config, key)}")
    if config.hidden_size % config.conv_group_size:
        raise FlowspecError(f"{path}: conv_group_size {config.conv_group_size} does not divide hidden_size "
                            f"{config.hidden_size}")
    if config.draft_vocab_size != config.vocab_size:
        raise FlowspecError(f"{path}: a DFlash2 head over {config.draft_vocab_size} of {config.vocab_size} "
                            "tokens is not supported, only over all of them")


def _rename_tensors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    renamed_tensors = {name.removeprefix("logit_head.") + ".weight" * name.endswith("_codebook"): tensor
                       for name, tensor in stored.items()}
    return {name: tensor for name, tensor in renamed_tensors.items() if not name.startswith(_NOT_READ)}


class BlockFormat(HeadFormat):
    """Reads block drafters of all kinds."""

    def load(self, directory: Path, beside: Surroundings) -> Loaded:
        head = beside.placed(load_block_head(directory, beside.embedding, beside.dtype, beside.layers, True,
                                             beside.quantise))
        require_fit(directory, "width", head.config.hidden_size, beside.lm_head.hidden_size)
        return Loaded(partial(BlockDrafter, head, beside.lm_head), head.config.vocab_size)

    def config(self, directory: Path) -> Any:
        return block_config(directory)

    def widths(self, directory: Path, config: Any, shapes: Shapes, layers: int) -> list[int]:
        fc = shapes.get("fc.weight")
        check_layers(directory, config, layers)
        return [config.hidden_size, *([fc[1] // len(config.captured)] if fc else [])]

    def on_meta(self, directory: Path) -> nn.Module:
        config = block_config(directory)
        has_own_lm_head = config.draft_vocab_size != config.vocab_size
        return checkpoint.on_meta(BlockHead, replace(config, own_lm_head=has_own_lm_head))

    def usual(self, target: DecoderConfig, kind: DraftKind) -> nn.Module:
        layer = checkpoint.layer_config({
            "vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "num_hidden_layers": _USUAL_LAYERS,
            "intermediate_size": target.intermediate_size or 4 * target.hidden_size,
            "num_attention_heads": target.num_attention_heads, "num_key_value_heads": target.num_key_value_heads,
            "head_dim": target.head_dim}, target.origin, QWEN3)
        return checkpoint.on_meta(BlockHead, BlockConfig(
            **vars(layer), captured=(1,) * _USUAL_STATES, block_size=_USUAL_BLOCK, mask_token_id=0,
            causal=(False,) * _USUAL_LAYERS, windows=(None,) * _USUAL_LAYERS,
            markov_rank=_USUAL_RANK if "DSpark" in kind.formats else 0, draft_vocab_size=target.vocab_size))

    def cached_layers(self, head: nn.Module) -> int:
        return len(cast(BlockHead, head).layers)


_USUAL_LAYERS, _USUAL_STATES, _USUAL_BLOCK = 5, 5, 16
_USUAL_RANK = 256  # of DSpark's Markov head
FORMAT = BlockFormat()

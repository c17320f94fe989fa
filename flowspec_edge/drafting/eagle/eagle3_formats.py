"""EAGLE-3 heads as they are published: one configuration and one set of names for all of them.

- EAGLE's authors, AngelSlim, SpecForge: a Llama's config.json, tensors ``midlayer.*``;
  ``eagle_aux_hidden_state_layer_ids`` may name the states.  EAGLE-3.1 adds ``fc_norm`` and ``norm_output``.
- vllm-project/speculators: ``transformer_layer_config``, which may leave its family's defaults out, with
  ``norm_before_residual`` and other switches beside it; ``layers.0.*``; a layer of Qwen3 norms queries and
  keys.
- EAGLE-4 (``LlamaForCausalLMEagle4``, as NVIDIA's NeMo Automodel documents its export): EAGLE-3.1's layer with a
  ``sliding_window``, ``layers.0.*``, the whole vocabulary, and the factor of a candidate head.
- deepseek-ai/DeepSpec: a Qwen3's config.json with ``target_layer_ids`` (five); ``layers.0.*``, q/k norms, the
  whole vocabulary.

Any of them may bring its own embeddings, and take another number of states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowspec_edge.drafting import checkpoint
from flowspec_edge.drafting.checkpoint import EMBEDDING
from flowspec_edge.drafting.eagle.eagle2 import check_target_ids, usual_layer, write_head
from flowspec_edge.drafting.eagle.eagle3 import CAPTURED, Eagle3Config, Eagle3Drafter, Eagle3Head, captured_layers
from flowspec_edge.drafting.eagle.head_config import llama_layer
from flowspec_edge.drafting.format import HeadFormat, Loaded, Surroundings, require_fit, require_vocabulary
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.candidates import COUNT, LEAST_COUNT
from flowspec_edge.model.config import check_config
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.draft_kind import DraftKind, Shapes
from flowspec_edge.model.families import LLAMA, QWEN3, with_defaults
from flowspec_edge.model.weights.checkpoint import StoredTensor
from flowspec_edge.util.weight_file import Embedding, as_embedding

_TITLE = "an EAGLE-3 head"
_LAYER_IDS, _STATES = "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_FACTOR, _FACTOR_DOWN = "efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"  # [V, r] and [r, H]
_LAYERS = {family.name: family for family in (LLAMA, QWEN3)}


def load_head3(directory: Path, embedding: Tensor | Embedding | None, dtype: torch.dtype,
               in_file: bool = False, quantise: Callable[[nn.Module], None] = lambda module: None
               ) -> Eagle3Head:
    """Load a head as ``load_head`` does; also FlowspecError, with both numbers, if the head does not fit the target."""
    files = checkpoint.HeadFiles(directory)
    config = head3_config(files)
    file_embedding = files.own_embedding(config, dtype) if in_file else None
    output_is_embedding = not config.own_lm_head and config.tie_word_embeddings
    weights = files.read(_TITLE, file_embedding is None or output_is_embedding)
    stored = _rename_tensors(checkpoint.plain_names(weights, directory))
    config = _complete_vocabulary(directory, stored, config)
    if output_is_embedding and EMBEDDING in stored:
        stored[checkpoint.LM_HEAD] = _rows(stored[EMBEDDING], stored.get("d2t"))
        config = replace(config, own_lm_head=True)
        if file_embedding is not None:
            del stored[EMBEDDING]
    shared: Embedding | None = None
    if embedding is not None:
        shared = as_embedding(embedding)
        require_fit(directory, "vocabulary", config.vocab_size, shared.num_embeddings)
        width = shared.embedding_dim
        if config.target_hidden_size != width:
            raise FlowspecError(
                f"{directory}: the head takes states of width {config.target_hidden_size}, the target's have "
                f"{width}; a head works with the target that it was trained for only"
            )
        if file_embedding is not None or EMBEDDING in stored:
            shared = None
        elif width != config.hidden_size:
            raise FlowspecError(f"{directory}: the head's width is {config.hidden_size}, the target's "
                                f"{width}, and it brings no {EMBEDDING} of its own")
    if not config.own_lm_head and config.hidden_size != config.target_hidden_size:
        raise FlowspecError(f"{directory}: the head has no {checkpoint.LM_HEAD}, and its width is "
                            f"{config.hidden_size}, so it cannot rank by the target's, of width "
                            f"{config.target_hidden_size}")
    _check_fc(directory, stored, config)
    head = checkpoint.build(Eagle3Head, config, stored, directory, _TITLE, dtype, file_embedding or shared, quantise)
    _check_draft_vocabulary(directory, head)
    return head


def save_head3(head: Eagle3Head, directory: Path, dtype: torch.dtype) -> None:
    """Write a head as EAGLE's authors publish it, without the embedding, which is the target's."""
    config = head.config
    write_head(head, directory, dtype, False, architectures=["LlamaForCausalLMEagle3"],
               draft_vocab_size=config.draft_vocab_size, target_hidden_size=config.target_hidden_size,
               **({"target_layer_ids": [depth - 1 for depth in config.captured]} if config.captured else {}))


def head3_config(files: checkpoint.HeadFiles) -> Eagle3Config:
    """Return the head's layer, with all that ``Eagle3Head`` reads.

    Where its weights are, they decide what config.json may get wrong: whether there is an lm_head, norms of
    queries and keys, and the size of the draft vocabulary.

    UsageError or FlowspecError if config.json is missing or unusable.
    """
    directory = files.directory
    path = directory / "config.json"
    raw, shapes = checkpoint.read_config(directory, _TITLE), files.shapes
    inner = raw.get("transformer_layer_config")
    if isinstance(inner, dict):
        fields = _speculators_fields(inner, raw, path)
    else:
        fields = dict(raw)
        _check_deepspec(fields, path)
    qk_norm = bool(fields.pop("qk_norm", "target_layer_ids" in fields))
    window = _window(fields, shapes)
    layer = llama_layer(fields, path)
    if layer.num_hidden_layers != 1:
        raise FlowspecError(f"{path}: an EAGLE-3 head has one layer, not {layer.num_hidden_layers}")
    if window is not None:  # the drafter's window is the head's training length
        layer = replace(layer, max_position_embeddings=min(window, layer.max_position_embeddings))
    captured = _named_layers(raw, path)
    settings: dict[str, Any] = {"captured": captured, **{switch: bool(fields.get(switch)) for switch in _SWITCHES},
           _STATES: len(captured) if captured else fields.get(_STATES) or CAPTURED,
           "target_hidden_size": fields.get("target_hidden_size") or layer.hidden_size,
           "draft_vocab_size": fields.get("draft_vocab_size") or layer.vocab_size}
    if shapes:
        settings |= _settings_of_files(shapes, settings["draft_vocab_size"], layer.vocab_size)
        qk_norm, biased = _layer_of_files(shapes)
        layer = replace(layer, attention_bias=biased)
    settings |= _candidates(shapes, fields, settings, path)
    config = Eagle3Config(**vars(replace(layer, model_type=(QWEN3 if qk_norm else LLAMA).name)), **settings)
    if config.norm_before_fc and config.fc_norm:
        raise FlowspecError(f"{path}: norm_before_fc and fc_norm exclude each other")
    if config.draft_vocab_size > config.vocab_size:
        raise FlowspecError(f"{path}: draft_vocab_size {config.draft_vocab_size} is more than vocab_size "
                            f"{config.vocab_size}")
    return config


def _speculators_fields(inner: dict[str, Any], raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Complete ``inner`` with the defaults of its own family, and with the fields beside it."""
    family = inner.get("model_type", QWEN3.name)
    if family not in _LAYERS:
        raise FlowspecError(f"{path}: EAGLE-3 heads with a layer of {family!r} are not supported, only of "
                            f"{' and '.join(_LAYERS)}")
    check_config(inner, path)
    fields = with_defaults({**inner, "model_type": family})
    beside = ("draft_vocab_size", "target_hidden_size", *_SWITCHES)
    return {**fields, **{key: raw[key] for key in beside if key in raw}, "qk_norm": family == QWEN3.name}


def _check_deepspec(fields: dict[str, Any], path: Path) -> None:
    names = fields.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if str(name).endswith("Eagle3Model") and name != "Qwen3Eagle3Model":
            raise FlowspecError(f"{path}: EAGLE-3 heads of DeepSpec's {name} are not supported, only of "
                                "Qwen3Eagle3Model")


def _window(fields: dict[str, Any], shapes: dict[str, torch.Size]) -> int | None:
    """Return an EAGLE-4 head's layer slides if it has a window; others say which of their target's layers do."""
    kinds = fields.get("layer_types") or []
    slides = kinds[0] == "sliding_attention" if kinds else _FACTOR in shapes
    return fields.get("sliding_window") if slides else None


def _candidates(shapes: dict[str, torch.Size], fields: dict[str, Any], settings: dict[str, Any], path: Path
                ) -> dict[str, Any]:
    """Return the factor's rank is that of the tensors; FlowspecError for a head with a part of one."""
    factors = [name for name in (_FACTOR, _FACTOR_DOWN) if name in shapes]
    if not factors:
        return {}
    nested = fields.get("candidate_head")
    count = (nested if isinstance(nested, dict) else {}).get("num_candidates", fields.get("num_candidates"))
    count = COUNT if count is None else count
    if type(count) is not int or count < LEAST_COUNT:
        raise FlowspecError(f"{path}: num_candidates must be a number of tokens, {LEAST_COUNT} at least, not "
                            f"{count!r}")
    if not settings["own_lm_head"]:
        raise FlowspecError(f"{path.parent}: tensor {checkpoint.LM_HEAD} is missing, by which a candidate head scores")
    return {"candidate_rank": shapes[factors[0]][-1 if factors[0] == _FACTOR else 0], "num_candidates": count}


def _named_layers(raw: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    """Depths of the states that config.json names, in fc's order.

    DeepSpec counts layer *outputs*, speculators layer *inputs*; elsewhere a list that begins with 1 counts
    outputs, any other inputs (as in SGLang).
    """
    name = "target_layer_ids" if "target_layer_ids" in raw else _LAYER_IDS
    nested = raw.get("eagle_config")
    value = raw.get(name) or (nested.get(name) if isinstance(nested, dict) else None)
    if not value:
        return None
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise FlowspecError(f"{path}: {name} must be a list of layers, not {value!r}")
    outputs = name != _LAYER_IDS or ("transformer_layer_config" not in raw and value[0] == 1)
    return tuple(layer + outputs for layer in value)


def head3_layers(directory: Path, config: Any, layers: int) -> tuple[int, ...]:
    """Return after how many of a target's ``layers`` the head's states are captured, in fc's order.

    FlowspecError for a layer that the target lacks, or if the default has another number of states.
    """
    depths: tuple[int, ...] = config.captured or captured_layers(layers)
    path = directory / "config.json"
    if len(depths) != config.num_aux_hidden_states:
        raise FlowspecError(f"{path}: the head takes {config.num_aux_hidden_states} states, but {_LAYER_IDS} does not "
                            "name their layers")
    if min(depths) < 0 or max(depths) > layers:
        raise FlowspecError(f"{path}: the head's states after {', '.join(map(str, depths))} layers reach "
                            f"past the target, which has {layers} layers; a head works with the target that "
                            "it was trained for only")
    return depths


def _rename_tensors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: tensor
            for name, tensor in stored.items()}


def _check_fc(directory: Path, stored: dict[str, StoredTensor], config: Eagle3Config) -> None:
    """Check fc, with a clearer error than that of a wrong shape."""
    fc, width, states = stored.get("fc.weight"), config.target_hidden_size, config.num_aux_hidden_states
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != states * width:
        raise FlowspecError(f"{directory}: tensor fc.weight takes {fc.shape[1]} values, but {states} "
                            f"captured states of width {width} have {states * width}")


def _settings_of_files(shapes: dict[str, torch.Size], drafted: int, vocabulary: int) -> dict[str, Any]:
    """Return what the shapes of the stored tensors tell of a head."""
    rows = [shapes[name][0] for name in (checkpoint.LM_HEAD, "d2t") if shapes.get(name)]
    if rows:  # a whole lm_head may stand beside a smaller vocabulary
        drafted = rows[0] if rows[0] != vocabulary else rows[-1]
    elif "t2d" not in shapes:  # else ``_complete_vocabulary`` counts
        drafted = vocabulary
    return {"own_lm_head": checkpoint.LM_HEAD in shapes, "draft_vocab_size": drafted}


def _layer_of_files(shapes: dict[str, torch.Size]) -> tuple[bool, bool]:
    """Whether the stored layer norms queries and keys, and whether its projections have biases."""
    return (any(name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")) for name in shapes),
            any(name.endswith("o_proj.bias") for name in shapes))


def _complete_vocabulary(directory: Path, stored: dict[str, StoredTensor], config: Eagle3Config) -> Eagle3Config:
    """Derive d2t or t2d from the other, and the size of the draft vocabulary; drop both if all tokens are drafted.

    Published heads number their draft tokens by the target's ids, in rising order.
    """
    d2t, t2d = stored.get("d2t"), stored.get("t2d")
    if d2t is None and t2d is not None:
        ids = t2d.read().bool().nonzero().flatten()
        if checkpoint.LM_HEAD not in stored:
            config = replace(config, draft_vocab_size=len(ids))
        if len(ids) != config.draft_vocab_size:
            raise FlowspecError(f"{directory}: tensor t2d marks {len(ids)} tokens, and the head drafts "
                                f"{config.draft_vocab_size}")
        d2t = stored["d2t"] = _computed(ids - torch.arange(len(ids)))
    if config.draft_vocab_size == config.vocab_size and d2t is not None and not d2t.read().any():
        d2t = stored.pop("d2t")  # the identity
        stored.pop("t2d", None)
        return config
    if d2t is None:
        if config.draft_vocab_size != config.vocab_size:
            raise FlowspecError(f"{directory}: the head drafts {config.draft_vocab_size} of "
                                f"{config.vocab_size} tokens, and neither d2t nor t2d says which: copy the "
                                "draft model again")
        return config
    matrix = stored.get(checkpoint.LM_HEAD)
    if matrix is not None and matrix.shape[:1] == (config.vocab_size,) != d2t.shape:
        stored[checkpoint.LM_HEAD] = _rows(matrix, d2t)  # a whole lm_head, as the target's
    if t2d is None and config.draft_vocab_size != config.vocab_size:
        ids = d2t.read().long() + torch.arange(config.draft_vocab_size)
        check_target_ids(directory, ids, config.vocab_size)
        stored["t2d"] = _computed(torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True))
    return config


def _computed(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tensor.shape, lambda: tensor)


def _rows(matrix: StoredTensor, d2t: StoredTensor | None) -> StoredTensor:
    """Return a matrix with a row for each token of the target, or its rows of the draft vocabulary."""
    if d2t is None:
        return matrix
    offsets = d2t.read().long()
    ids = offsets + torch.arange(len(offsets))
    return StoredTensor(torch.Size((len(ids), *matrix.shape[1:])), lambda: matrix.read()[ids])


def _check_draft_vocabulary(directory: Path, head: Eagle3Head) -> None:
    if head.config.draft_vocab_size == head.config.vocab_size:
        return
    ids = head.target_ids()
    check_target_ids(directory, ids, head.config.vocab_size)
    marked = int(head.t2d.sum())
    if marked != len(ids) or not head.t2d[ids].all():
        raise FlowspecError(f"{directory}: tensor t2d marks {marked} tokens, which are not the "
                            f"{len(ids)} that d2t maps to")


class Eagle3Format(HeadFormat):
    """Reads EAGLE-3 heads."""

    def load(self, directory: Path, beside: Surroundings) -> Loaded:
        head = load_head3(directory, beside.embedding, beside.dtype, True, beside.quantise)
        require_fit(directory, "target width", head.config.target_hidden_size, beside.lm_head.hidden_size)
        captured = head3_layers(directory, head.config, beside.layers)
        require_vocabulary(directory, head.config.vocab_size, beside.lm_head)
        uses_whole_lm_head = head.lm_head is None and head.config.draft_vocab_size == head.config.vocab_size
        placed = beside.placed(head)
        narrow = beside.narrowed(head, head.logits) if uses_whole_lm_head else None
        return Loaded(partial(Eagle3Drafter, placed, captured,
                              lm_head=narrow or placed.shared_lm_head(beside.lm_head)), head.config.vocab_size)

    def config(self, directory: Path) -> Any:
        return head3_config(checkpoint.HeadFiles(directory))

    def widths(self, directory: Path, config: Any, shapes: Shapes, layers: int) -> list[int]:
        fc = shapes.get("fc.weight")
        head3_layers(directory, config, layers)
        embedding_widths = [] if EMBEDDING in shapes else [config.hidden_size]
        return [config.target_hidden_size, *([fc[1] // config.num_aux_hidden_states] if fc else []), *embedding_widths]

    def on_meta(self, directory: Path) -> nn.Module:
        return checkpoint.on_meta(Eagle3Head, self.config(directory))

    def usual(self, target: DecoderConfig, kind: DraftKind) -> nn.Module:
        return checkpoint.on_meta(Eagle3Head, Eagle3Config(
            **vars(usual_layer(target)), target_hidden_size=target.hidden_size,
            draft_vocab_size=min(USUAL_VOCABULARY, target.vocab_size)))


USUAL_VOCABULARY = 32_000  # draft tokens of most published heads
FORMAT = Eagle3Format()

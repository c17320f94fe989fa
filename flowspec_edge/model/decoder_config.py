"""What decoder layers need of a config.json: every field decided, as transformers' configurations decide it.

Importing this module imports neither torch nor transformers, which a stage does not need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowspec_edge.errors import UsageError
from flowspec_edge.model.families import Family, family_of, text_config, with_defaults

# Rotary embeddings whose angle depends only on the row's position, and the fields that each needs.
ROPE_TYPES = {"default": (), "linear": ("factor",),
              "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
# The angle depends on the length of the text: rows cached before it grew would be wrong.
_GROWING_ROPE = ("dynamic", "longrope")
_ORIGINAL = "original_max_position_embeddings"
# Between the matrices of an MLP.
ACTIVATIONS = ("silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
# Of Gemma's configurations: limits of scores and logits by tanh, and attention in both directions.
_NOT_COMPUTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
# Fields that mean nothing in the files of families that do not have them.
_FAMILY_FIELDS = {"attention_bias", "mlp_bias", "moe_intermediate_size", "shared_expert_intermediate_size",
                  "norm_topk_prob", "query_pre_attn_scalar", "use_sliding_window", "hidden_activation"}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class DecoderConfig:
    """The configuration of a decoder.

    Fields that config.json has, too, keep its names; these need a word:

    layer_types  of every layer: "full_attention", "sliding_attention" or "linear_attention"
    ropes        parameters of rotary embeddings by type of layer; by "" if all layers have the same
    score_width  scores are divided by its root
    sparse       of every layer, whether it has experts
    shared       width of the expert that all rows go through; 0: there is none
    origin       the file, or where the fields are from
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    score_width: float
    layer_types: tuple[str, ...]
    sliding_window: int | None
    ropes: Mapping[str, Mapping[str, Any]] = field(hash=False)
    sparse: tuple[bool, ...]
    num_experts: int
    num_experts_per_tok: int
    expert_width: int
    normed_weights: bool
    shared: int
    swiglu_alpha: float
    swiglu_limit: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    origin: str

    @property
    def family(self) -> Family:
        return family_of({"model_type": self.model_type})

    @property
    def turns(self) -> Sequence[str]:
        """The key of each layer's rotary embedding in ``ropes``."""
        return [""] * self.num_hidden_layers if "" in self.ropes else self.layer_types


def decoder_config(config: Mapping[str, Any], origin: Path | str) -> DecoderConfig:
    """Decide the fields of a model's config.json, ``origin``.

    ``config``: of a family that stages run, with sizes that ``config.check_config`` has checked.  UsageError for
    values that do not fit together, and for what stages cannot compute.
    """
    fields = with_defaults(text_config(config))
    family = family_of(fields)
    fields = {name: value for name, value in fields.items() if name not in _FAMILY_FIELDS or name in family.defaults}
    layers, heads = int(fields["num_hidden_layers"]), int(fields["num_attention_heads"])
    width = int(fields["hidden_size"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    if kv_heads < 1 or heads % kv_heads:
        raise UsageError(f"{origin}: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    if not fields.get("head_dim") and width % heads:
        raise UsageError(f"{origin} is not a model configuration: {heads} attention heads cannot share a width of "
                         f"{width} evenly, and it has no head_dim")
    for name in _NOT_COMPUTED:
        if value := fields.get(name):
            raise UsageError(f"{origin}: {name} is {value!r}, which stages do not compute")
    head_dim = int(fields.get("head_dim") or width // heads)
    types = layer_types(fields, origin)
    experts = _experts(fields, family, layers, origin)
    _check_recurrence(fields, family, origin)
    return DecoderConfig(
        model_type=family.name, vocab_size=int(fields["vocab_size"]), hidden_size=width,
        intermediate_size=int(fields.get("intermediate_size") or 0), num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=int(fields["max_position_embeddings"]),
        rms_norm_eps=float(fields.get("rms_norm_eps") or 1e-6), activation=_activation(fields, origin),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
        attention_bias=bool(fields.get("attention_bias")), mlp_bias=bool(fields.get("mlp_bias")),
        score_width=float(fields.get("query_pre_attn_scalar") or head_dim), layer_types=types,
        sliding_window=_window(fields), ropes=_ropes(fields, family, types, head_dim, origin), **experts,
        swiglu_alpha=float(fields.get("swiglu_alpha") or 1.702),
        swiglu_limit=float(fields.get("swiglu_limit") or 7.0),
        linear_num_key_heads=int(fields.get("linear_num_key_heads") or 0),
        linear_num_value_heads=int(fields.get("linear_num_value_heads") or 0),
        linear_key_head_dim=int(fields.get("linear_key_head_dim") or 0),
        linear_value_head_dim=int(fields.get("linear_value_head_dim") or 0),
        linear_conv_kernel_dim=int(fields.get("linear_conv_kernel_dim") or 0), origin=str(origin))


def _activation(fields: Mapping[str, Any], origin: Path | str) -> str:
    name = fields.get("hidden_activation") or fields.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise UsageError(f"{origin}: no activation {name!r}, only {', '.join(ACTIVATIONS)}")
    return str(name)


def _window(fields: Mapping[str, Any]) -> int | None:
    """Qwen's models have a window only if they say so beside its size."""
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    return None if window is None else int(window)


def layer_types(fields: Mapping[str, Any], origin: Path | str) -> tuple[str, ...]:
    """Return the type of every layer.

    fields  of a config.json, completed by the defaults

    Raise the same errors as :func:`decoder_config`.
    """
    family, layers = family_of(fields), int(fields["num_hidden_layers"])
    if family.always_windowed:
        return (_SLIDING,) * layers
    layer_kinds = fields.get("layer_types")
    if layer_kinds is None:
        layer_kinds = [_usual_type(fields, family, layer) for layer in range(layers)]
    supported = {_FULL, _LINEAR if family.recurrent else _SLIDING}
    if others := {*layer_kinds} - supported:
        raise UsageError(f"{origin}: layers of type {', '.join(sorted(others))} cannot be run, only "
                         f"{' and '.join(sorted(supported))}")
    if len(layer_kinds) != layers:
        raise UsageError(f"{origin} is not a model configuration: layer_types has {len(layer_kinds)} entries for "
                         f"{layers} layers")
    return tuple(layer_kinds)


def _usual_type(fields: Mapping[str, Any], family: Family, layer: int) -> str:
    """Return the type of a layer whose configuration names no types."""
    if family.recurrent:
        return _LINEAR if (layer + 1) % int(fields.get("full_attention_interval") or 4) else _FULL
    if family.full_every:
        return _SLIDING if (layer + 1) % int(fields.get("sliding_window_pattern") or family.full_every) else _FULL
    windowed = _window(fields) is not None and layer >= int(fields.get("max_window_layers", layer + 1))
    return _SLIDING if windowed else _FULL


def _experts(fields: Mapping[str, Any], family: Family, layers: int, origin: Path | str) -> dict[str, Any]:
    if not family.sparse:
        return {"sparse": (False,) * layers, "num_experts": 0, "num_experts_per_tok": 0, "expert_width": 0,
                "normed_weights": False, "shared": 0}
    count = int(fields.get("num_local_experts") or fields.get("num_experts") or 0)
    per_token = int(fields["num_experts_per_tok"])
    if count and per_token > count:
        raise UsageError(f"{origin}: a row cannot choose {per_token} experts of {count}")
    sparse_step, dense = int(fields.get("decoder_sparse_step") or 1), fields.get("mlp_only_layers") or ()
    return {"sparse": tuple(count > 0 and layer not in dense and (layer + 1) % sparse_step == 0
                            for layer in range(layers)),
            "num_experts": count, "num_experts_per_tok": per_token,
            "expert_width": int(fields.get("moe_intermediate_size") or fields.get("intermediate_size") or 0),
            "normed_weights": bool(fields.get("norm_topk_prob", True)),
            "shared": int(fields.get("shared_expert_intermediate_size") or 0)}


def _check_recurrence(fields: Mapping[str, Any], family: Family, origin: Path | str) -> None:
    if not family.recurrent:
        return
    heads, key_heads = fields["linear_num_value_heads"], fields["linear_num_key_heads"]
    if heads % key_heads:
        raise UsageError(f"{origin}: {heads} heads of recurrent layers cannot share {key_heads} key heads evenly")
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        raise UsageError(f"{origin}: the convolution's activation is silu, not {activation!r}")


# ---- rotary embeddings -----------------------------------------------------------------------------


def _ropes(fields: Mapping[str, Any], family: Family, types: Sequence[str], head_dim: int,
           origin: Path | str) -> dict[str, dict[str, Any]]:
    scaling, rope_parameters = fields.get("rope_scaling"), fields.get("rope_parameters")
    for name, value in (("rope_scaling", scaling), ("rope_parameters", rope_parameters)):
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"{origin} is not a model configuration: {name} must be an object, not {value!r}")
    if family.rope_bases:
        rope_parameters = rope_parameters or {}
        ropes = {}
        for kind, (field, base) in family.rope_bases.items():
            parameters = dict(rope_parameters.get(kind) or {}) | dict((scaling or {}) if kind == _FULL else {})
            ropes[kind] = _complete(parameters, {**fields, "rope_theta": fields.get(field, base)}, family)
    else:
        shared_parameters = scaling or rope_parameters or dict(family.rope)
        nested = {kind: value for kind, value in shared_parameters.items()
                  if isinstance(value, Mapping) and kind in {*types}}
        ropes = {kind: _complete(value, fields, family) for kind, value in (nested or {"": shared_parameters}).items()}
    for rope in ropes.values():
        _check_rope(rope, origin)
        rotary_width = int(head_dim * rope["partial_rotary_factor"])
        if rotary_width < 2 or rotary_width % 2:
            raise UsageError(f"{origin}: {rotary_width} of a head's {head_dim} values turn, which are no pairs")
    return ropes


def _complete(rope: Mapping[str, Any], fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Older files have the base, and the share of a head that turns, beside the parameters."""
    beside = {name: fields.get(name, usual) for name, usual in (("rope_theta", family.rope_theta),
                                                                ("partial_rotary_factor", family.rotated))}
    complete: dict[str, Any] = {"rope_type": rope.get("type", "default"), **beside, **rope}
    if complete["rope_type"] in ("llama3", "yarn", "longrope"):
        complete[_ORIGINAL] = fields.get(_ORIGINAL) or complete.get(_ORIGINAL) or fields["max_position_embeddings"]
    return complete


def _check_rope(rope: Mapping[str, Any], origin: Path | str) -> None:
    kind = str(rope["rope_type"])
    if kind in _GROWING_ROPE:
        raise UsageError(f"{origin}: rope type {kind!r} turns rows by an angle that changes as the text grows, "
                         "which rows already in a cache cannot follow; where the model permits, set "
                         f"rope_type to one of: {', '.join(ROPE_TYPES)}")
    if kind not in ROPE_TYPES:
        raise UsageError(f"{origin}: no rope type {kind!r}, only {', '.join(ROPE_TYPES)}")
    for name in ROPE_TYPES[kind]:
        if name not in rope:
            raise UsageError(f"{origin} is not a model configuration: a rope of type {kind!r} has no {name}")
    if kind == "yarn" and rope["factor"] is None:
        rope = {name: value for name, value in rope.items() if name != "factor"}  # follows from the lengths
    for name in _NUMBERS & set(rope):
        value = rope[name]
        if value is None and name not in _ALWAYS:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{origin}: the rope's {name} must be a number, not {value!r}")
        if not 0 < value < math.inf:
            raise UsageError(f"{origin}: the rope's {name} must be above 0, not {value!r}")
    if rope["partial_rotary_factor"] > 1:
        raise UsageError(f"{origin}: the rope's partial_rotary_factor must be at most 1")


_ALWAYS = {"rope_theta", "factor", "partial_rotary_factor"}
_NUMBERS = {*_ALWAYS, "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
            "mscale_all_dim", "llama_4_scaling_beta", _ORIGINAL}

"""The families of models that stages can run: a record each, without torch or transformers.

Loading, sharding, planning, costs and messages ask the record.  Code of its own has a family only if its
layers are new: the record then names the module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import MTP


@dataclass(frozen=True)
class ExpertNames:
    """How checkpoints name the experts of a layer.

    block           their module in the layer
    gate, up, down  an expert's matrices
    router          the module that chooses
    clamped         matrices and router have biases, gate and up are clamped as gpt-oss clamps them, and weights are
                    a softmax of the chosen experts alone
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    clamped: bool = False


@dataclass(frozen=True)
class LayerForm:
    """How a family's decoder layers differ from Llama's.

    query_biases       queries, keys and values have biases, outputs have none; else ``attention_bias`` says for all
    one_matrix         checkpoints hold queries, keys and values as one matrix, and gate and up as one
    head_norms         queries and keys are normed by head
    centred_norms      weights of norms are stored as their differences from 1
    norms_of_outputs   attention and MLP are normed before they are added, too
    output_gates       the query projection has a gate for each output of attention, too
    sinks              each head has a score that takes part in the softmax and has no value
    scaled_embeddings  embeddings are multiplied by the root of the width
    scaled_queries     queries grow with their position, as the parameters of the rotation say
    delta_by_key_head  projections of recurrent layers are joined, ordered by key head
    """

    query_biases: bool = False
    one_matrix: bool = False
    head_norms: bool = False
    centred_norms: bool = False
    norms_of_outputs: bool = False
    output_gates: bool = False
    sinks: bool = False
    scaled_embeddings: bool = False
    scaled_queries: bool = False
    delta_by_key_head: bool = False


@dataclass(frozen=True)
class GgufNames:
    """How GGUF files hold models of a family.

    architecture  their ``general.architecture``; two families may have one, if one of them alone has experts
    fields        of config.json, beside those that all have: the key of the metadata behind the architecture's name
    constants     fields of config.json that are the same for all
    permuted      rows of query and key matrices are in the order in which llama.cpp rotates them
    modules       of a layer, by their names there, where those of Llama mean others or are missing
    norm_offset   what is added to the weights of norms
    """

    architecture: str
    fields: Mapping[str, str] = field(default_factory=dict, hash=False)
    constants: Mapping[str, Any] = field(default_factory=dict, hash=False)
    permuted: bool = False
    modules: Mapping[str, str] = field(default_factory=dict, hash=False)
    norm_offset: float = 0.0


@dataclass(frozen=True)
class Family:
    """One family: embeddings, layers with attention (of all rows or a window) or a recurrence, a norm.

    name            transformers' ``model_type``
    defaults        what transformers takes for fields that a config.json leaves out
    form            how its layers differ from Llama's
    launches        kernel launches of a decoder layer in int4, without those of experts; an average if layers
                    differ.  Counted on torch 2.8 with 16 rows (tests/stage/test_launches.py)
    within          ``model_type`` of a multimodal checkpoint with such a language model in its text_config
    experts         names of its experts; None: its layers are dense
    recurrent       most layers are recurrences (gated delta nets) instead of attention
    always_windowed every layer has the configuration's window, if it has one; else ``layer_types`` says
    full_every      where ``layer_types`` is missing, of so many layers the last has no window; 0: none has one
    rope            parameters of rotary embeddings where a config.json has none
    rope_theta      the base of rotary embeddings where a config.json has none
    rotated         the share of a head's values that turn where a config.json has none
    rope_bases      by type of layer, the field of its rotary embedding's base, and the usual base; empty: all layers
                    have the same embedding
    packed_as       the quantised format of its published weights that stages read; "": none
    draft_layers    kinds of draft models that its checkpoints may hold as layers of their own
    gguf            how GGUF files hold such models; None: they are not read
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    form: LayerForm = LayerForm()
    launches: int = 28
    within: str = ""
    experts: ExpertNames | None = None
    recurrent: bool = False
    always_windowed: bool = False
    full_every: int = 0
    rope: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rope_theta: float = 10_000.0
    rotated: float = 1.0
    rope_bases: Mapping[str, tuple[str, float]] = field(default_factory=dict, hash=False)
    packed_as: str = ""
    draft_layers: tuple[DraftKind, ...] = ()
    gguf: GgufNames | None = None

    @property
    def sparse(self) -> bool:
        """Whether its layers have experts."""
        return self.experts is not None


_DELTA = LayerForm(head_norms=True, centred_norms=True, output_gates=True)
_LINEAR = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
           "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "attention_bias": False}
_EXPERTS = {"num_experts_per_tok": "expert_used_count"}
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA = Family("llama", {"vocab_size": 32_000, "hidden_size": 4_096, "intermediate_size": 11_008,
                         "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2_048,
                         "attention_bias": False, "mlp_bias": False},
               launches=25, gguf=GgufNames("llama", permuted=True))
FAMILIES = {family.name: family for family in (
    LLAMA,
    Family("mistral", {"vocab_size": 32_000, "hidden_size": 4_096, "intermediate_size": 14_336,
                       "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                       "max_position_embeddings": 131_072, "sliding_window": 4_096}, always_windowed=True),
    Family("qwen2", {"vocab_size": 151_936, "hidden_size": 4_096, "intermediate_size": 22_016,
                     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
                     "max_position_embeddings": 32_768, "use_sliding_window": False, "max_window_layers": 28},
           LayerForm(query_biases=True), gguf=GgufNames("qwen2", constants={"use_sliding_window": False})),
    Family("qwen3", {"vocab_size": 151_936, "hidden_size": 4_096, "intermediate_size": 22_016,
                     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
                     "head_dim": 128, "max_position_embeddings": 32_768, "use_sliding_window": False,
                     "max_window_layers": 28, "attention_bias": False},
           LayerForm(head_norms=True), gguf=GgufNames("qwen3")),
    Family("phi3", {"vocab_size": 32_064, "hidden_size": 3_072, "intermediate_size": 8_192,
                    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4_096,
                    "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4_096},
           LayerForm(one_matrix=True), always_windowed=True),
    Family("ministral3", {"vocab_size": 131_072, "hidden_size": 4_096, "intermediate_size": 14_336,
                          "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8,
                          "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5},
           LayerForm(scaled_queries=True), always_windowed=True,
           rope=_YARN | {"rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
                         "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}),
    Family("qwen3_moe", {"vocab_size": 151_936, "hidden_size": 2_048, "intermediate_size": 6_144,
                         "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
                         "max_position_embeddings": 32_768, "use_sliding_window": False, "num_experts": 128,
                         "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
                         "attention_bias": False},
           LayerForm(head_norms=True), launches=45, experts=ExpertNames(), always_windowed=True,
           gguf=GgufNames("qwen3moe", _EXPERTS | {"num_experts": "expert_count",
                                                  "moe_intermediate_size": "expert_feed_forward_length"},
                          {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []})),
    Family("mixtral", {"vocab_size": 32_000, "hidden_size": 4_096, "intermediate_size": 14_336,
                       "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                       "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "num_local_experts": 8,
                       "num_experts_per_tok": 2},
           launches=42, experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2"), always_windowed=True,
           rope_theta=1_000_000.0,
           gguf=GgufNames("llama", _EXPERTS | {"num_local_experts": "expert_count"}, {"sliding_window": None},
                          permuted=True)),
    Family("gpt_oss", {"vocab_size": 201_088, "hidden_size": 2_880, "intermediate_size": 2_880,
                       "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
                       "head_dim": 64, "max_position_embeddings": 131_072, "sliding_window": 128,
                       "rms_norm_eps": 1e-5, "num_local_experts": 128, "num_experts_per_tok": 4,
                       "attention_bias": True},
           LayerForm(sinks=True), experts=ExpertNames(router="router", clamped=True), full_every=2,
           packed_as="mxfp4", rope=_YARN | {"factor": 32.0, "truncate": False,
                                            "original_max_position_embeddings": 4_096}, rope_theta=150_000.0),
    Family("gemma3_text", {"vocab_size": 262_208, "hidden_size": 2_304, "intermediate_size": 9_216,
                           "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                           "head_dim": 256, "max_position_embeddings": 131_072, "sliding_window": 4_096,
                           "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
                           "tie_word_embeddings": True, "attention_bias": False},
           LayerForm(head_norms=True, centred_norms=True, norms_of_outputs=True, scaled_embeddings=True),
           full_every=6, rope_bases={"full_attention": ("rope_theta", 1_000_000.0),
                                     "sliding_attention": ("rope_local_base_freq", 10_000.0)},
           gguf=GgufNames("gemma3", modules={"post_attention_norm": "post_attention_layernorm",
                                             "ffn_norm": "pre_feedforward_layernorm",
                                             "post_ffw_norm": "post_feedforward_layernorm"}, norm_offset=1.0)),
    Family("qwen3_next", {"vocab_size": 151_936, "hidden_size": 2_048, "intermediate_size": 5_632,
                          "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
                          "head_dim": 256, "max_position_embeddings": 32_768, "num_experts": 512,
                          "num_experts_per_tok": 10, "moe_intermediate_size": 512,
                          "shared_expert_intermediate_size": 512, "norm_topk_prob": True, **_LINEAR},
           replace(_DELTA, delta_by_key_head=True), launches=88, experts=ExpertNames(), recurrent=True,
           rotated=0.25, draft_layers=(MTP,)),
    Family("qwen3_5_text", {"vocab_size": 248_320, "hidden_size": 4_096, "intermediate_size": 12_288,
                            "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
                            "head_dim": 256, "max_position_embeddings": 32_768, **_LINEAR},
           _DELTA, launches=64, within="qwen3_5", recurrent=True, rotated=0.25, draft_layers=(MTP,)),
    Family("qwen3_5_moe_text", {"vocab_size": 248_320, "hidden_size": 2_048, "num_hidden_layers": 40,
                                "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
                                "max_position_embeddings": 32_768, "num_experts": 256, "num_experts_per_tok": 8,
                                "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, **_LINEAR},
           _DELTA, launches=84, within="qwen3_5_moe", experts=ExpertNames(), recurrent=True, rotated=0.25,
           draft_layers=(MTP,)),
)}
QWEN2, QWEN3 = FAMILIES["qwen2"], FAMILIES["qwen3"]  # layers of draft heads are Llama's or theirs
# By the type of a multimodal checkpoint, the family of its language model.
MULTIMODAL = {family.within: family for family in FAMILIES.values() if family.within}
UNKNOWN = Family("")  # one that stages cannot run


def family_of(config: Any) -> Family:
    """Find the family of transformers' configuration, or of a config.json's fields.

    ``UNKNOWN`` if stages cannot run it.
    """
    name = config.get("model_type") if isinstance(config, Mapping) else config.model_type
    return FAMILIES.get(name, UNKNOWN) if isinstance(name, str) else UNKNOWN


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the fields of a language model's config.json with transformers' defaults."""
    return {**family_of(config).defaults, **config}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a multimodal model's language model; of another model, ``config``."""
    inner, family = config.get("text_config"), config.get("model_type")
    if not isinstance(family, str) or family not in MULTIMODAL or not isinstance(inner, dict):
        return dict(config)
    fields = {name: config[name] for name in ("tie_word_embeddings", "eos_token_id", "quantization_config")
              if name in config}
    return {**inner, **fields, "model_type": MULTIMODAL[family].name}

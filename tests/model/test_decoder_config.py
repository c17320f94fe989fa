"""What layers need of a config.json, against transformers' own configurations and rotary embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.stages import RECURRENT
from transformers import AutoConfig, AutoModelForCausalLM

from flowspec_edge.errors import UsageError
from flowspec_edge.model.catalogue import known_models
from flowspec_edge.model.config import load_config
from flowspec_edge.model.decoder_config import decoder_config
from flowspec_edge.model.families import FAMILIES, text_config
from flowspec_edge.stage.families.decoder import skeleton
from flowspec_edge.stage.families.rotary import Rotary

CPU = torch.device("cpu")
SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "sliding_window", "num_experts_per_tok",
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim", "attention_bias", "mlp_bias", "swiglu_limit")
# Fields beside a family's usual ones: older and newer forms of the same facts, in files that are around.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    *((name, entry.config) for name, entry in known_models().items()),
    ("llama", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 512}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0},
               "original_max_position_embeddings": 1024}),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
               "rope_theta": 1e6}),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "beta_fast": 16.0,
                                   "beta_slow": 2.0, "attention_factor": 1.5}}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 5}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 64}),
    ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 3e4, "sliding_window_pattern": 3,
                     "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("qwen3_next", {"partial_rotary_factor": 0.5, "full_attention_interval": 3, "num_hidden_layers": 6}),
    ("qwen3_5_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("mixtral", {"rope_theta": 2e5, "head_dim": 64}),
    *(("qwen3_moe", {"norm_topk_prob": normed}) for normed in (True, False)),
    ("ministral3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "mscale": 0.8,
                                        "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.2,
                                        "original_max_position_embeddings": 64}}),
    ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "truncate": True}}),
]


def both(family: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    fields = text_config({"model_type": family, **fields})
    return decoder_config(fields, "config.json"), AutoConfig.for_model(**json.loads(json.dumps(fields)))


@pytest.mark.parametrize(("family", "fields"), VARIANTS)
def test_fields_are_those_of_transformers(family: str, fields: dict[str, Any]) -> None:
    ours, theirs = both(family, fields)
    for name in SAME:
        wanted = getattr(theirs, name, None)
        if name in ("num_experts_per_tok", "mlp_bias", "attention_bias") or name.startswith("linear_"):
            wanted = wanted or 0  # of families without
        if name != "swiglu_limit" or wanted is not None:
            assert getattr(ours, name) == wanted, name
    assert ours.normed_weights == (ours.family.sparse and getattr(theirs, "norm_topk_prob", True))
    heads = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or heads)
    if not ours.family.always_windowed:
        assert list(ours.layer_types) == (getattr(theirs, "layer_types", None) or ["full_attention"]
                                          * ours.num_hidden_layers)
    activation = theirs.hidden_activation if hasattr(theirs, "hidden_activation") else theirs.hidden_act
    assert ours.activation == activation


@pytest.mark.parametrize(("family", "fields"), VARIANTS)
def test_rows_turn_as_in_transformers(family: str, fields: dict[str, Any]) -> None:
    ours, theirs = both(family, fields)
    with torch.device("meta"):
        small = AutoConfig.for_model(**{**theirs.to_dict(), "num_hidden_layers": 1, "layer_types": None,
                                        "vocab_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8,
                                        "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
                                        "pad_token_id": 0})
        kind = type(AutoModelForCausalLM.from_config(small).model.rotary_emb)
    embedding, rotary = kind(config=theirs), Rotary(ours, CPU)
    positions = torch.tensor([0, 1, 17, 1000])
    x = torch.zeros(1)
    for turn in dict.fromkeys(ours.turns):
        cos, sin = embedding(x, positions[None], **({"layer_type": turn} if turn else {}))
        found = rotary(positions, turn, torch.float32)
        half = found.cos.shape[-1] // 2
        torch.testing.assert_close(found.cos[:, 0, :half], cos[0, :, :half], atol=1e-4, rtol=0)
        torch.testing.assert_close(found.sin[:, 0, half:], sin[0, :, :half], atol=1e-4, rtol=0)
        torch.testing.assert_close(found.sin[:, 0, :half], -found.sin[:, 0, half:])
        assert torch.equal(found.cos[:, 0, :half], found.cos[:, 0, half:])


@pytest.mark.parametrize(("family", "extra"), [
    *((family, {}) for family in FAMILIES),
    *((family, {"decoder_sparse_step": 2, "mlp_only_layers": [3]}) for family in ("qwen3_moe", "qwen3_next")),
])
def test_tensors_are_those_of_transformers(family: str, extra: dict[str, Any]) -> None:
    """Names and shapes, but for experts, which transformers stacks."""
    fields = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50, "moe_intermediate_size": 24,
              "shared_expert_intermediate_size": 40, "pad_token_id": 0,
              **({"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2}
                 if FAMILIES[family].sparse else {}), **extra}
    ours, theirs = both(family, fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs).model
    named = {name: value.shape for name, value in skeleton(ours).state_dict().items() if ".experts." not in name}
    block = FAMILIES[family].experts.block if FAMILIES[family].experts else "mlp"
    wanted = {name.replace(".mlp.", f".{block}."): value.shape for name, value in model.state_dict().items()
              if ".experts." not in name}
    assert named == wanted


SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
                         "num_key_value_heads": 2, "head_dim": 32}
MOE: dict[str, Any] = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DELTA = RECURRENT | {"num_hidden_layers": 4}


@pytest.mark.parametrize(("family", "fields", "says"), [
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None},
     "3 attention heads cannot share a width of 64 evenly"),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
     "a rope of type 'llama3' has no low_freq_factor"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "the rope's factor must be above 0, not 0"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "4"}}, "the rope's factor must be a number, not '4'"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
     "the rope's rope_theta must be above 0"),
    ("llama", {"rope_theta": None}, "the rope's rope_theta must be a number, not None"),
    ("llama", {"partial_rotary_factor": 0.01}, "0 of a head's 32 values turn"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "changes as the text grows"),
    ("llama", {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "no rope type 'spiral', only default, linear"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16,
                                   "long_factor": [2.0] * 16, "original_max_position_embeddings": 64}},
     "rope type 'longrope' .* one of: default, linear, llama3, yarn"),
    ("gemma3_text", {"layer_types": ["full_attention"] * 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
     "rope type 'dynamic'"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which stages"),
    ("gemma3_text", {"hidden_activation": "magic"}, "no activation 'magic', only silu"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]},
     "layers of type linear_attention cannot be run, only full"),
    ("qwen3_moe", MOE | {"num_experts_per_tok": 9}, "a row cannot choose 9 experts of 8"),
    ("qwen3_moe", MOE | {"num_experts_per_tok": 0},
     "num_experts_per_tok must be a whole number from 1 to 4096, not 0"),
    ("qwen3_moe", MOE | {"num_local_experts": "8"}, "num_local_experts must be a whole number from 1 to 4096, not '8'"),
    ("qwen3_moe", MOE | {"moe_intermediate_size": -3}, "moe_intermediate_size must be a whole number"),
    ("qwen3_5_text", DELTA | {"linear_num_value_heads": 5},
     "5 heads of recurrent layers cannot share 2 key heads evenly"),
    ("qwen3_5_text", DELTA | {"hidden_act": "gelu"}, "the convolution's activation is silu, not 'gelu'"),
    ("qwen3_5_text", DELTA | {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be a whole number from 1"),
])
def test_what_stages_cannot_run(tmp_path: Path, family: str, fields: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": family} | fields))
    with pytest.raises(UsageError, match=says) as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)

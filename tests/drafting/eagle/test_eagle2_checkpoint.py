"""Writing EAGLE-1/2 checkpoints, and heads for other targets; ``test_eagle3_checkpoint`` has the formats of files."""

import json

import pytest
import safetensors.torch
import torch
from kits.draft_heads import causal_pass
from transformers import LlamaConfig, LlamaForCausalLM

from flowspec_edge.drafting.eagle.eagle2 import load_head, save_head
from flowspec_edge.drafting.load import load_drafters
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

H, V = 32, 53
EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(1))


def published(directory, **config):
    """A checkpoint as others publish them, written without our code."""
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "vocab_size": V,
           "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
           "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_scaling": None,
           "max_position_embeddings": 2048, "pad_token_id": 0, "torch_dtype": "float16", **config}
    shapes = {"fc.weight": (H, 2 * H), "fc.bias": (H,), "layers.0.self_attn.q_proj.weight": (H, H),
              "layers.0.self_attn.k_proj.weight": (16, H), "layers.0.self_attn.v_proj.weight": (16, H),
              "layers.0.self_attn.o_proj.weight": (H, H), "layers.0.mlp.gate_proj.weight": (40, H),
              "layers.0.mlp.up_proj.weight": (40, H), "layers.0.mlp.down_proj.weight": (H, 40),
              "layers.0.post_attention_layernorm.weight": (H,), "embed_tokens.weight": (V, H)}
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(s, generator=generator) * 0.2 for n, s in shapes.items()}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    return weights


def run(head):
    """Logit-free probe: the output of three causal rows."""
    return causal_pass(head, torch.linspace(-1, 1, 3 * H).reshape(3, H), [1, 2, 3])


@pytest.mark.parametrize("with_embedding", [True, False])
def test_round_trip(tmp_path, with_embedding):
    weights = published(tmp_path, qkv_bias=True, rope_theta=5e4)
    for name, rows in (("q", H), ("k", 16), ("v", 16)):
        weights[f"layers.0.self_attn.{name}_proj.bias"] = torch.ones(rows)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    head = load_head(tmp_path, None, torch.float32)
    save_head(head, tmp_path / "again", torch.float32, with_embedding)
    stored = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    assert ("embed_tokens.weight" in stored) == with_embedding
    again = load_head(tmp_path / "again", head.embed_tokens.weight.detach(), torch.float32)
    assert torch.equal(run(head), run(again))
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert config["bias"] is True
    assert config["rope_theta"] == 5e4
    assert "_name_or_path" not in config


def test_missing_files_and_other_targets(tmp_path):
    weights = published(tmp_path)
    with pytest.raises(UsageError, match=r"neither model.safetensors nor pytorch_model.bin"):
        load_head(tmp_path, None, torch.float32)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(FlowspecError, match="the head's width is 32, the target's 64"):
        load_head(tmp_path, torch.zeros(V, 64), torch.float32)
    with pytest.raises(FlowspecError, match="vocabulary is 53 tokens, the target's 60"):
        load_head(tmp_path, torch.zeros(60, H), torch.float32)
    published(tmp_path, num_hidden_layers=2)
    with pytest.raises(FlowspecError, match="one layer, not 2"):
        load_head(tmp_path, None, torch.float32)


def test_load_drafters_knows_both_kinds(tmp_path):
    published_head = published(tmp_path / "eagle2")
    safetensors.torch.save_file(published_head, tmp_path / "eagle2" / "model.safetensors")
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                      num_attention_heads=2, num_key_value_heads=1))
    lm.save_pretrained(tmp_path / "draft-lm")
    for kind in ("eagle2", "lm"):
        drafter = load_drafters(kind, tmp_path, torch.randn(V, H), EMBEDDING, "fp32", 2)()
        drafter.commit([4], None)
        drafter.commit([5], torch.ones(1, H))
        got = drafter.expand(DraftRequest(0, (DraftNode(0, -1, 5, 1),), 3))
        assert got.tokens.shape == got.scores.shape == (1, 3)
        with pytest.raises(FlowspecError, match=r"vocabulary has 53 tokens, the target's 60"):
            load_drafters(kind, tmp_path, torch.randn(60, H), torch.randn(60, H)[:V], "fp32", 2)
        with pytest.raises(UsageError, match="missing"):
            load_drafters(kind, tmp_path / "none", torch.randn(V, H), EMBEDDING, "fp32", 2)
    with pytest.raises(UsageError, match="unknown kind of draft model 'medusa'"):
        load_drafters("medusa", tmp_path, torch.randn(V, H), EMBEDDING, "fp32", 2)

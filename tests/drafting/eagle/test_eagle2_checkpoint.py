"""Reading and writing EAGLE-1/2 checkpoints, and every way in which one can be wrong."""

import json

import pytest
import safetensors.torch
import torch
from kits.draft_heads import causal_pass
from transformers import LlamaConfig, LlamaForCausalLM

from flowspec_edge.drafting.eagle.eagle2 import load_head, save_head
from flowspec_edge.drafting.load import load_drafters, needs_embedding
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


def test_bin_and_safetensors_are_the_same_head(tmp_path):
    for name in ("safe", "bin"):
        weights = published(tmp_path / name)
        if name == "safe":
            safetensors.torch.save_file(weights, tmp_path / name / "model.safetensors")
        else:
            torch.save(weights, tmp_path / name / "pytorch_model.bin")
    a, b = (load_head(tmp_path / n, None, torch.float32) for n in ("safe", "bin"))
    assert torch.equal(run(a), run(b))
    assert a.fc.bias is not None


@pytest.mark.parametrize("layout", ["sharded", "sharded bin", "model.", "module.", "module.model."])
def test_shards_and_prefixes_are_the_same_head(tmp_path, layout):
    weights = published(tmp_path)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    expected = run(load_head(tmp_path, None, torch.float32))
    (tmp_path / "model.safetensors").unlink()
    if layout.endswith("."):
        weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # as old releases stored it
        torch.save({layout + name: w for name, w in weights.items()}, tmp_path / "pytorch_model.bin")
    else:
        name, save, index = (
            ("model-{}.safetensors", safetensors.torch.save_file, "model.safetensors.index.json")
            if layout == "sharded" else ("pytorch_model-{}.bin", torch.save, "pytorch_model.bin.index.json"))
        parts = {name.format(i): dict(list(weights.items())[i::2]) for i in (0, 1)}
        for file, part in parts.items():
            save(part, tmp_path / file)
        (tmp_path / index).write_text(json.dumps({"weight_map": {n: f for f, p in parts.items() for n in p}}))
    assert torch.equal(run(load_head(tmp_path, None, torch.float32)), expected)


@pytest.mark.parametrize(("config", "theta"), [({}, 1e4), ({"rope_theta": 5e5}, 5e5)])
def test_rope_theta_is_ten_thousand_unless_the_config_says(tmp_path, config, theta):
    safetensors.torch.save_file(published(tmp_path, **config), tmp_path / "model.safetensors")
    head = load_head(tmp_path, None, torch.float32)
    head.prepare()
    cos, sin, _ = head.rotation(torch.tensor([3]))
    angles = 3 * theta ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(cos[0, 0, :4], angles.cos())
    torch.testing.assert_close(sin[0, 0, 4:], angles.sin())


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


def test_the_targets_embedding_stands_in_for_a_missing_one(tmp_path):
    weights = published(tmp_path)
    del weights["embed_tokens.weight"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    head = load_head(tmp_path, EMBEDDING, torch.float32)
    assert torch.equal(head.embed_tokens.weight, EMBEDDING)
    with pytest.raises(FlowspecError, match=r"embed_tokens\.weight is missing"):
        load_head(tmp_path, None, torch.float32)


@pytest.mark.parametrize(("change", "message"), [
    ({"fc.weight": None}, "tensor fc.weight is missing"),
    ({"layers.0.input_layernorm.weight": (H,)}, "tensor layers.0.input_layernorm.weight does not belong"),
    ({"layers.0.mlp.up_proj.weight": (41, H)}, r"up_proj.weight has shape \[41, 32\].*\[40, 32\]"),
])
def test_wrong_tensors_are_named(tmp_path, change, message):
    weights = published(tmp_path)
    for name, shape in change.items():
        weights.pop(name, None)
        if shape:
            weights[name] = torch.zeros(shape)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(FlowspecError, match=message) as caught:
        load_head(tmp_path, None, torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x40\x00\x00\x00\x00\x00\x00\x00{", b"junk" * 100])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_files_are_one_line(tmp_path, name, content):
    published(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FlowspecError, match=name) as caught:
        load_head(tmp_path, None, torch.float32)
    assert "\n" not in str(caught.value)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    published(tmp_path)
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FlowspecError, match="holds more than tensors"):
        load_head(tmp_path, None, torch.float32)


def test_missing_files_and_other_targets(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        load_head(tmp_path / "nowhere", None, torch.float32)
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
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FlowspecError, match="is not valid JSON"):
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
    path = tmp_path / "draft-lm" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights["model.norm.weight"]
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(FlowspecError, match=r"has no tensor model\.norm\.weight"):
        load_drafters("lm", tmp_path, torch.randn(V, H), EMBEDDING, "fp32", 2)
    path.write_bytes(b"junk")
    with pytest.raises(FlowspecError, match=r"model\.safetensors is truncated or damaged") as caught:
        load_drafters("lm", tmp_path, torch.randn(V, H), EMBEDDING, "fp32", 2)
    assert "\n" not in str(caught.value)


def test_the_targets_embeddings_are_wanted_by_what_looks_them_up(tmp_path):
    """Their file is read as a whole to check it."""
    stored = published(tmp_path / "eagle2")
    safetensors.torch.save_file(stored, tmp_path / "eagle2" / "model.safetensors")
    with_own = next(name for name in stored if name.endswith("embed_tokens.weight"))
    assert not needs_embedding("eagle2", tmp_path)
    del stored[with_own]
    safetensors.torch.save_file(stored, tmp_path / "eagle2" / "model.safetensors")
    assert [kind for kind in ("eagle2", "eagle3", "spd", "lm") if needs_embedding(kind, tmp_path)] == [
        "eagle2", "eagle3", "spd"]

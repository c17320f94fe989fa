"""Reading and writing EAGLE-3 checkpoints, and every way in which one can be wrong or not fit."""

import json

import pytest
import safetensors.torch
import torch
from kits.draft_heads import VARIANTS, causal_pass, published_eagle3
from transformers import Qwen3Config

from flowspec_edge.drafting.checkpoint import HeadFiles
from flowspec_edge.drafting.eagle.eagle3_formats import head3_config, head3_layers, load_head3, save_head3
from flowspec_edge.drafting.load import load_drafters
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.sharding.drafts import open_draft

T, V = 24, 61
TARGETS = torch.randn(V, T, generator=torch.Generator().manual_seed(1))


def probe(head):
    """The logits of three causal rows."""
    head.prepare()
    with torch.inference_mode():
        fused = head.fuse(torch.linspace(-1, 1, 9 * T).reshape(3, 3 * T))
        return head.logits(causal_pass(head, fused, [1, 2, 3]))


def rewrite(directory, weights):
    whole = {name: weight.contiguous() for name, weight in weights.items()}
    safetensors.torch.save_file(whole, directory / "model.safetensors")


@pytest.mark.parametrize("drafted", [V, 20])
def test_round_trip(tmp_path, drafted):
    published_eagle3(tmp_path, 0, T, V, drafted=drafted, kv_heads=2, rope_theta=5e4, attention_bias=False,
                     eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]})
    head = load_head3(tmp_path, TARGETS, torch.float32)
    assert torch.equal(head.embed_tokens.weight, TARGETS)
    save_head3(head, tmp_path / "again", torch.float32)
    stored = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    assert "embed_tokens.weight" not in stored
    assert ("d2t" in stored) == ("t2d" in stored) == (drafted < V)
    again = load_head3(tmp_path / "again", TARGETS, torch.float32)
    assert torch.equal(probe(head), probe(again))
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (drafted, T)
    assert config["rope_theta"] == 5e4
    assert head3_layers(tmp_path, again.config, 8) == (2, 4, 6)


def test_half_precision_leaves_the_mapping_alone(tmp_path):
    _, weights = published_eagle3(tmp_path, 0, T, V, drafted=20)
    rewrite(tmp_path, {n: w.half() if w.is_floating_point() else w for n, w in weights.items()})
    head = load_head3(tmp_path, TARGETS, torch.bfloat16)
    assert head.fc.weight.dtype == head.embed_tokens.weight.dtype == torch.bfloat16
    assert (head.d2t.dtype, head.t2d.dtype) == (torch.int64, torch.bool)
    assert head.target_ids().tolist() == weights["t2d"].nonzero().flatten().tolist()
    save_head3(head, tmp_path / "again", torch.float16)
    stored = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    assert (stored["d2t"].dtype, stored["t2d"].dtype, stored["fc.weight"].dtype) == (
        torch.int64, torch.bool, torch.float16)


@pytest.mark.parametrize("layout", ["bin", "sharded", "sharded bin", "model.", "module.", "module.model."])
def test_other_layouts_are_the_same_head(tmp_path, layout):
    _, weights = published_eagle3(tmp_path, 0, T, V, drafted=20, kv_heads=2)
    expected = probe(load_head3(tmp_path, TARGETS, torch.float32))
    (tmp_path / "model.safetensors").unlink()
    if layout.endswith("."):
        weights["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(3)  # as old releases stored it
        rewrite(tmp_path, {(n if n in ("d2t", "t2d") else layout + n): w for n, w in weights.items()})
    elif layout == "bin":
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        name, save = (("model-{}.safetensors", safetensors.torch.save_file) if layout == "sharded" else
                      ("pytorch_model-{}.bin", torch.save))
        names = sorted(weights)
        parts = {name.format(i): {n: weights[n] for n in names[i::2]} for i in (0, 1)}
        for file, part in parts.items():
            save(part, tmp_path / file)
        index = "model.safetensors.index.json" if layout == "sharded" else "pytorch_model.bin.index.json"
        (tmp_path / index).write_text(json.dumps({"weight_map": {n: f for f, p in parts.items() for n in p}}))
    assert torch.equal(probe(load_head3(tmp_path, TARGETS, torch.float32)), expected)
    if layout == "sharded":
        (tmp_path / "model-1.safetensors").unlink()
        with pytest.raises(FlowspecError, match=r"model-1\.safetensors is missing"):
            load_head3(tmp_path, TARGETS, torch.float32)
        for wrong, says in (([], "not an index of weights"),
                            ({"weight_map": {"fc.weight": "../x.safetensors"}}, "name of a file beside it")):
            (tmp_path / index).write_text(json.dumps(wrong))
            with pytest.raises(FlowspecError, match=says):
                load_head3(tmp_path, TARGETS, torch.float32)


def test_equal_vocabularies_may_bring_a_mapping_of_nothing(tmp_path):
    _, weights = published_eagle3(tmp_path, 0, T, V)
    identity = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    rewrite(tmp_path, {**weights, **identity})
    assert load_head3(tmp_path, TARGETS, torch.float32).target_ids().tolist() == list(range(V))
    rewrite(tmp_path, {**weights, **identity, "d2t": torch.arange(V)})
    with pytest.raises(FlowspecError, match="tensor d2t does not belong"):
        load_head3(tmp_path, TARGETS, torch.float32)


@pytest.mark.parametrize(("change", "message"), [
    ({"fc.weight": None}, "tensor fc.weight is missing"),
    ({"d2t": None, "t2d": None}, "drafts 20 of 61 tokens, and neither d2t nor t2d says which"),
    ({"d2t": None, "t2d": torch.ones(V, dtype=torch.bool)}, "t2d marks 61 tokens, and the head drafts 20"),
    ({"fc2.bias": torch.zeros(T)}, "tensor fc2.bias does not belong in an EAGLE-3 head"),
    ({"midlayer.mlp.up_proj.weight": torch.zeros(41, T)}, r"up_proj.weight has shape \[41, 24\].*\[40, 24\]"),
    ({"fc.weight": torch.zeros(T, 5 * T)}, "takes 120 values, but 3 captured states of width 24 have 72"),
    ({"t2d": torch.ones(60, dtype=torch.bool)}, r"t2d has shape \[60\], config.json asks for \[61\]"),
    ({"d2t": torch.zeros(19, dtype=torch.int64)}, r"d2t has shape \[19\], config.json asks for \[20\]"),
    ({"d2t": torch.full((20,), 42)}, "d2t maps a draft token to 61, but the target's vocabulary has 61"),
    ({"d2t": torch.full((20,), -1)}, "d2t maps a draft token to -1, but the target's vocabulary has 61"),
    ({"d2t": -torch.arange(20)}, "d2t maps 20 draft tokens to 1 of the target's"),
    ({"t2d": torch.ones(V, dtype=torch.bool)}, "t2d marks 61 tokens, which are not the 20 that d2t maps to"),
    ({"d2t": torch.zeros(20)}, r"d2t holds torch.float32, not torch.int64"),
    ({"embed_tokens.weight": torch.zeros(V + 3, T)}, r"embed_tokens.weight has shape \[64, 24\].*\[61, 24\]"),
    ({"model.fc.weight": torch.zeros(T, 3 * T)}, "tensor fc.weight is stored twice, also as model.fc.weight"),
])
def test_wrong_tensors_are_named(tmp_path, change, message):
    _, weights = published_eagle3(tmp_path, 0, T, V, drafted=20)
    rewrite(tmp_path, {n: w for n, w in {**weights, **change}.items() if w is not None})
    with pytest.raises(FlowspecError, match=message) as caught:
        load_head3(tmp_path, TARGETS, torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("change", "config", "message"), [
    ({"efficient_lm_head.weight": None}, {}, "tensor efficient_lm_head.weight is missing"),
    ({"efficient_lm_head_down_proj.weight": None}, {}, "tensor efficient_lm_head_down_proj.weight is missing"),
    ({"efficient_lm_head.weight": torch.zeros(V, 7)}, {}, r"down_proj.weight has shape \[8, 24\].*\[7, 24\]"),
    ({"lm_head.weight": None}, {}, "tensor lm_head.weight is missing, by which a candidate head scores"),
    ({}, {"num_candidates": 10}, "num_candidates must be a number of tokens, 16 at least, not 10"),
    ({}, {"num_candidates": "many"}, "num_candidates must be a number of tokens, 16 at least, not 'many'"),
])
def test_what_an_eagle4_head_can_lack(tmp_path, change, config, message):
    _, weights = published_eagle3(tmp_path, 0, T, V, **VARIANTS["EAGLE-4"] | config)
    rewrite(tmp_path, {n: w for n, w in {**weights, **change}.items() if w is not None})
    with pytest.raises(FlowspecError, match=message) as caught:
        load_head3(tmp_path, TARGETS, torch.float32)
    assert "\n" not in str(caught.value)


def test_an_eagle4_head_is_an_eagle3_head_with_a_window(tmp_path):
    published_eagle3(tmp_path, 0, T, V, **VARIANTS["EAGLE-4"])
    assert open_draft(tmp_path).kind.name == "eagle3"
    head = load_head3(tmp_path, TARGETS, torch.float32)
    assert (head.config.candidate_rank, head.config.num_candidates, head.cache_shape().kind.window) == (8, 16, 9)


@pytest.mark.parametrize(("shape", "targets", "message"), [
    ({}, torch.zeros(V, 32), "takes states of width 24, the target's have 32"),
    ({}, torch.zeros(70, T), "vocabulary is 61 tokens, the target's 70"),
    ({"width": 32, "target_hidden_size": T}, TARGETS,
     "width is 32, the target's 24, and it brings no embed_tokens.weight of its own"),
    ({"num_hidden_layers": 2}, TARGETS, "one layer, not 2"),
    ({"drafted": 99}, TARGETS, "draft_vocab_size 99 is more than vocab_size 61"),
    ({"norm_before_fc": True, "fc_norm": True}, TARGETS, "norm_before_fc and fc_norm exclude each other"),
    ({"transformer_layer_config": {"model_type": "qwen3_next"}}, TARGETS, "a layer of 'qwen3_next'"),
    ({"transformer_layer_config": {"hidden_size": "wide"}}, TARGETS, "hidden_size must be a whole number"),
    ({"architectures": ["Gemma4Eagle3Model"]}, TARGETS, "Gemma4Eagle3Model are not supported"),
])
def test_a_head_that_does_not_fit_is_refused(tmp_path, shape, targets, message):
    published_eagle3(tmp_path, 0, T, V, **shape)
    with pytest.raises(FlowspecError, match=message) as caught:
        load_head3(tmp_path, targets, torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("ids", "layers", "expected"), [
    (None, 36, (2, 18, 33)),
    ([2, 18, 33], 36, (2, 18, 33)),  # the layers' inputs
    ([1, 17, 32], 36, (2, 18, 33)),  # the same states as outputs
    ([24, 30, 36], 36, (24, 30, 36)),  # the last one after all layers
    ([0, 5, 3], 8, (0, 5, 3)),  # in fc's order
    ([1, 46, 94], 94, "reach past the target, which has 94 layers"),
    ([2, 16, 33], 32, "reach past the target, which has 32 layers"),
    ([-1, 2, 3], 32, "reach past"),
    ([2, 5], 32, (2, 5)),  # as many states
    ("2,5,9", 32, "must be a list of layers"),
    ([2, 5.5, 9], 32, "must be a list of layers"),
])
@pytest.mark.parametrize("nested", [False, True])
def test_captured_layers_are_those_that_the_config_names(tmp_path, ids, layers, expected, nested):
    named = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    published_eagle3(tmp_path, 0, T, V, **({"eagle_config": named} if nested else named))
    if isinstance(expected, tuple):
        assert head3_layers(tmp_path, head3_config(HeadFiles(tmp_path)), layers) == expected
        return
    with pytest.raises(FlowspecError, match=expected):
        head3_layers(tmp_path, head3_config(HeadFiles(tmp_path)), layers)


@pytest.mark.parametrize(("form", "ids", "expected"), [
    ("speculators", None, (2, 18, 33)),
    ("speculators", [1, 17, 32], (1, 17, 32)),  # inputs, whatever the first is
    ("deepspec", [1, 9, 17, 25, 33], (2, 10, 18, 26, 34)),  # outputs
    ("deepspec", [0, 9], (1, 10)),
])
def test_every_publisher_counts_layers_in_a_way(tmp_path, form, ids, expected):
    name = "target_layer_ids" if form == "deepspec" else "eagle_aux_hidden_state_layer_ids"
    published_eagle3(tmp_path, 0, T, V, form=form, states=len(ids or [0] * 3), **{name: ids})
    assert head3_layers(tmp_path, head3_config(HeadFiles(tmp_path)), 36) == expected


def test_what_a_layer_leaves_out_is_its_familys_default(tmp_path):
    """As transformers' own class of it has it, not Llama's: heads of 128, whatever the width."""
    given = {"num_hidden_layers": 1, "num_key_value_heads": 8, "vocab_size": V, "hidden_size": 2048}
    layer = Qwen3Config(**given)
    raw = {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "qwen3", **given},
           "norm_before_residual": True, "draft_vocab_size": V, "eagle_aux_hidden_state_layer_ids": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = head3_config(HeadFiles(tmp_path))
    for field in ("head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "rms_norm_eps",
                  "num_key_value_heads"):
        assert getattr(config, field) == getattr(layer, field), field
    assert config.ropes[""]["rope_theta"] == layer.rope_parameters["rope_theta"]
    assert (config.norm_before_residual, config.family.form.head_norms, config.fc_norm) == (True, True, False)


def test_a_layer_that_slides_limits_the_window(tmp_path):
    published_eagle3(tmp_path, 0, T, V, form="speculators", qk_norm=True, sliding_window=32,
                     layer_types=["sliding_attention"], use_sliding_window=True)
    assert head3_config(HeadFiles(tmp_path)).max_position_embeddings == 32


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_of_a_variants_tensors_are_needed(tmp_path, variant):
    """A switch without its tensors is an error, and so are tensors without their switch."""
    published_eagle3(tmp_path, 0, T, V, **VARIANTS[variant])
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    load_head3(tmp_path, TARGETS, torch.float32)
    for name in stored:
        if "_norm" in name and name not in ("norm.weight", "lm_head.weight"):
            rewrite(tmp_path, {n: w for n, w in stored.items() if n != name})
            with pytest.raises(FlowspecError, match="is missing from the EAGLE-3 head"):
                load_head3(tmp_path, TARGETS, torch.float32)
    if "fc_norm.0.weight" in stored:
        rewrite(tmp_path, stored)
        raw = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**raw, "fc_norm": False}))
        with pytest.raises(FlowspecError, match=r"tensor fc_norm\.0\.weight does not belong"):
            load_head3(tmp_path, TARGETS, torch.float32)


def test_load_drafters_asks_for_the_captured_states(tmp_path):
    published_eagle3(tmp_path / "eagle3", 0, T, V, drafted=20)
    drafter = load_drafters("eagle3", tmp_path, torch.randn(V, T), TARGETS, "fp32", 8)()
    assert drafter.taps == (2, 4, 5)
    with pytest.raises(FlowspecError, match="vocabulary has 61 tokens, the target's 60"):
        load_drafters("eagle3", tmp_path, torch.randn(60, T), TARGETS, "fp32", 8)
    with pytest.raises(UsageError, match=r"no EAGLE-3 head at .*config\.json is missing"):
        load_drafters("eagle3", tmp_path / "none", torch.randn(V, T), TARGETS, "fp32", 8)

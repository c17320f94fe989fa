"""Heads whose files leave out what can be derived or shared, or name it otherwise: the files decide, whatever
config.json says.  Each is compared with a float64 recomputation from the formulas."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from kits.draft_heads import Eagle2, Eagle3, Session, published_eagle3
from kits.tiny_models import tiny_llama

from flowspec_edge.drafting.format import TargetFacts
from flowspec_edge.drafting.load import load_drafters, needs_embedding
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.messages import Payload, Tap
from flowspec_edge.model.output_head import OutputHead
from flowspec_edge.sharding.drafts import check_fit, open_draft
from flowspec_edge.stage.quant.schemes import head_scheme

H, V, LAYERS = 32, 64, 8
HEADS, KV_HEADS, EPS = 4, 2, 1e-5
GENERATOR = torch.Generator().manual_seed(5)
EMBEDDING, LM_HEAD = (torch.randn(V, H, generator=GENERATOR) for _ in range(2))
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "vocab_size": V,
          "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": HEADS,
          "num_key_value_heads": KV_HEADS, "rms_norm_eps": EPS, "hidden_act": "silu",
          "max_position_embeddings": 2048}


def eagle2_weights(*biases):
    """A head's tensors by their published names, with its own embeddings and these biases."""
    kv = H // HEADS * KV_HEADS
    shapes = {"fc": (H, 2 * H), "layers.0.self_attn.q_proj": (H, H), "layers.0.self_attn.k_proj": (kv, H),
              "layers.0.self_attn.v_proj": (kv, H), "layers.0.self_attn.o_proj": (H, H),
              "layers.0.mlp.gate_proj": (40, H), "layers.0.mlp.up_proj": (40, H),
              "layers.0.mlp.down_proj": (H, 40), "embed_tokens": (V, H)}
    generator = torch.Generator().manual_seed(11)
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5
               for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.rand(H, generator=generator) + 0.5
    for name, shape in shapes.items():
        if name.rpartition(".")[2] in biases:
            weights[f"{name}.bias"] = torch.randn(shape[0], generator=generator)
    return weights


def write(directory, config, weights):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in weights.items()},
                                directory / "model.safetensors")


def agrees(directory, weights, lm_head, ids=None, target=LM_HEAD):
    """Draft with the head in ``directory``/eagle2 as the formulas over ``weights`` do; ``ids``: of the tokens
    that it can draft."""
    arrays = {name: tensor.double().numpy() for name, tensor in weights.items()}
    reference = Eagle2(arrays, lm_head.double().numpy(), HEADS, KV_HEADS, EPS)
    if ids is not None:
        whole = reference.logits
        others = np.setdiff1d(np.arange(V), ids)

        def logits(output):
            ranked = whole(output)
            ranked[others] = -np.inf
            return ranked

        reference.logits = logits
    drafter = load_drafters("eagle2", directory, target, EMBEDDING, "fp32", LAYERS)()
    Session(reference, drafter, H, V, 3).random_history(8)


@pytest.mark.parametrize("biases", [(), ("fc",), ("fc", "q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj"),
                                    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")])
@pytest.mark.parametrize("config", [{"bias": False, "qkv_bias": True},
                                    {"attention_bias": True, "mlp_bias": True}])
def test_the_file_decides_which_biases_an_eagle2_head_has(tmp_path, biases, config):
    weights = eagle2_weights(*biases)
    write(tmp_path / "eagle2", CONFIG | config, weights)
    agrees(tmp_path, weights, LM_HEAD)


def converted(form):
    """(config.json, names of tensors) as a converter writes them."""
    if form == "vLLM":
        inner = {**CONFIG, "num_hidden_layers": 1}
        return ({"architectures": ["EAGLEModel"], "model_type": "eagle", "model": inner, "vocab_size": V,
                 "num_lookahead_tokens": 5, "eagle_fc_bias": False, "truncated_vocab_size": V},
                lambda name: (f"model.{name}" if name.startswith(("layers.", "embed_tokens."))
                              else name))
    if form == "speculators":
        return ({"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle",
                 "fusion_bias": False, "layernorms": False, "transformer_layer_config": CONFIG,
                 "transformer_layer_architecture": "LlamaDecoderLayer",
                 "speculators_config": {"verifier": {"name_or_path": "meta-llama/Llama-2-7b-chat-hf"}}},
                lambda name: name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."))
    return CONFIG, lambda name: f"module._orig_mod.{name}"


@pytest.mark.parametrize("form", ["vLLM", "speculators", "a compiled module"])
@pytest.mark.parametrize("beside", ["", "a copy of lm_head", "an lm_head of its own", "no embeddings"])
def test_converted_eagle2_heads_are_the_same_heads(tmp_path, form, beside, caplog):
    config, name_of = converted(form)
    weights = eagle2_weights("fc")
    own = torch.randn(V, H, generator=torch.Generator().manual_seed(9))
    stored = dict(weights)
    if beside == "no embeddings":
        del stored["embed_tokens.weight"]
        weights["embed_tokens.weight"] = EMBEDDING
    elif beside:
        stored["lm_head.weight"] = LM_HEAD if "copy" in beside else own
    write(tmp_path / "eagle2", config, {name_of(name): tensor for name, tensor in stored.items()})
    ranks = own if beside == "an lm_head of its own" else LM_HEAD
    agrees(tmp_path, weights, ranks)
    assert ("lm_head.weight is not the target's" in caplog.text) == (ranks is own)
    assert needs_embedding("eagle2", tmp_path) == (beside == "no embeddings")
    draft = open_draft(tmp_path / "eagle2")
    assert (draft.kind.name, draft.embeddings) == ("eagle2", beside == "no embeddings")
    assert draft.parameters == sum(t.numel() for n, t in stored.items() if n != "lm_head.weight")
    check_fit(draft, TargetFacts(tmp_path, H, V, LAYERS))


@pytest.mark.parametrize("lm_head", ["none", "whole", "its rows"])
def test_a_token_map_of_vllm_names_the_tokens_that_are_drafted(tmp_path, lm_head):
    config, name_of = converted("vLLM")
    weights, ids = eagle2_weights(), torch.tensor([50, 3, 8, 21, 40, 13, 2, 60, 33, 17])
    stored = {**weights, "token_map": ids}
    if lm_head != "none":
        stored["lm_head.weight"] = LM_HEAD if lm_head == "whole" else LM_HEAD[ids]
    write(tmp_path / "eagle2", config | {"truncated_vocab_size": len(ids)},
          {name_of(name): tensor for name, tensor in stored.items()})
    agrees(tmp_path, weights, LM_HEAD, ids.numpy())


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "module"])
def test_nested_state_dicts_are_found(tmp_path, key):
    weights = eagle2_weights("fc")
    write(tmp_path / "eagle2", CONFIG, weights)
    (tmp_path / "eagle2/model.safetensors").unlink()
    torch.save({"epoch": 3, "optimizer": {"lr": torch.ones(1)}, key: weights},
               tmp_path / "eagle2/pytorch_model.bin")
    agrees(tmp_path, weights, LM_HEAD)
    assert open_draft(tmp_path / "eagle2").kind.name == "eagle2"


def quantised(kind):
    scheme = head_scheme(kind)
    packed = scheme.linear(V, H, False, torch.float32)
    packed.fill(scheme.quantise(LM_HEAD), None)
    matrix = scheme.dequantise(scheme.quantise(LM_HEAD))
    return OutputHead([packed], H, torch.float32, torch.device("cpu")), matrix


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_copy_is_recognised_beside_a_quantised_lm_head(tmp_path, kind, caplog):
    target, matrix = quantised(kind)
    weights = eagle2_weights()
    write(tmp_path / "eagle2", CONFIG, {**weights, "lm_head.weight": LM_HEAD})
    agrees(tmp_path, weights, matrix, target=target)
    assert "is not the target's" not in caplog.text


LEFT_OUT = {  # what a file lacks -> what is stored, of a head's ``weights``
    "lm_head": lambda weights: ("lm_head.weight",),
    "t2d": lambda weights: ("t2d",),
    "d2t": lambda weights: ("d2t",),
    "lm_head and t2d": lambda weights: ("lm_head.weight", "t2d"),
    "lm_head and d2t": lambda weights: ("lm_head.weight", "d2t"),
    "nothing, lm_head whole": lambda weights: (),
}


def eagle3_agrees(directory, raw, weights, target=LM_HEAD, embedding=EMBEDDING, **switches):
    arrays = {name: tensor.double().numpy() for name, tensor in weights.items()}
    reference = Eagle3(arrays, HEADS, KV_HEADS, raw["rms_norm_eps"])
    drafter = load_drafters("eagle3", directory, target, embedding, "fp32", LAYERS)()

    def tell(rows, known):
        for place, layer in enumerate(drafter.taps):
            own = np.ascontiguousarray(known[:, place * H : (place + 1) * H])
            drafter.tap(Tap(1, 0, 0, layer, np.array(rows, np.int32), Payload("float32", own)))

    Session(reference, drafter, 3 * H, V, 3, tell=tell).random_history(8)


@pytest.mark.parametrize("form", ["classic", "speculators"])
@pytest.mark.parametrize("gone", LEFT_OUT)
@pytest.mark.parametrize("drafted", [V, 20])
def test_the_rest_of_an_eagle3_head_is_derived_or_the_targets(tmp_path, form, gone, drafted):
    told = 7 if drafted == V else None  # config.json's draft_vocab_size is wrong, or absent
    home = tmp_path / "eagle3"
    raw, weights = published_eagle3(home, 2, H, V, drafted=drafted, kv_heads=KV_HEADS, form=form)
    absent = LEFT_OUT[gone](weights)
    stored = safetensors.torch.load_file(home / "model.safetensors")
    ids = weights["t2d"].nonzero().flatten() if drafted < V else torch.arange(V)
    if "lm_head.weight" in absent:
        weights["lm_head.weight"] = LM_HEAD[ids]
    elif "whole" in gone:
        stored["lm_head.weight"] = LM_HEAD
        weights["lm_head.weight"] = LM_HEAD[ids]
    stored = {name: tensor for name, tensor in stored.items() if name not in absent}
    safetensors.torch.save_file(stored, home / "model.safetensors")
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**config, "draft_vocab_size": told}))
    eagle3_agrees(tmp_path, raw, {"embed_tokens.weight": EMBEDDING, **weights})
    draft = open_draft(home)
    assert draft.kind.name == "eagle3"
    if {"lm_head.weight", "d2t"} & set(absent) == {"lm_head.weight"}:
        assert draft.copied_values == (drafted * H if drafted < V else 0)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_of_a_quantised_lm_head(tmp_path, kind):
    raw, weights = published_eagle3(tmp_path / "eagle3", 2, H, V, drafted=20, kv_heads=KV_HEADS)
    stored = safetensors.torch.load_file(tmp_path / "eagle3/model.safetensors")
    del stored["lm_head.weight"]
    safetensors.torch.save_file(stored, tmp_path / "eagle3/model.safetensors")
    target, matrix = quantised(kind)
    weights["lm_head.weight"] = matrix[weights["t2d"]]
    eagle3_agrees(tmp_path, raw, {"embed_tokens.weight": EMBEDDING, **weights}, target)


@pytest.mark.parametrize("drafted", [V, 20])
def test_tied_embeddings_of_its_own_are_an_eagle3_heads_lm_head(tmp_path, drafted):
    raw, weights = published_eagle3(tmp_path / "eagle3", 2, H, V, drafted=drafted, kv_heads=KV_HEADS,
                                    embedding=True, tie_word_embeddings=True)
    stored = safetensors.torch.load_file(tmp_path / "eagle3/model.safetensors")
    del stored["lm_head.weight"]
    safetensors.torch.save_file(stored, tmp_path / "eagle3/model.safetensors")
    own = weights["embed_tokens.weight"]
    weights["lm_head.weight"] = own[weights["t2d"]] if drafted < V else own
    eagle3_agrees(tmp_path, raw, weights)


def test_biases_copies_of_the_verifier_and_vllms_name_of_d2t(tmp_path):
    raw, weights = published_eagle3(tmp_path / "eagle3", 2, H, V, drafted=20, kv_heads=KV_HEADS,
                                    form="speculators")
    generator = torch.Generator().manual_seed(4)
    for name in ("fc", "midlayer.self_attn.q_proj", "midlayer.self_attn.v_proj"):
        weights[f"{name}.bias"] = torch.randn(len(weights[f"{name}.weight"]), generator=generator)
    stored = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    stored["draft_id_to_target_id"] = stored.pop("d2t")
    stored |= {"verifier_lm_head.weight": torch.ones(20, H), "verifier_norm.weight": torch.ones(H)}
    safetensors.torch.save_file(stored, tmp_path / "eagle3/model.safetensors")
    eagle3_agrees(tmp_path, raw, {"embed_tokens.weight": EMBEDDING, **weights})


def test_a_narrower_head_cannot_rank_by_the_targets_lm_head(tmp_path):
    published_eagle3(tmp_path / "eagle3", 2, H, V, width=16, embedding=True, target_hidden_size=H)
    stored = safetensors.torch.load_file(tmp_path / "eagle3/model.safetensors")
    del stored["lm_head.weight"]
    safetensors.torch.save_file(stored, tmp_path / "eagle3/model.safetensors")
    with pytest.raises(FlowspecError, match=r"no lm_head\.weight, and its width is 16, so .* of width 32"):
        load_drafters("eagle3", tmp_path, LM_HEAD, EMBEDDING, "fp32", LAYERS)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_a_model_in_the_place_of_a_head_is_named(tmp_path, kind):
    tiny_llama(tmp_path / kind, layers=2, hidden=H, vocab=V)
    with pytest.raises(UsageError, match=r"of the kind lm \(small language model\): name it .*/draft-lm$"):
        load_drafters(kind, tmp_path, LM_HEAD, EMBEDDING, "fp32", LAYERS)
    assert open_draft(tmp_path / kind).kind.name == "lm"


def test_an_adapter_in_the_place_of_a_head_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"is an adapter \(LoRA\)"):
        open_draft(tmp_path)

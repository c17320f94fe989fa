"""Block heads from files: one line for what does not fit, and what is written is read again."""

import json

import pytest
import safetensors.torch
import torch
from kits.block_drafters import VARIANTS, VOCABULARY, WIDTH, published_block

from flowspec_edge.drafting.block.formats import FORMAT, block_config, load_block_head, save_block_head
from flowspec_edge.drafting.block.head import BlockConfig, BlockHead
from flowspec_edge.drafting.checkpoint import on_meta
from flowspec_edge.drafting.format import TargetFacts
from flowspec_edge.drafting.load import load_drafters
from flowspec_edge.errors import FlowspecError
from flowspec_edge.sharding.drafts import check_fit, open_draft
from flowspec_edge.stage.quant.schemes import quantise_linears, scheme

EMBEDDING = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))


def changed(path, **fields):
    raw = json.loads((path / "config.json").read_text())
    raw |= {key: {**raw.get(key, {}), **value} if isinstance(value, dict) else value
            for key, value in fields.items()}
    (path / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(("fields", "said"), [
    ({"block_size": 1}, "block_size must be 2 to 64, not 1"),
    ({"block_size": "8"}, "block_size must be a whole number, not '8'"),
    ({"dflash_config": {"mask_token_id": 61}}, "mask_token_id does not fit into the vocabulary of 61"),
    ({"dflash_config": {"mask_token_id": None}}, "mask_token_id must be a whole number"),
    ({"dflash_config": {"target_layer_ids": [1, "2"]}}, "the list of the target's layers"),
    ({"dflash_config": {"target_layer_ids": [1, 8]}}, "reach past the target, which has 8 layers"),
    ({"dflash_config": {"markov_rank": 4, "markov_head_type": "rnn"}}, "a Markov head of the type 'rnn'"),
    ({"dflash_config": {"projector_type": "domino"}}, "the format Domino cannot be run"),
    ({"model_type": "llama"}, "layers of 'llama' are not supported"),
    ({"head_dim": 16}, "has shape .*, config.json asks for"),
    ({"hidden_size": 64, "vocab_size": 62}, "the head's width is 64, the target's 32"),
])
def test_what_does_not_fit_is_one_line(tmp_path, fields, said):
    published_block(tmp_path, ids=[1, 5])
    changed(tmp_path, **fields)
    with pytest.raises(FlowspecError, match=said) as caught:
        load_block_head(tmp_path, EMBEDDING, torch.float32, 8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("fields", "said"), [
    ({"selector_top_k": None}, "selector_top_k must be a whole number, not None"),
    ({"selector_top_k": 62}, "selector_top_k must be 1 to 61, not 62"),
    ({"conv_kernel_size": 7}, "conv_kernel_size must be 1 to 6, not 7"),
    ({"conv_group_size": 5}, "conv_group_size 5 does not divide hidden_size 32"),
    ({"output_multiplier": 0.2}, "a head with output_multiplier 0.2 is not supported, only with 1"),
    ({"final_logit_softcapping": 20.0}, "a head with final_logit_softcapping 20.0 is not supported"),
])
def test_a_dflash2_head_that_does_not_fit_is_one_line(tmp_path, fields, said):
    published_block(tmp_path, ids=[1, 5], top=5)
    changed(tmp_path, dflash_config=fields)
    with pytest.raises(FlowspecError, match=said) as caught:
        block_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("shape", "published"), [
    # RedHatAI/Qwen3-8B-speculator.dflash2: the hub's count of its safetensors file.
    ({"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151_936}, 1_169_573_120),
    # z-lab/Qwen3.8-27B-DFlash2: 1.924 billion, by readers of its header.
    ({"hidden_size": 5120, "intermediate_size": 17408, "vocab_size": 248_320}, 1_924_404_480),
])
def test_it_has_the_parameters_of_published_heads(shape, published):
    config = BlockConfig(**shape, num_hidden_layers=5, num_attention_heads=32, num_key_value_heads=8,
                         head_dim=128, captured=(1,) * 5, conv_kernel_size=2, conv_group_size=16,
                         selector_rank=256, selector_top_k=16, draft_vocab_size=shape["vocab_size"])
    head = on_meta(BlockHead, config)
    own = sum(weight.numel() for name, weight in head.named_parameters() if name != "embed_tokens.weight")
    assert own == published


def test_a_dspark_head_has_the_parameters_of_a_published_one(tmp_path):
    """RedHatAI/Qwen3.8-27B-speculator.dspark: the count of its copy in FP8, less the confidence head, a row of weights
    for the state and the 256 values of the Markov head, and a bias."""
    layers = {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5,
              "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248_320,
              "sliding_window": 2048, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 5}
    (tmp_path / "config.json").write_text(json.dumps({
        "speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [4, 12, 20, 28, 36, 44, 52, 60],
        "block_size": 8, "mask_token_id": 248_070, "markov_rank": 256, "draft_vocab_size": 248_320,
        "transformer_layer_config": layers}))
    head = FORMAT.on_meta(tmp_path)
    own = sum(weight.numel() for name, weight in head.named_parameters() if name != "embed_tokens.weight")
    assert own == 1_988_431_617 - (5120 + 256 + 1)


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path):
    published_block(tmp_path, form="speculators", ids=[2], drafted=20)
    path = tmp_path / "model.safetensors"
    whole = safetensors.torch.load_file(path)
    for name in ("lm_head.weight", "fc.weight"):
        safetensors.torch.save_file({n: w for n, w in whole.items() if n != name}, path)
        with pytest.raises(FlowspecError, match=f"tensor {name} is missing"):
            load_block_head(tmp_path, EMBEDDING, torch.float32, 8)
    safetensors.torch.save_file({**whole, "hidden_dim_adapter.proj.weight": torch.zeros(2)}, path)
    with pytest.raises(FlowspecError, match=r"hidden_dim_adapter\S+ does not belong in"):
        load_block_head(tmp_path, EMBEDDING, torch.float32, 8)
    safetensors.torch.save_file({**whole, "d2t": torch.zeros(20, dtype=torch.int64) - 1}, path)
    with pytest.raises(FlowspecError, match="maps a draft token to -1"):
        load_block_head(tmp_path, EMBEDDING, torch.float32, 8)


@pytest.mark.parametrize("variant", ["z-lab, windows", "JetSpec", "SpecForge, gated"])
def test_what_is_written_is_read_again(tmp_path, variant):
    published_block(tmp_path / "given", **VARIANTS[variant])
    head = load_block_head(tmp_path / "given", EMBEDDING, torch.float32, 8)
    save_block_head(head, tmp_path / "written", torch.float32)
    again = load_block_head(tmp_path / "written", EMBEDDING, torch.float32, 8)
    for key in ("captured", "block_size", "mask_token_id", "from_root", "causal", "windows", "markov_rank",
                "markov_gated", "draft_vocab_size", "rope_parameters"):
        assert getattr(again.config, key) == getattr(head.config, key), key
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


@pytest.mark.parametrize(("variant", "kind"), [("z-lab", "dflash"), ("JetSpec", "dflash"),
                                               ("z-lab, DFlash2", "dflash"), ("DeepSpec", "dspark"),
                                               ("speculators, DSpark", "dspark")])
def test_sharding_recognises_and_checks_it(tmp_path, variant, kind):
    published_block(tmp_path, **VARIANTS[variant])
    draft = open_draft(tmp_path)
    assert draft.kind.name == kind
    assert draft.embeddings == (variant != "DeepSpec")
    assert draft.kv_row == 2 * 2 * 8 * block_config(tmp_path).num_hidden_layers
    check_fit(draft, TargetFacts(tmp_path, WIDTH, VOCABULARY, 8))
    for wrong, said in (((WIDTH, VOCABULARY, 4), "reach past the target"),
                        ((64, VOCABULARY, 8), "the head's width is 32, the target's 64"),
                        ((WIDTH, 70, 8), "vocabulary is 61 tokens, the target's 70")):
        with pytest.raises(FlowspecError, match=said):
            check_fit(draft, TargetFacts(tmp_path, *wrong))


def test_matrices_in_four_bits_still_draft(tmp_path):
    published_block(tmp_path / "dspark", width=64, rank=32, gated=True, vocabulary=128, ids=[1, 5])
    target = torch.randn(128, 64)

    def packed(module):
        quantise_linears(module, scheme("int4", 32), torch.device("cpu"))

    make = load_drafters("dspark", tmp_path, target, target, "fp32", 8, packed)
    head = make()._head
    assert isinstance(head.layers[0].self_attn.k_proj, type(head.fc))
    assert not isinstance(head.fc, torch.nn.Linear)
    assert isinstance(head.markov_head.markov_w1, torch.nn.Embedding)

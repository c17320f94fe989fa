"""EagleDrafter against a float64 recomputation written from the formulas, without any cache."""

from functools import partial

import numpy as np
import pytest
import torch
from kits.draft_heads import GREEDY, Eagle2, Session
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter, EagleHead, eagle_config, load_head, save_head
from flowspec_edge.drafting.ngram import NgramDrafter
from flowspec_edge.drafting.tree_drafter import TreeDrafter
from flowspec_edge.errors import ProtocolError
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.quant.base import QuantLinear
from flowspec_edge.stage.quant.schemes import head_scheme, quantise_linears
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

H, V, HEADS, KV_HEADS = 32, 61, 4, 2


def make_head(seed, kv_heads=KV_HEADS, **extra):
    torch.manual_seed(seed)
    head = EagleHead(eagle_config({"vocab_size": V, "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 1,
                                   "num_attention_heads": HEADS, "num_key_value_heads": kv_heads, **extra}, "a head"))
    head = head.double()
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn_like(p) * 0.8 / p.shape[-1] ** 0.5)
    return head


def reference_of(head, lm_head):
    weights = {n: p.detach().double().numpy() for n, p in head.state_dict().items()}
    return Eagle2(weights, lm_head.double().numpy(), HEADS, head.config.num_key_value_heads,
                  head.config.rms_norm_eps, head.config.max_position_embeddings)


def session(seed, sampling=GREEDY, rank="draft", tau=0.7, **config):
    head = make_head(seed, **config)
    lm_head = torch.randn(V, H, dtype=torch.float64)
    reference = reference_of(head, lm_head)
    return Session(reference, EagleDrafter(head, lm_head), H, V, seed, sampling, rank, tau)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_agree_with_full_recomputation(seed):
    noisy = seed % 2 == 1
    s = session(seed, Sampling(temperature=0.8 if noisy else 0.0, seed=seed), "noise" if noisy else "draft",
                kv_heads=(1, 2, 4)[seed // 2])
    s.random_history(25)


@pytest.mark.parametrize("rope", [
    {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64}])
def test_a_head_turns_as_transformers_does(rope):
    given = {"rope_parameters": {**rope, "rope_theta": 1e4}, "max_position_embeddings": 64}
    head = make_head(3, **given)
    head.prepare()
    positions = torch.tensor([0, 1, 63, 5000])  # beyond the table's first size, too
    head.reach(5000)
    cos, sin, scale = head.rotation(positions)
    wanted = LlamaRotaryEmbedding(LlamaConfig(hidden_size=H, num_attention_heads=HEADS, **given))
    for found, turned in zip((cos, sin), wanted(torch.zeros(1), position_ids=positions[None]), strict=True):
        found = found[:, 0].float()
        half = found.shape[-1] // 2
        torch.testing.assert_close(found[:, half:], turned[0, :, half:])
    assert scale is None


@pytest.mark.parametrize("seed", range(2))
def test_a_rewound_drafter_knows_the_text_up_to_there(seed):
    session(seed + 20).rewinds()


def test_a_rewound_cache_gives_memory_back():
    s = session(3)
    s.commit(s.rng.integers(0, V, size=1200).tolist())
    s.plant()
    s.expand([s.root.id])
    assert s.drafter._cache.memory.rows == 1199
    s.rewind(5)
    assert s.drafter._cache.memory.rows == 256
    s.random_history(4)


@pytest.mark.parametrize("limit", [2, 5, 12])
def test_rows_see_no_further_than_the_head_was_trained_for(limit):
    """Prompts longer than the limit at once, texts that grow past it, trees deeper than it."""
    s = session(limit, max_position_embeddings=limit)
    s.random_history(25, prompt=limit + 3)
    s = session(limit + 1, max_position_embeddings=limit)
    s.commit([4, 2])
    s.plant()
    s.expand([s.root.id])
    at = s.root.id
    for _ in range(4):
        at = s.children[at][0]
        s.expand([at])
    s.every_node_again(3)


def test_root_again_without_new_text_runs_no_row():
    s = session(2)
    s.commit([1, 2, 3])
    s.plant()
    first = s.expand([s.root.id])
    rows = []
    s.drafter._head.register_forward_hook(lambda *_: rows.append(1))
    again = s.drafter.expand(DraftRequest(s.root.id, (s.root,), 3))
    assert not rows
    assert again.tokens.tolist() == first.tokens.tolist()
    assert again.scores.tolist() == first.scores.tolist()


def test_reset_forgets_everything():
    session(3).forgets()


@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_a_quantised_heads_matrices_are_joined(tmp_path, bits):
    """Its packed matrices, int8's two planes of them; it drafts as one with the values that they stand for."""
    config = eagle_config({"vocab_size": V, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1,
                           "num_attention_heads": 2, "num_key_value_heads": 1}, "a head")
    save_head(EagleHead(config), tmp_path, torch.float32)
    lm_head, features, found = torch.randn(V, 128), torch.randn(6, 128), []
    quantise = partial(quantise_linears, scheme=head_scheme(bits), device=torch.device("cpu"))
    packed, plain = (load_head(tmp_path, None, torch.float32, quantise=how) for how in (quantise, lambda module: None))
    with torch.inference_mode():
        for name, own in plain.named_modules():
            if isinstance(own, torch.nn.Linear) and isinstance(part := packed.get_submodule(name), QuantLinear):
                own.weight.copy_(part(torch.eye(own.in_features)).T - (0 if own.bias is None else own.bias[:, None]))
    for head in (packed, plain):
        drafter = EagleDrafter(head, lm_head)
        drafter.commit([0], None)
        drafter.commit(list(range(1, 7)), features)
        found.append(drafter.expand(DraftRequest(0, (DraftNode(0, -1, 6, 6),), V)))
    layer = packed.layer
    assert all(isinstance(part, QuantLinear) for part in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj))
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_allclose(found[0].scores, found[1].scores, atol=1e-4)


def test_misuse_is_named():
    s = session(6)
    s.commit([5])
    with pytest.raises(ProtocolError, match="nothing has been committed"):
        s.drafter.expand(DraftRequest(0, (DraftNode(0, -1, 5, 0),), 2))
    with pytest.raises(ProtocolError, match="only the first token"):
        s.drafter.commit([1], None)
    with pytest.raises(ProtocolError, match="as many features"):
        s.drafter.commit([1, 2], torch.zeros(1, H))
    s.commit([5, 6])
    s.plant()
    s.expand([s.root.id])
    with pytest.raises(ProtocolError, match="before its parent 77"):
        s.drafter.expand(DraftRequest(s.root.id, (DraftNode(80, 77, 1, 5),), 2))
    with pytest.raises(ProtocolError, match="before its parent 81"):  # 81 becomes root, unexpanded
        s.drafter.expand(DraftRequest(81, (DraftNode(82, 81, 1, 6),), 2))
    with pytest.raises(ProtocolError, match="root stands at position 9"):
        s.drafter.expand(DraftRequest(s.root.id, (DraftNode(s.root.id, -1, 1, 9),), 2))


SAMPLINGS = [Sampling(), Sampling(0.8, seed=3), Sampling(1.0, top_p=0.9, seed=4)]
RANKINGS = {  # by the request
    "different": lambda i: (SAMPLINGS[i % 3], "noise" if i % 2 else "draft", 0.7),
    "without noise": lambda i: (SAMPLINGS[i % 3], "draft", 0.5 + i / 10),
    "same noise": lambda i: (SAMPLINGS[1], "noise", 0.7),
    "other noise": lambda i: (Sampling(0.8, seed=i), "noise", 0.7),
}


def begun(head, lm_head, seed, ranking):
    """A drafter with a text of its own length."""
    drafter, rng = EagleDrafter(head, lm_head), np.random.default_rng(seed)
    drafter.reset(*ranking(seed))
    tokens = rng.integers(0, V, size=3 + 4 * seed).tolist()
    drafter.commit(tokens[:1], None)
    drafter.commit(tokens[1:], torch.from_numpy(rng.normal(size=(len(tokens) - 1, H))), range(1, len(tokens)))
    return drafter, len(tokens) - 1


@pytest.mark.parametrize("ranking", RANKINGS.values(), ids=RANKINGS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_children_are_those_of_passes_alone(count, ranking):
    """The root, some of its children, and the root again, which has no row left to compute."""
    head, lm_head = make_head(7), torch.randn(V, H, dtype=torch.float64)
    together, alone = ([begun(head, lm_head, seed, ranking) for seed in range(count)]
                       for _ in range(2))
    requests = [DraftRequest(0, (DraftNode(0, -1, 5, at),), 6) for _, at in together]
    for level in range(3):
        found = TreeDrafter.expand_together([(d, r) for (d, _), r in zip(together, requests, strict=True)])
        for output, (drafter, _), request in zip(found, alone, requests, strict=True):
            expected = drafter.expand(request)
            np.testing.assert_array_equal(output.tokens, expected.tokens)
            np.testing.assert_allclose(output.scores, expected.scores, atol=1e-9)
        requests = [DraftRequest(0, tuple(DraftNode(1 + i, 0, int(token), at + 1)
                                          for i, token in enumerate(output.tokens[0][: 1 + seed])), 4)
                    if level == 0 else DraftRequest(0, (DraftNode(0, -1, 5, at),), 3)
                    for seed, (output, (_, at)) in enumerate(zip(found, together, strict=True))]


def test_who_shares_passes():
    head, lm_head = make_head(7), torch.randn(V, H, dtype=torch.float64)
    one, other = EagleDrafter(head, lm_head), EagleDrafter(head, lm_head)
    assert one.shares_passes_with(other)
    assert not one.shares_passes_with(EagleDrafter(make_head(7), lm_head))
    assert not one.shares_passes_with(NgramDrafter(3, 1))

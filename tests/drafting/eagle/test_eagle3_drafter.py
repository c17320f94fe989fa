"""Eagle3Drafter on heads in the published format against a float64 recomputation from the formulas."""

import numpy as np
import pytest
import torch
from kits.draft_heads import GREEDY, SWITCHES, VARIANTS, Eagle3, Session, log_softmax, published_eagle3
from kits.torch_devices import needs_cuda

from flowspec_edge.drafting.eagle.eagle3 import Eagle3Drafter, captured_layers
from flowspec_edge.drafting.eagle.eagle3_formats import head3_layers, load_head3
from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Payload, Tap
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest
from flowspec_edge.util.tensors import from_torch

T, V = 24, 61  # the target's width and vocabulary
LAYERS = (2, 9, 15)


def session(directory, seed, sampling=GREEDY, rank="draft", tau=0.7, device="cpu", **shape):
    raw, weights = published_eagle3(directory, seed, T, V, **shape)
    targets = torch.randn(V, T, generator=torch.Generator().manual_seed(seed + 100))
    head = load_head3(directory, targets, torch.float64).to(device)
    layers = head3_layers(directory, head.config, 18)
    drafter, states = Eagle3Drafter(head, layers), len(layers)
    weights = {"embed_tokens.weight": targets, **weights}
    reference = Eagle3({n: w.double().numpy() for n, w in weights.items()}, raw["num_attention_heads"],
                       raw["num_key_value_heads"], raw["rms_norm_eps"],
                       raw.get("sliding_window") or raw["max_position_embeddings"],
                       raw.get("rope_theta", 10000.0), num_candidates=raw.get("num_candidates"),
                       **{name: raw.get(name) for name in SWITCHES})

    def tell(rows, known):
        """In several messages, in any order, with dead rows among the living."""
        for place in np.roll(range(states), -1):
            own = known[:, place * T : (place + 1) * T]
            numbers = np.array([*rows, rows[-1] + 1], np.int32)
            hidden = np.concatenate([own, np.full((1, T), np.nan, np.float32)])
            drafter.tap(Tap(1, 0, 0, layers[place], numbers, Payload("float32", hidden)))
        drafter.tap(Tap(1, 0, 0, 17, np.array(rows, np.int32), Payload("float32", known[:, :T])))  # another's

    return Session(reference, drafter, states * T, V, seed, sampling, rank, tau, tell)


@pytest.mark.parametrize("drafted", [V, 20])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("noisy", [False, True])
def test_random_histories_agree_with_full_recomputation(tmp_path, drafted, kv_heads, noisy):
    sampling = Sampling(temperature=0.8 if noisy else 0.0, seed=7)
    s = session(tmp_path, 3 + kv_heads, sampling, "noise" if noisy else "draft", drafted=drafted,
                kv_heads=kv_heads)
    s.random_history(20)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_published_variant_agrees(tmp_path, variant):
    session(tmp_path, 12, kv_heads=2, **VARIANTS[variant]).random_history(15)


def test_an_eagle4_head_ranks_its_candidates_with_noise(tmp_path):
    session(tmp_path, 13, Sampling(0.8, seed=7), "noise", **VARIANTS["EAGLE-4"]).random_history(15, prompt=14)


@needs_cuda
def test_a_gpu_computes_the_same(tmp_path):
    s = session(tmp_path, 4, Sampling(0.8, seed=7), "noise", drafted=20, kv_heads=2, device="cuda")
    s.random_history(20)


@pytest.mark.parametrize("drafted", [V, 20])
def test_chains_and_trees_with_a_commit_after_each(tmp_path, drafted):
    """True states take the places of the head's own outputs as soon as the target has them."""
    s = session(tmp_path, 5, drafted=drafted, rope_theta=5e5)
    s.commit([3, 1, 4, 1, 5])
    s.plant()
    s.expand([s.root.id])
    s.every_node_again()


def test_a_head_of_another_width_brings_its_own_embeddings(tmp_path):
    s = session(tmp_path, 6, width=32, embedding=True, target_hidden_size=T, drafted=30)
    s.random_history(10)


@pytest.mark.parametrize("limit", [3, 12])
def test_rows_see_no_further_than_the_head_was_trained_for(tmp_path, limit):
    s = session(tmp_path, limit, drafted=20, fused=limit == 3, max_position_embeddings=limit)
    s.random_history(20, prompt=limit + 3)


def test_a_rewound_drafter_knows_the_text_up_to_there(tmp_path):
    session(tmp_path, 21).rewinds()


def test_reset_forgets_everything(tmp_path):
    session(tmp_path, 8).forgets()


def test_states_of_decided_rows_are_let_go(tmp_path):
    s = session(tmp_path, 9)
    s.random_history(30)
    assert len(s.drafter._tapped) <= 2


def test_children_are_as_many_as_the_draft_vocabulary_has(tmp_path):
    s = session(tmp_path, 10, drafted=2)
    s.commit([5, 6])
    s.plant()
    got = s.drafter.expand(DraftRequest(s.root.id, (s.root,), 5))
    assert got.tokens.shape == got.scores.shape == (1, 2)
    assert set(got.tokens[0].tolist()) == set(s.drafter._head.target_ids().tolist())


def test_a_commit_before_its_taps_is_named(tmp_path):
    s = session(tmp_path, 1)
    s.commit([4, 5])
    drafter, features = s.drafter, torch.zeros(1, T)
    drafter.tap(Tap(1, 0, 0, LAYERS[0], np.array([9], np.int32), from_torch(features)))
    with pytest.raises(ProtocolError, match="state of row 9 after 9 layers is missing"):
        drafter.commit([6], features, [9])
    assert drafter.rewind(2, *s.ranking)  # to a session in which row 9 is another
    with pytest.raises(ProtocolError, match="state of row 9 after 2 layers is missing"):
        drafter.commit([6], features, [9])
    drafter.reset(*s.ranking)
    with pytest.raises(ProtocolError, match="as many features"):
        drafter.commit([6], features, [9])
    drafter.commit([1], None)
    with pytest.raises(ProtocolError, match="nothing has been committed"):
        drafter.expand(DraftRequest(0, (DraftNode(0, -1, 1, 0),), 2))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.05), ("bfloat16", 0.3)])
def test_half_precision_heads_take_states_of_their_dtype(tmp_path, dtype, tolerance):
    reference = session(tmp_path, 4, drafted=20).reference
    drafter = Eagle3Drafter(load_head3(tmp_path, torch.from_numpy(reference.w["embed_tokens.weight"]),
                                       getattr(torch, dtype)), LAYERS)
    states = torch.randn(6, 3 * T, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    for place, layer in enumerate(LAYERS):
        part = states[:, place * T : (place + 1) * T].contiguous()
        array = part.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else part.numpy()
        drafter.tap(Tap(1, 0, 0, layer, np.arange(6, dtype=np.int32), Payload(dtype, array)))
    drafter.commit([0], None)
    drafter.commit(list(range(1, 7)), torch.zeros(6, T), list(range(6)))
    got = drafter.expand(DraftRequest(0, (DraftNode(0, -1, 6, 6),), 20))
    rows = [(reference.state(s), t, i) for i, (s, t) in enumerate(zip(states.double().numpy(), range(1, 7),
                                                                      strict=True))]
    want = log_softmax(reference.logits(reference.row(rows)))[got.tokens[0]]
    assert np.abs(got.scores[0] - want).max() < tolerance * np.abs(want).max()


@pytest.mark.parametrize(("layers", "captured"), [
    (32, (2, 16, 29)), (40, (2, 20, 37)), (8, (2, 4, 5)), (6, (2, 3, 3)), (5, (2, 2, 2)), (4, (1, 2, 2)),
    (2, (1, 1, 1)), (1, (0, 0, 0)),
])
def test_layers_of_small_targets_are_as_near_as_can_be(layers, captured):
    assert captured_layers(layers) == captured


def test_a_layer_named_twice_is_tapped_once(tmp_path):
    head = session(tmp_path, 2).drafter._head
    drafter = Eagle3Drafter(head, (2, 3, 3))
    assert drafter.taps == (2, 3)
    states = {layer: torch.randn(1, T, dtype=torch.float64) for layer in drafter.taps}
    for layer, state in states.items():
        drafter.tap(Tap(1, 0, 0, layer, np.array([0], np.int32), Payload("float32", state.float().numpy())))
    drafter.commit([1], None)
    drafter.commit([2], torch.zeros(1, T), [0])
    assert torch.allclose(drafter._states[0], torch.cat([states[2], states[3], states[3]], 1), atol=1e-6)

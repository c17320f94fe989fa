"""LMDrafter against transformers' own full forward of every path."""

import gc
import weakref

import numpy as np
import pytest
import torch
from kits.language_models import lm_drafter
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from flowspec_edge.drafting.tree_drafter import TreeDrafter
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

V = 67


def make_model(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def make_gemma(seed):
    """Scaled embeddings, norms around each block, two kinds of angles."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                              num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
                              layer_types=["sliding_attention", "full_attention"])
    return Gemma3ForCausalLM(config).eval()


def check(model, drafter, text, root, requests, k=4):
    """``requests``: (node, path of tokens below the root that ends with the node's)."""
    got = drafter.expand(DraftRequest(root, tuple(node for node, _ in requests), k))
    check_children(model, text, [path for _, path in requests], got)
    return got


def check_children(model, text, paths, got):
    k = got.tokens.shape[1]
    for row, path in enumerate(paths):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text + path])).logits[0, -1]
        want = torch.log_softmax(logits, -1).topk(k)
        np.testing.assert_allclose(got.scores[row], want.values.numpy(), rtol=1e-4, atol=1e-4)
        assert got.tokens[row].tolist() == want.indices.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_random_walks_agree_with_full_forwards(seed, tmp_path):
    rng = np.random.default_rng(seed)
    model = make_model(seed)
    drafter = lm_drafter(model, tmp_path)
    drafter.reset(Sampling(), "draft", 1.0)
    text = [int(t) for t in rng.integers(0, V, size=9)]
    drafter.commit(text[:1], None)
    drafter.commit(text[1:], None)
    next_id, root, tree, expanded = 1, 0, {}, set()  # tree: id -> (node, path below the root)
    for _ in range(25):
        requests = [(DraftNode(root, -1, text[-1], len(text) - 1), [])] if root not in expanded else []
        known = [i for i, (node, _) in tree.items() if node.parent in expanded]
        picked = rng.choice(known, size=min(4, len(known)), replace=False).tolist() if known else []
        requests += [tree[i] for i in picked if tree[i][0].parent not in picked]
        if requests:
            got = check(model, drafter, text, root, requests)
            for (node, path), tokens in zip(requests, got.tokens, strict=True):
                if node.id not in expanded:
                    for token in tokens[:3].tolist():
                        child = DraftNode(next_id, node.id, token, node.position + 1)
                        tree[next_id] = (child, [*path, token])
                        next_id += 1
                expanded.add(node.id)
        kind = rng.random()
        if kind < 0.35 and tree:  # down one or more levels, to a node that may not be expanded
            new = int(rng.choice(list(tree)))
            path = tree[new][1]
            drafter.commit(path, None)
            text += path
            tree = {i: (node, p[len(path):]) for i, (node, p) in tree.items()
                    if p[: len(path)] == path and len(p) > len(path)}
            root, expanded = new, (expanded & set(tree)) | ({new} & expanded)
        elif kind < 0.45:  # a miss
            tokens = [int(t) for t in rng.integers(0, V, size=2)]
            drafter.commit(tokens, None)
            text += tokens
            tree, expanded, root = {}, set(), next_id
            next_id += 1


@pytest.mark.parametrize("make", [make_model, make_gemma])
def test_passes_of_several_sessions_agree_with_full_forwards(make, tmp_path):
    """Texts of different lengths; sessions that join late, and that skip a pass."""
    rng, model = np.random.default_rng(0), make(6)
    first = lm_drafter(model, tmp_path)
    drafters = [first, first.clone_session(), first.clone_session()]
    texts = [rng.integers(0, V, size=size).tolist() for size in (3, 20, 9)]
    for drafter, text in zip(drafters, texts, strict=True):
        drafter.reset(Sampling(), "draft", 1.0)
        drafter.commit(text, None)
    roots = [0, 0, 0]
    for step, taking_part in enumerate([(0, 1), (0, 1, 2), (2, 0), (1,), (0, 1, 2)]):
        tops = {i: DraftNode(roots[i], -1, texts[i][-1], len(texts[i]) - 1) for i in taking_part}
        found = TreeDrafter.expand_together([(drafters[i], DraftRequest(roots[i], (top,), 4))
                                             for i, top in tops.items()])
        children = []
        for i, got in zip(taking_part, found, strict=True):
            check_children(model, texts[i], [[]], got)
            children.append([(DraftNode(100 * step + place + 1, roots[i], token, len(texts[i])), [token])
                             for place, token in enumerate(got.tokens[0][:1 + i].tolist())])
        found = TreeDrafter.expand_together([
            (drafters[i], DraftRequest(roots[i], tuple(node for node, _ in nodes), 3))
            for i, nodes in zip(taking_part, children, strict=True)])
        for i, nodes, got in zip(taking_part, children, found, strict=True):
            check_children(model, texts[i], [path for _, path in nodes], got)
            node, path = nodes[-1]
            drafters[i].commit(path, None)
            texts[i] += path
            roots[i] = node.id


def test_drafters_of_one_model_share_passes(tmp_path):
    drafter, other = (lm_drafter(make_model(1), tmp_path / name) for name in "ab")
    assert drafter.shares_passes_with(drafter.clone_session())
    assert not drafter.shares_passes_with(other)


def test_a_rewound_drafter_knows_the_text_up_to_there(tmp_path):
    """To before what a pass has computed, to after it, to the very end and to the first token."""
    rng = np.random.default_rng(4)
    model = make_model(4)
    drafter = lm_drafter(model, tmp_path)
    text = []
    for keep in (0, 11, 13, 17, 1):
        if keep:
            assert drafter.rewind(keep, Sampling(), "draft", 1.0)
            text = text[:keep]
        for size in (11, 3):  # the second part of it no pass has seen when the drafter is rewound
            tokens = [int(t) for t in rng.integers(0, V, size=size)]
            drafter.commit(tokens, None)
            text += tokens
            if size == 11:
                check(model, drafter, text, 0, [(DraftNode(0, -1, text[-1], len(text) - 1), [])])
    assert not drafter.rewind(len(text) + 1, Sampling(), "draft", 1.0)
    assert not drafter.rewind(0, Sampling(), "draft", 1.0)


def test_half_precision_stays_close(tmp_path):
    model = make_model(7)
    text = [5, 6, 7, 8, 9]
    with torch.no_grad():
        want = torch.log_softmax(model(input_ids=torch.tensor([text])).logits[0, -1], -1).numpy()
    drafter = lm_drafter(model, tmp_path, torch.float16)
    drafter.commit(text, None)
    got = drafter.expand(DraftRequest(0, (DraftNode(0, -1, 9, 4),), V))
    assert np.abs(got.scores[0] - want[got.tokens[0]]).max() < 0.05


def test_a_drafter_that_is_dropped_frees_its_cache_at_once(tmp_path):
    """Not when the collector looks for circles, which a process with many objects does rarely."""
    drafter = lm_drafter(make_model(1), tmp_path).clone_session()
    cache = weakref.ref(drafter._cache)
    gc.disable()
    try:
        del drafter
        assert cache() is None
    finally:
        gc.enable()

"""LMDrafter against transformers' own full forward of every path."""

import gc
import weakref

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flowspec_edge.drafting.lm import LMDrafter
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

V = 67


def make_model(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    return LlamaForCausalLM(config).double().eval()


def check(model, drafter, text, root, requests, k=4):
    """``requests``: (node, path of tokens below the root that ends with the node's)."""
    got = drafter.expand(DraftRequest(root, tuple(node for node, _ in requests), k))
    for row, (_, path) in enumerate(requests):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text + path])).logits[0, -1]
        want = torch.log_softmax(logits, -1).topk(k)
        np.testing.assert_allclose(got.scores[row], want.values.numpy(), rtol=1e-4, atol=1e-4)
        assert got.tokens[row].tolist() == want.indices.tolist()
    return got


@pytest.mark.parametrize("seed", range(5))
def test_random_walks_agree_with_full_forwards(seed):
    rng = np.random.default_rng(seed)
    model = make_model(seed)
    drafter = LMDrafter(model)
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


def test_a_rewound_drafter_knows_the_text_up_to_there():
    """To before what a pass has computed, to after it, to the very end and to the first token."""
    rng = np.random.default_rng(4)
    model = make_model(4)
    drafter = LMDrafter(model)
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


def test_half_precision_stays_close():
    model = make_model(7)
    text = [5, 6, 7, 8, 9]
    with torch.no_grad():
        want = torch.log_softmax(model(input_ids=torch.tensor([text])).logits[0, -1], -1).numpy()
    drafter = LMDrafter(model.to(torch.float16))
    drafter.commit(text, None)
    got = drafter.expand(DraftRequest(0, (DraftNode(0, -1, 9, 4),), V))
    assert np.abs(got.scores[0] - want[got.tokens[0]]).max() < 0.05


def test_a_drafter_that_is_dropped_frees_its_cache_at_once():
    """Not when the collector looks for circles, which a process with many objects does rarely."""
    drafter = LMDrafter(make_model(1)).clone_session()
    cache = weakref.ref(drafter._cache)
    gc.disable()
    try:
        del drafter
        assert cache() is None
    finally:
        gc.enable()

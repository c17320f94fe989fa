"""What training unrolls is what drafting runs: the two share the head and nothing else."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter
from flowspec_edge.training.eagle import Eagle2, new_head
from flowspec_edge.training.heads import agreement, greedy_text, unroll
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

V, H = 29, 32


@pytest.fixture
def target():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def head(target):
    torch.manual_seed(1)
    head = new_head(target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter if parameter.ndim == 1 else torch.randn_like(parameter) * 0.2)
        head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    return head


@pytest.fixture
def held_out():
    return torch.randint(0, V, (200,), generator=torch.Generator().manual_seed(0))


def generate(target, rows, length):
    """transformers' own greedy decoding, which would take token 0 in a prompt for padding."""
    return target.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=length - rows.shape[1],
                           do_sample=False, eos_token_id=None, pad_token_id=0)


@torch.no_grad()
def drafted_chain(target, head, text, anchor, depth):
    """Best children, depth by depth, of a chain that knows features 0 … anchor and follows ``text``."""
    features = target.model(input_ids=text[None]).last_hidden_state[0].numpy()
    drafter = EagleDrafter(head, target.lm_head.weight)
    drafter.commit(text[:1].tolist(), None)
    drafter.commit(text[1 : anchor + 2].tolist(), torch.from_numpy(features[: anchor + 1]))
    best = []
    for d in range(depth):
        token, position = int(text[anchor + 1 + d]), anchor + 1 + d
        got = drafter.expand(DraftRequest(0, (DraftNode(d, d - 1, token, position),), V))
        best.append(dict(zip(got.tokens[0].tolist(), got.scores[0].tolist(), strict=True)))
    return best


def test_unrolled_rows_are_the_drafters_rows(target, head):
    text = torch.randint(0, V, (20,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        features = target.model(input_ids=text[None]).last_hidden_state
        anchors = torch.tensor([0, 4, 5, 13])
        outputs = list(unroll(head, features[:, :-1], text[None, 1:], anchors, 6))
        scores = [target.lm_head(out).log_softmax(-1)[0] for out in outputs]
    for chain, anchor in enumerate(anchors.tolist()):
        want = drafted_chain(target, head, text, anchor, 6)
        for d in range(6):
            got = scores[d][chain if d else anchor]
            for token, score in want[d].items():
                assert got[token].item() == pytest.approx(score, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("greedy", [False, True])
def test_agreement_is_what_a_drafter_would_have_got_right(target, head, held_out, greedy):
    prompt, length = 8, 24
    got = agreement(Eagle2(head, target), held_out, greedy=greedy, limit=2, prompt=prompt, length=length)
    hits = np.zeros(6)
    count = 0
    for start in (0, len(held_out) - length - 1):
        text = held_out[start : start + length]
        if greedy:
            text = generate(target, text[None, :prompt], length)[0]
        with torch.no_grad():
            best = target(input_ids=text[None]).logits[0].argmax(-1).tolist()
        for anchor in range(prompt, length - 6):
            chain = drafted_chain(target, head, text, anchor, 6)
            hits += [max(c, key=c.get) == best[anchor + 1 + d] for d, c in enumerate(chain)]
            count += 1
    assert got == pytest.approx(hits / count)


def test_greedy_text_is_transformers_greedy(target):
    rows = torch.randint(0, V, (3, 5), generator=torch.Generator().manual_seed(2))
    assert torch.equal(greedy_text(target, rows, 17), generate(target, rows, 17))


def test_a_head_keeps_the_targets_embedding(target):
    head = new_head(target)
    assert torch.equal(head.embed_tokens.weight, target.get_input_embeddings().weight)
    assert not head.embed_tokens.weight.requires_grad

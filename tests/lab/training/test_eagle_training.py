"""EAGLE's training computes what its drafters compute, with which it shares the head and nothing else, and a
head learns from it."""

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter
from flowspec_edge.drafting.eagle.eagle3 import Eagle3Drafter, captured_layers
from flowspec_edge.lab.training.eagle import (
    Eagle2,
    Eagle3,
    Eagle3Recipe,
    EagleRecipe,
    draft_vocabulary,
    new_head,
    new_head3,
)
from flowspec_edge.lab.training.heads import Student, agreement, greedy_text, train_head, unroll
from flowspec_edge.lab.training.loop import LoopOptions
from flowspec_edge.lab.training.target import layer_config
from flowspec_edge.messages import Payload, Tap
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

V, H, LAYERS = 29, 32, 6
SMALL = {"steps": 120, "window": 32, "tokens_per_step": 256, "micro_batch": 256, "chains": 8}
WHOLE, DRAFTED = torch.arange(V), torch.tensor([i for i in range(V) if i % 4])


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=LAYERS,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def random_student(target, drafted=None):
    """EAGLE-3's if it drafts tokens of its own choice, else EAGLE-2's."""
    torch.manual_seed(1)
    head = new_head(target) if drafted is None else new_head3(target, drafted)
    changed = head.layers if drafted is None else head.midlayer
    with torch.no_grad():
        for parameter in (head.fc.weight, *changed.parameters()):
            random = torch.randn_like(parameter) * 0.2 if parameter.ndim == 2 else torch.rand_like(parameter)
            parameter.copy_(random)
    return Eagle2(head, target) if drafted is None else Eagle3(head, target)


def generate(target, rows, length):
    """transformers' own greedy decoding, which would take token 0 in a prompt for padding."""
    return target.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=length - rows.shape[1],
                           do_sample=False, eos_token_id=None, pad_token_id=0)


@torch.no_grad()
def drafted_chain(student, text, anchor, depth):
    """All children's scores, depth by depth, of a chain that knows states 0 … anchor and follows ``text``."""
    target, rows = student.target, list(range(anchor + 1))
    out = target.model(input_ids=text[None], output_hidden_states=True)
    if isinstance(student, Eagle3):
        drafter = Eagle3Drafter(student.head, captured_layers(LAYERS))
    else:
        drafter = EagleDrafter(student.head, target.lm_head.weight)
    drafter.commit(text[:1].tolist(), None)
    for layer in drafter.taps:
        states = out.hidden_states[layer][0, : anchor + 1].numpy()
        drafter.tap(Tap(0, 0, 0, layer, np.array(rows, np.int32), Payload("float32", states)))
    drafter.commit(text[1 : anchor + 2].tolist(), out.last_hidden_state[0, : anchor + 1], rows)
    scores = []
    for d in range(depth):
        token, position = int(text[anchor + 1 + d]), anchor + 1 + d
        got = drafter.expand(DraftRequest(0, (DraftNode(d, d - 1, token, position),), V))
        scores.append(dict(zip(got.tokens[0].tolist(), got.scores[0].tolist(), strict=True)))
    return scores


@pytest.mark.parametrize("drafted", [None, WHOLE, DRAFTED], ids=["eagle2", "eagle3", "eagle3, a part"])
def test_unrolled_rows_are_the_drafters_rows(target, drafted):
    student = random_student(target, drafted)
    logits, tokens = (target.lm_head, WHOLE) if drafted is None else (student.head.logits, drafted)
    text = torch.randint(0, V, (20,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        states, _ = student.read(text[None])
        anchors = torch.tensor([0, 4, 5, 12])
        outputs = list(unroll(student.head, student.input_states(states[:, :-1]), text[None, 1:], anchors, 7))
        scores = [logits(out).log_softmax(-1)[0] for out in outputs]
    for chain, anchor in enumerate(anchors.tolist()):
        want = drafted_chain(student, text, anchor, 7)
        for d in range(7):
            got = scores[d][chain if d else anchor].tolist()
            assert want[d] == pytest.approx(dict(zip(tokens.tolist(), got, strict=True)), rel=1e-4, abs=1e-3)
            best = student.best(outputs[d][0, chain if d else anchor])
            assert best == max(want[d], key=want[d].get)


def test_the_loss_is_the_papers_sum_over_the_draft_vocabulary(target):
    """Cross-entropy to the target's distribution, cut to the draft vocabulary and made to sum to one;
    a position whose best token is not in it does not count."""
    student = random_student(target, DRAFTED)
    text = torch.randint(0, V, (2, 11), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        features = student.read(text).features[:, 1:]
        out = torch.randn(2, 10, H, generator=torch.Generator().manual_seed(5))
        got = student.loss(out, student.targets(features)).item()
        logits = target.lm_head(features).double().reshape(-1, V).tolist()
        heads = student.head.logits(out).double().reshape(-1, len(DRAFTED)).tolist()
    total, count = 0.0, 0
    for wanted, own in zip(logits, heads, strict=True):
        if int(np.argmax(wanted)) % 4:
            p = np.exp([wanted[i] for i in DRAFTED.tolist()])
            total -= float(p / p.sum() @ (np.array(own) - np.log(np.exp(own).sum())))
            count += 1
    assert 0 < count < 20
    assert got == pytest.approx(total / count, rel=1e-5)


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
    tokens = torch.tensor([7, 7, 7, 3, 3, 9, 9, 1], dtype=torch.int32)
    assert draft_vocabulary(tokens, 12, 3).tolist() == [3, 7, 9]
    assert draft_vocabulary(tokens, 12, 5).tolist() == [0, 1, 3, 7, 9]  # the first that never occurs
    assert draft_vocabulary(tokens, 12, 12).tolist() == list(range(12))


def test_an_untrained_head_starts_from_the_target(target):
    head = new_head3(target, DRAFTED)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[DRAFTED])
    assert torch.equal(head.norm.weight, target.model.norm.weight)
    assert torch.equal(head.target_ids(), DRAFTED)
    assert torch.equal(head.t2d.nonzero()[:, 0], DRAFTED)
    for own in (head, new_head(target)):
        assert torch.equal(own.embed_tokens.weight, target.get_input_embeddings().weight)
        assert not own.embed_tokens.weight.requires_grad
    assert "d2t" not in new_head3(target, WHOLE).state_dict()


@pytest.mark.parametrize(("heads", "own"), [(3, 4), (4, 4)])
def test_a_head_takes_heads_that_divide_its_width(heads, own):
    """Qwen3.5's family has targets with other numbers, which transformers refuses for a Llama layer."""
    config = Qwen3Config(vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=1, head_dim=8,
                         num_attention_heads=heads, num_key_value_heads=1)
    layer = layer_config(config)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (own, 1, 8)


@pytest.mark.parametrize("greedy", [False, True])
def test_agreement_is_what_a_drafter_would_have_got_right(target, greedy):
    held_out = torch.randint(0, V, (200,), generator=torch.Generator().manual_seed(0))
    student, prompt, length = random_student(target), 8, 24
    got = agreement(student, held_out, greedy=greedy, limit=2, prompt=prompt, length=length)
    hits = np.zeros(6)
    count = 0
    for start in (0, len(held_out) - length - 1):
        text = held_out[start : start + length]
        if greedy:
            text = generate(target, text[None, :prompt], length)[0]
        with torch.no_grad():
            best = target(input_ids=text[None]).logits[0].argmax(-1).tolist()
        for anchor in range(prompt, length - 6):
            chain = drafted_chain(student, text, anchor, 6)
            hits += [max(c, key=c.get) == best[anchor + 1 + d] for d, c in enumerate(chain)]
            count += 1
    assert got == pytest.approx(hits / count)


def test_greedy_text_is_transformers_greedy(target):
    rows = torch.randint(0, V, (3, 5), generator=torch.Generator().manual_seed(2))
    assert torch.equal(greedy_text(target, rows, 17), generate(target, rows, 17))


def test_a_head_begins_with_the_least_squares_solution(target):
    """numpy's own, on rows that it was solved for; the layer adds nothing yet."""
    student = random_student(target)
    rows = torch.randint(0, V, (4, 200), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        reading = student.read(rows)
        student.first_weights(rows, reading)
        [out] = unroll(student.head, reading.features[:, :-1], rows[:, 1:], torch.tensor([0]), 1)
    given = torch.cat((target.get_input_embeddings()(rows[:, 1:]), reading.features[:, :-1],
                       torch.ones(4, 199, 1)), dim=-1).flatten(0, 1).double().numpy()
    wanted = reading.features[:, 1:].flatten(0, 1).double().numpy()
    best = given @ np.linalg.lstsq(given, wanted, rcond=None)[0]
    error, least = (((got - wanted) ** 2).mean() for got in (out.flatten(0, 1).double().numpy(), best))
    assert least < 0.9 * wanted.var()
    assert error == pytest.approx(least, rel=0.01)


def test_a_loss_over_some_tokens_is_the_loss_of_a_target_with_those_rows_alone(target):
    ids = torch.tensor([0, 3, 4, 11, 28])
    small = copy.deepcopy(target)
    small.lm_head = torch.nn.Linear(H, len(ids), bias=False).requires_grad_(False)
    small.lm_head.weight.copy_(target.lm_head.weight[ids])
    head = random_student(target).head
    features, out = torch.randn(2, 1, 10, H, generator=torch.Generator().manual_seed(9))
    some, whole = Eagle2(head, target, ranked=ids), Eagle2(head, small)
    assert some.loss(out, some.targets(features)) == whole.loss(out, whole.targets(features))
    assert some.best(out).max() > len(ids)  # drafted from the whole vocabulary all the same


@pytest.fixture(scope="module")
def predictable(target):
    """A target whose layers say little, so that its last token all but decides the next."""
    target = copy.deepcopy(target)
    for parameter in target.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.mul_(0.2)
    return target


@pytest.fixture(scope="module")
def text(predictable):
    """What the target itself writes when it is sampled from."""
    torch.manual_seed(6)
    start = torch.randint(1, V, (64, 1))
    return predictable.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=99,
                                do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_a_head_learns_what_the_target_writes(predictable, text, tmp_path, kind):
    """At every depth, and far above what always guessing the commonest token would get."""
    torch.manual_seed(7)
    train, held_out = text[:56].flatten(), text[56:].flatten()
    student: Student
    if kind == "eagle2":
        recipe, student = EagleRecipe(**SMALL), Eagle2(new_head(predictable), predictable)
    else:
        recipe, student = Eagle3Recipe(**SMALL), Eagle3(new_head3(predictable, WHOLE), predictable)
    train_head(recipe, student, train, held_out, tmp_path, 0, LoopOptions(compile=False))
    best = predictable(input_ids=held_out[None]).logits[0].argmax(-1)
    commonest = torch.bincount(best).max().item() / len(best)
    shares = agreement(student, held_out, limit=8)
    assert shares[0] > commonest + 0.3
    assert min(shares) > commonest + 0.1

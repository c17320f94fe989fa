"""BlockDrafter on heads in the published formats against a float64 recomputation from the formulas."""

import numpy as np
import pytest
import torch
from kits.block_drafters import VARIANTS, VOCABULARY, WIDTH, Block, published_block
from kits.draft_heads import TOLERANCE, log_softmax

from flowspec_edge.drafting.block.drafter import BlockDrafter
from flowspec_edge.drafting.block.formats import load_block_head
from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Payload, Tap
from flowspec_edge.model.output_head import as_output_head
from flowspec_edge.sampling.rule import Sampling, gumbel
from flowspec_edge.tree.draft_api import ABSENT, DraftNode, DraftRequest

GREEDY = Sampling()


class History:
    """A drafter and its reference through commits; ``text`` and the states of all its tokens but the last."""

    def __init__(self, directory, seed=3, sampling=GREEDY, ranking="draft", **options):
        facts, weights = published_block(directory, seed, **options)
        draw = torch.Generator().manual_seed(seed + 50)
        embedding, lm_head = (torch.randn(VOCABULARY, WIDTH, generator=draw) for _ in range(2))
        head = load_block_head(directory, embedding, torch.float64, 8)
        self.drafter = BlockDrafter(head, as_output_head(lm_head.double()))
        self.reference = Block(facts, weights, embedding, lm_head)
        self.captured, self.rng = facts["captured"], np.random.default_rng(seed)
        assert head.config.captured == tuple(self.captured)
        self.ranking = (sampling, ranking, 0.7)
        self.drafter.reset(*self.ranking)
        self.text, self.states, self.number, self.next_id = [], [], 0, 0

    def tell(self, rows, known):
        """In several messages, with dead rows among the living."""
        for place in np.roll(range(len(self.captured)), 1):
            own = known[:, place * WIDTH : (place + 1) * WIDTH]
            hidden = np.concatenate([own, np.full((1, WIDTH), np.nan, np.float32)])
            numbers = np.array([*rows, rows[-1] + 1], np.int32)
            self.drafter.tap(Tap(1, 0, 0, self.captured[place], numbers, Payload("float32", hidden)))

    def commit(self, tokens):
        if not self.text:
            self.drafter.commit(tokens[:1], None)
            self.text, tokens = tokens[:1], tokens[1:]
        if tokens:
            known = self.rng.normal(size=(len(tokens), len(self.captured) * WIDTH)).astype(np.float32)
            rows = [self.number + 2 * i for i in range(len(tokens))]
            self.number = rows[-1] + 1
            self.tell(rows, known)
            self.drafter.commit(tokens, torch.zeros(len(tokens), WIDTH), rows)
            self.text += tokens
            self.states += list(known.astype(np.float64))

    def grow(self, most):
        self.commit(self.rng.integers(0, VOCABULARY, size=int(self.rng.integers(1, most + 1))).tolist())

    def check(self, depths, k=3):
        """Children of a random node at each depth."""
        last = len(self.text) - 1
        tokens = [self.text[-1] if not d else int(self.rng.integers(0, VOCABULARY)) for d in depths]
        root = self.next_id
        nodes = [DraftNode(root + d, root - 1 + d, token, last + d)
                 for d, token in zip(depths, tokens, strict=True)]
        self.next_id += 100
        got = self.drafter.expand(DraftRequest(root, tuple(nodes), k))
        outputs = self.reference.outputs(self.states, self.text[-1])
        sampling, rank, tau = self.ranking
        for row, (node, depth) in enumerate(zip(nodes, depths, strict=True)):
            x = self.reference.logits(outputs, depth, node.token)
            if x is None:
                assert (got.tokens[row] == ABSENT).all()
                assert (got.scores[row] == -np.inf).all()
                continue
            if rank == "noise" and not sampling.greedy:
                x = log_softmax(x / sampling.temperature)
                x = (x + gumbel(sampling.seed, node.position + 1, VOCABULARY)) / tau
            x = log_softmax(x)
            np.testing.assert_allclose(got.scores[row], np.sort(x)[::-1][:k], **TOLERANCE)
            np.testing.assert_allclose(got.scores[row], x[got.tokens[row]], **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_published_variant_agrees(tmp_path, variant):
    noisy = bool(list(VARIANTS).index(variant) % 2)
    sampling = Sampling(temperature=0.8 if noisy else 0.0, seed=7)
    h = History(tmp_path, 4 + noisy, sampling, "noise" if noisy else "draft", **VARIANTS[variant])
    h.grow(9)
    for _ in range(3):
        h.check([0, 1, 3, 2])
        h.check([5, 2, 7, 4, 6])  # below the same root, and beyond the block
        h.grow(4)


def test_one_pass_serves_a_root(tmp_path):
    h = History(tmp_path)
    h.commit([1, 2, 3])
    asked = DraftRequest(0, (DraftNode(0, -1, 3, 2),), 2)
    assert not h.drafter.scores_only(asked)
    h.drafter.expand(asked)
    assert h.drafter.scores_only(asked)
    h.commit([4])
    assert not h.drafter.scores_only(asked)


def test_a_rewound_drafter_knows_the_text_up_to_there(tmp_path):
    """To before what a pass has computed, to after it, to the very end and to the first token."""
    h = History(tmp_path)
    h.commit([5, 6, 7, 8, 9, 10])
    h.check([0, 1])
    for more, keep in ((0, 4), (4, 6), (3, 9), (0, 1)):
        if more:
            h.commit([11] * more)
        assert h.drafter.rewind(keep, *h.ranking)
        h.text, h.states, h.number = h.text[:keep], h.states[: keep - 1], 0
        h.check([0, 2])
    assert not h.drafter.rewind(2, *h.ranking)
    assert not h.drafter.rewind(0, *h.ranking)


def test_a_text_longer_than_the_first_memory(tmp_path):
    h = History(tmp_path, kinds=["sliding_attention"] * 2, window=6)
    h.commit([3] * 300)
    assert not h.drafter._states  # the target's, several layers wide, do not wait for the prompt's end
    h.check([0, 3])
    h.commit([4] * 260)
    h.check([2, 1])


def test_reset_forgets_everything(tmp_path):
    h = History(tmp_path)
    h.commit([1, 2, 3])
    h.check([0])
    h.drafter.reset(*h.ranking)
    h.text, h.states, h.number = [], [], 0
    h.commit([9, 8])
    h.check([0, 1])


@pytest.mark.parametrize("few", [{"drafted": 2}, {"top": 2}])
def test_children_are_as_many_as_the_head_can_name(tmp_path, few):
    h = History(tmp_path, form="speculators", ids=[2], **few)
    h.commit([5, 6])
    got = h.drafter.expand(DraftRequest(0, (DraftNode(0, -1, 6, 1),), 5))
    assert (got.tokens[0] != ABSENT).tolist() == [True] * 2 + [False] * 3
    assert got.tokens.shape == (1, 5)


def test_misplaced_nodes_and_missing_states_are_named(tmp_path):
    h = History(tmp_path)
    with pytest.raises(ProtocolError, match="as many row numbers"):
        h.drafter.commit([6], torch.zeros(1, WIDTH), [9])
    h.commit([4, 5])
    with pytest.raises(ProtocolError, match="state of row 9 after 2 layers is missing"):
        h.drafter.commit([6], torch.zeros(1, WIDTH), [9])
    with pytest.raises(ProtocolError, match="the root stands at position 5"):
        h.drafter.expand(DraftRequest(0, (DraftNode(0, -1, 5, 5),), 2))


def test_outputs_of_several_requests_say_what_is_beyond(tmp_path):
    h = History(tmp_path)
    h.commit([4, 5])
    nodes = tuple(DraftNode(depth, depth - 1, 5, 1 + depth) for depth in (0, 3, 9))
    first, second = h.drafter.expand(DraftRequest(0, nodes, 2)).split([2, 1])
    assert first.beyond.tolist() == [False, False]
    assert second.beyond.tolist() == [True]

"""SpdDrafter against a float64 recomputation written from the formulas, without any cache.

The world of a session is made up: every row has random hidden states at every depth, and they
reach the drafter in any order, late, twice or never.  Whatever has arrived, an expansion must be
what the module gives from scratch for exactly that.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kits.draft_heads import Layer, log_softmax
from kits.hypothesis_examples import examples
from transformers import LlamaConfig

from flowspec_edge.errors import FlowspecError, ProtocolError, UsageError
from flowspec_edge.lab.spd.drafter import SpdDrafter
from flowspec_edge.lab.spd.module import RowStore, SpdModule, load_module, save_module
from flowspec_edge.messages import Payload, Tap
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

H, V, HEADS, KV_HEADS, LAYERS = 32, 53, 4, 2, 6  # LAYERS: the target's
TAPS = (1, 2, 3, 4)  # what three stages of two layers send back, and half of that


def make_module(seed, layers=2):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=layers,
                         num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    config.target_layers = LAYERS
    module = SpdModule(config).double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * (0.8 / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.3) + (p.ndim == 1))
    return module


class Reference:
    """The module by its formulas (SPD, eq. 1 and appendix A.3): numpy, float64."""

    def __init__(self, module):
        self.w = {n: p.detach().numpy() for n, p in module.state_dict().items()}
        self.layers = [Layer(self.w, f"layers.{i}.", HEADS, KV_HEADS, module.config.rms_norm_eps)
                       for i in range(len(module.layers))]

    def feature(self, embedding, states):
        """Of a row of which ``states`` (layers passed -> hidden state) are known."""
        known = {0: embedding, **states}
        deepest = max((layer for layer in states if layer // 2 in known), default=0)
        if not deepest:
            return self.w["fuse_newest.weight"] @ embedding
        joined = np.concatenate([embedding, known[deepest // 2], known[deepest]])
        return self.w["fuse.weight"] @ joined

    def scores(self, older, embedding, position):
        """log softmax over the vocabulary after the newest row; ``older``: [(feature, position)]."""
        x = self.w["fuse_newest.weight"] @ embedding
        for layer in self.layers:
            x = x + layer.attend([(layer.norm(layer.prefix + "input_layernorm", g), at)
                                  for g, at in [*older, (x, position)]])
            x = x + layer.mlp(layer.norm(layer.prefix + "post_attention_layernorm", x))
        return log_softmax(self.w["lm_head.weight"] @ layer.norm("norm", x))


class Session:
    """A made-up pipeline around one drafter; checks every expansion."""

    def __init__(self, seed, module=None):
        self.rng = np.random.default_rng(seed)
        module = module or make_module(seed % 5)
        self.reference = Reference(module)
        self.embedding = np.random.default_rng([seed, 1]).normal(size=(V, H))
        self.drafter = SpdDrafter(module, torch.from_numpy(self.embedding))
        self.drafter.reset(Sampling(), "draft", 1.0)
        self.text = []  # numbers; the newest may be -1: not sent
        self.tokens = []  # by position
        self.nodes = {}  # id -> DraftNode, the living tree
        self.root = DraftNode(0, -1, 0, 0)
        self.arrived = {}  # number -> layers passed -> state
        self.sent = []  # (number, layer) that may still arrive
        self.next_id, self.next_number = 1, 0

    def state(self, number, layer):
        return np.random.default_rng([number, layer]).normal(size=H)

    def new_number(self):
        self.next_number += int(self.rng.integers(1, 3))  # others' rows leave gaps
        self.sent += [(self.next_number, layer) for layer in TAPS]
        return self.next_number

    def tap(self, number, layer):
        hidden = Payload("float32", np.float32(self.state(number, layer))[None])
        self.drafter.tap(Tap(0, 0, 0, layer, np.array([number], np.int32), hidden))
        self.arrived.setdefault(number, {})[layer] = np.float32(self.state(number, layer)).astype(float)

    def some_taps(self):
        for i in self.rng.permutation(len(self.sent))[: self.rng.integers(0, len(self.sent) + 1)]:
            self.tap(*self.sent[i])
        self.sent = [s for s in self.sent if self.rng.random() < 0.7]  # the others may come twice

    def begin(self, length):
        """A prompt whose rows have all come back."""
        self.tokens = [int(t) for t in self.rng.integers(0, V, size=length)]
        self.drafter.commit(self.tokens[:1], None)
        self.text = [self.new_number() for _ in range(length)]
        self._commit(self.tokens[1:], self.text[:-1])
        self._reroot(DraftNode(0, -1, self.tokens[-1], length - 1, self.text[-1]))

    def _commit(self, tokens, sources):
        if not tokens:
            return
        features = np.float32([self.state(number, LAYERS) for number in sources])
        for number, feature in zip(sources, features, strict=True):
            self.arrived.setdefault(number, {})[LAYERS] = feature.astype(float)
        self.drafter.commit(tokens, torch.from_numpy(features), sources)

    def _reroot(self, root):
        self.root = root
        kept = {root.id}
        for node in sorted(self.nodes.values(), key=lambda n: n.id):
            if node.parent in kept:
                kept.add(node.id)
        self.nodes = {i: self.nodes[i] for i in kept if i in self.nodes and i != root.id}

    def new_token(self, parent):
        """One that no child of ``parent`` has."""
        taken = {n.token for n in self.nodes.values() if n.parent == parent.id}
        return int(self.rng.choice([t for t in range(V) if t not in taken]))

    def grow(self, parent):
        """A child of ``parent`` with a token of its own, sent already, and so is all above it."""
        if self.text[-1] < 0:  # a descendant's number is the larger one
            self.text[-1] = self.new_number()
        node = DraftNode(self.next_id, parent.id, self.new_token(parent), parent.position + 1,
                         self.new_number())
        self.next_id += 1
        self.nodes[node.id] = node
        return node

    def hit(self, node):
        """``node`` and what lies above it become text."""
        path = []
        while node.id != self.root.id:
            path.append(node)
            node = self.nodes.get(node.parent, self.root)
        path.reverse()
        if self.text[-1] < 0:
            self.text[-1] = self.new_number()
        sources = [self.text[-1], *(n.number for n in path[:-1])]
        self.tokens += [n.token for n in path]
        self.text += [n.number for n in path]
        self._commit([n.token for n in path], sources)
        self._reroot(path[-1])

    def miss(self, sent):
        """A token that the tree does not hold."""
        if self.text[-1] < 0:
            self.text[-1] = self.new_number()
        source = self.text[-1]
        self.tokens.append(self.new_token(self.root))
        self.text.append(self.new_number() if sent else -1)
        self._commit(self.tokens[-1:], [source])
        self.nodes = {}
        self._reroot(DraftNode(self.next_id, -1, self.tokens[-1], len(self.tokens) - 1, self.text[-1]))
        self.next_id += 1

    def _row(self, token, position, number):
        states = self.arrived.get(number, {})
        return self.reference.feature(self.embedding[token], states), position

    def expand(self, nodes):
        got = self.drafter.expand(DraftRequest(self.root.id, tuple(nodes), V))
        for node, tokens, scores in zip(nodes, got.tokens, got.scores, strict=True):
            guesses, above = [], node
            while above.id != self.root.id:
                above = self.nodes.get(above.parent, self.root)
                guesses.append(above)
            older = [self._row(t, p, n)
                     for p, (t, n) in enumerate(zip(self.tokens, self.text, strict=True))][:-1]
            older += [self._row(n.token, n.position, n.number) for n in reversed(guesses)]
            want = self.reference.scores(older, self.embedding[node.token], node.position)
            # transformers norms and rotates in float32, whatever the dtype.
            assert np.allclose(scores, want[tokens], rtol=0, atol=2e-5)
            assert sorted(tokens.tolist()) == list(range(V))


@given(seed=st.integers(0, 2**31), prompt=st.integers(1, 9), width=st.sampled_from([1, 4]),
       moves=st.lists(st.sampled_from(["layer", "layer", "taps", "taps", "hit", "miss", "again"]),
                      min_size=4, max_size=14))
@example(seed=1, prompt=1, width=1, moves=["miss", "layer", "layer", "hit", "taps", "layer"])
@examples(25, quick=10)
def test_whatever_has_arrived_is_used_and_nothing_else(seed, prompt, width, moves):
    s = Session(seed)
    s.begin(prompt)
    newest = [s.root]
    s.expand(newest)
    for move in moves:
        if move == "taps":
            s.some_taps()
        elif move == "layer":
            newest = [s.grow(newest[int(i)]) for i in s.rng.integers(0, len(newest), size=width)]
            s.expand(newest)
        elif move == "again":
            s.expand([s.root, *newest] if s.root not in newest else newest)
        elif move == "hit" and s.nodes:
            s.hit(s.nodes[int(s.rng.choice(sorted(s.nodes)))])
            newest = [n for n in newest if n.id in s.nodes] or [s.root]
        else:
            s.miss(bool(s.rng.random() < 0.7))
            newest = [s.root]
            if s.text[-1] >= 0:
                s.expand(newest)
    s.expand([s.root])


def test_keys_and_values_of_finished_rows_are_computed_once():
    s = Session(2)
    s.begin(8)
    for number in s.text:
        s.tap(number, 3)
    offered = []
    original = s.drafter._module.keys_values
    s.drafter._module.keys_values = lambda g, p: offered.append(g.shape[1]) or original(g, p)
    s.expand([s.root])
    assert offered == [7]
    child = s.grow(s.root)
    s.expand([child])
    assert offered == [7, 1]  # the root, as far as it is known
    s.expand([s.grow(child)])
    assert offered == [7, 1, 1]  # the child; nothing new of the root
    s.tap(s.root.number, 2)
    s.tap(s.root.number, 1)
    s.expand([s.grow(child)])
    assert offered == [7, 1, 1, 1]


def test_the_states_of_dead_rows_are_forgotten():
    s = Session(4)
    s.begin(6)
    for _ in range(20):
        nodes = [s.grow(s.root) for _ in range(4)]
        s.expand(nodes)
        below = [s.grow(n) for n in nodes]
        s.expand(below)
        for number, layer in s.sent:
            s.tap(number, layer)
        s.sent = []
        s.hit(below[1])
        s.expand([s.root])
        for node in nodes:  # too late: decided, and dead but for one whose final state is here
            s.tap(node.number, 4)
    rows = s.drafter._rows
    assert len(rows._states) <= 10
    assert len(s.drafter._nodes) <= 8
    assert rows.slots <= len(s.tokens) + 8


def test_the_cache_grows_past_its_first_size():
    s = Session(0)
    s.begin(250)
    s.expand([s.root])
    for _ in range(6):
        s.expand([s.grow(s.root) for _ in range(4)])
        s.hit(s.grow(s.root))
    s.expand([s.grow(s.root)])


def test_reset_forgets_everything():
    module = make_module(1)
    s = Session(7, module)
    s.begin(5)
    s.some_taps()
    s.expand([s.root])
    s.expand([s.grow(s.root)])
    fresh = Session(7, module)
    fresh.drafter = s.drafter
    fresh.drafter.reset(Sampling(), "draft", 1.0)
    fresh.begin(3)
    fresh.expand([fresh.grow(fresh.root)])


def test_a_request_without_nodes_is_answered():
    s = Session(2)
    s.begin(3)
    assert s.drafter.expand(DraftRequest(s.root.id, (), 4)).tokens.shape == (0, 0)


def test_misuse_is_named():
    drafter = SpdDrafter(make_module(0), torch.zeros(V, H, dtype=torch.float64))
    features = torch.zeros(1, H)
    with pytest.raises(ProtocolError, match="as many features"):
        drafter.commit([1], features, [0])
    with pytest.raises(ProtocolError, match="the first token of a text"):
        drafter.commit([1, 2], None)
    drafter.commit([5], None)
    with pytest.raises(ProtocolError, match="as many features and row numbers"):
        drafter.commit([1], features)
    with pytest.raises(ProtocolError, match="root stands at position 9"):
        drafter.expand(DraftRequest(3, (DraftNode(3, -1, 5, 9),), 2))
    with pytest.raises(ProtocolError, match="before its parent 77"):
        drafter.expand(DraftRequest(3, (DraftNode(80, 77, 1, 5),), 2))


def test_a_saved_module_is_the_module(tmp_path):
    module = make_module(6)
    save_module(module, tmp_path, torch.float64)
    loaded = load_module(tmp_path, torch.float64)
    assert loaded.target_layers == LAYERS
    for (name, a), (other, b) in zip(module.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    s = Session(6, loaded)
    s.begin(4)
    s.expand([s.grow(s.root)])


def test_a_damaged_module_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json"):
        load_module(tmp_path, torch.float32)
    module = make_module(0)
    save_module(module, tmp_path, torch.float32)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"target_layers"', '"layers"'))
    with pytest.raises(FlowspecError, match="has no target_layers"):
        load_module(tmp_path, torch.float32)
    config.write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(FlowspecError, match=r"layers\.2\.\S+ is missing from the SPD module"):
        load_module(tmp_path, torch.float32)
    config.write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(FlowspecError, match=r"layers\.1\.\S+ does not belong in an SPD module"):
        load_module(tmp_path, torch.float32)
    config.write_text(text.replace('"vocab_size": 53', '"vocab_size": 54'))
    with pytest.raises(FlowspecError, match=r"lm_head\.weight has shape \[53, 32\]"):
        load_module(tmp_path, torch.float32)
    config.write_text(text)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"neither model\.safetensors nor"):
        load_module(tmp_path, torch.float32)


def test_a_row_that_is_sent_again_is_computed_again() -> None:
    store = RowStore(4, torch.float32, torch.device("cpu"))
    store.begin(7)
    row = store.child(store.text[0], 3)
    store.number(row, 1)
    row.computed_depth = 2
    store.number(row, 1)
    assert row.computed_depth == 2
    store.number(row, 9)  # its states are those of another place now
    assert (row.number, row.computed_depth) == (9, -1)

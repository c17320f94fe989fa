"""EagleDrafter against a float64 recomputation written from the formulas, without any cache."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from flowspec_edge.drafting.eagle import EagleDrafter, EagleHead
from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Payload
from flowspec_edge.sampling import Sampling, gumbel
from flowspec_edge.tree.requests import DraftNode, DraftRequest

GREEDY = Sampling()
H, V, HEADS, KV_HEADS = 32, 61, 4, 2


def make_head(seed, **extra):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=1,
                         num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, bias=True, **extra)
    head = EagleHead(config).double()
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn_like(p) * 0.8 / p.shape[-1] ** 0.5)
    return head


class Reference:
    """The head by its formulas: numpy, float64, every row recomputed from its inputs."""

    def __init__(self, head, lm_head):
        self.w = {n: p.detach().numpy() for n, p in head.state_dict().items()}
        self.lm_head = lm_head.numpy()
        self.theta, self.eps = 10000.0, head.config.rms_norm_eps

    def _rotate(self, x, position):  # x [heads, head_dim]
        d = x.shape[-1]
        angle = position * self.theta ** (-np.arange(0, d, 2) / d)
        c, s = np.cos(angle), np.sin(angle)
        a, b = x[:, : d // 2], x[:, d // 2 :]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    def _linear(self, name, x):
        y = self.w[name + ".weight"] @ x
        bias = self.w.get(name + ".bias")
        return y if bias is None else y + bias

    def row(self, inputs):
        """Output of the last of ``inputs`` = [(feature, token, position)], which sees all of them."""
        keys, values = [], []
        for feature, token, position in inputs:
            x = self._linear("fc", np.concatenate([self.w["embed_tokens.weight"][token], feature]))
            a = "layers.0.self_attn."
            keys.append(self._rotate(self._linear(a + "k_proj", x).reshape(KV_HEADS, -1), position))
            values.append(self._linear(a + "v_proj", x).reshape(KV_HEADS, -1))
        q = self._rotate(self._linear(a + "q_proj", x).reshape(HEADS, -1), position)
        heads = []
        for i in range(HEADS):
            j = i // (HEADS // KV_HEADS)
            scores = np.array([k[j] @ q[i] for k in keys]) / np.sqrt(H // HEADS)
            p = np.exp(scores - scores.max())
            heads.append((p / p.sum()) @ np.array([v[j] for v in values]))
        x = x + self._linear(a + "o_proj", np.concatenate(heads))
        norm = x / np.sqrt((x**2).mean() + self.eps) * self.w["layers.0.post_attention_layernorm.weight"]
        gate, up = self._linear("layers.0.mlp.gate_proj", norm), self._linear("layers.0.mlp.up_proj", norm)
        return x + self._linear("layers.0.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


class Session:
    """Drives a drafter through a random history and checks every expansion."""

    def __init__(self, seed, sampling=GREEDY, rank="draft", tau=0.7, **config):
        self.rng = np.random.default_rng(seed)
        head = make_head(seed, **config)
        lm_head = torch.randn(V, H, dtype=torch.float64)
        self.reference = Reference(head, lm_head)
        self.drafter = EagleDrafter(head, lm_head)
        self.ranking = (sampling, rank, tau)
        self.drafter.reset(*self.ranking)
        self.text, self.features = [], []  # features[i] predicted text[i + 1]
        self.nodes, self.children = {}, {}  # every node of the current tree; id -> child ids
        self.inputs, self.outputs = {}, {}  # of expanded tree rows
        self.next_id, self.root = 0, None

    def commit(self, tokens):
        if not self.text:
            self.text.append(tokens[0])
            self.drafter.commit(tokens[:1], None)
            tokens = tokens[1:]
        rows = self.rng.normal(size=(len(tokens), H)).astype(np.float32)
        self.text += tokens
        self.features += list(rows.astype(np.float64))
        self.drafter.commit(tokens, Payload("float32", rows))

    def add(self, parent, token, position):
        node = DraftNode(self.next_id, parent, int(token), position)
        self.nodes[node.id] = node
        self.children[node.id] = []
        self.next_id += 1
        return node

    def plant(self):
        """A root that no node of the tree was: the start of a round."""
        self.nodes, self.children, self.inputs, self.outputs = {}, {}, {}, {}
        self.root = self.add(-1, self.text[-1], len(self.text) - 1)

    def chain(self, node):
        ids = []
        while node != self.root.id:
            ids.insert(0, node)
            node = self.nodes[node].parent
        return ids

    def expand(self, ids, k=3):
        before = dict(self.outputs)
        true_rows = [(f, t, i) for i, (f, t) in enumerate(zip(self.features, self.text[1:], strict=True))]
        for i in ids:
            if i != self.root.id:
                node = self.nodes[i]
                self.inputs[i] = (before[node.parent], node.token, node.position - 1)
        for i in ids:
            path = [self.inputs[j] for j in self.chain(i)]
            self.outputs[i] = self.reference.row(true_rows + path)
        # The root's row is the last of the text, computed whether or not it was asked for.
        self.outputs[self.root.id] = self.reference.row(true_rows)
        got = self.drafter.expand(DraftRequest(self.root.id, tuple(self.nodes[i] for i in ids), k))
        for row, i in enumerate(ids):
            x = self.reference.lm_head @ self.outputs[i]
            sampling, rank, tau = self.ranking
            if rank == "noise":
                x = x / sampling.temperature
                x = (log_softmax(x) + gumbel(sampling.seed, self.nodes[i].position + 1, V)) / tau
            x = log_softmax(x)
            best = np.argsort(-x)[:k]
            # transformers' RMSNorm and rotary angles are float32 at any dtype: hence the tolerance.
            np.testing.assert_allclose(got.scores[row], x[best], rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(got.scores[row], x[got.tokens[row]], rtol=1e-3, atol=1e-3)
            for token in got.tokens[row]:
                if all(self.nodes[c].token != token for c in self.children[i]):
                    child = self.add(i, token, self.nodes[i].position + 1)
                    self.children[i].append(child.id)
        return got

    def descend(self, path):
        """Commit the tokens of nodes below the root and make the last of them the root."""
        self.commit([self.nodes[i].token for i in path])
        self.root = self.nodes[path[-1]]
        below = {self.root.id}
        for i in sorted(self.nodes):
            if self.nodes[i].parent in below:
                below.add(i)
        self.nodes = {i: n for i, n in self.nodes.items() if i in below}
        self.inputs = {i: x for i, x in self.inputs.items() if i in below and i != self.root.id}
        self.outputs = {i: x for i, x in self.outputs.items() if i in below}

    def expandable(self):
        return [i for i, n in self.nodes.items() if i != self.root.id and n.parent in self.outputs]


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_agree_with_full_recomputation(seed):
    noisy = seed % 2 == 1
    s = Session(seed, Sampling(temperature=0.8 if noisy else 0.0, seed=seed), "noise" if noisy else "draft")
    s.commit(s.rng.integers(0, V, size=7).tolist())
    s.plant()
    s.expand([s.root.id])
    for _ in range(25):
        kind = s.rng.integers(0, 6)
        if kind == 0:  # a miss: any token, a fresh root
            s.commit(s.rng.integers(0, V, size=int(s.rng.integers(1, 4))).tolist())
            s.plant()
            s.expand([s.root.id])
        elif kind <= 2:  # one or several levels down
            path, at = [], s.root.id
            for _ in range(int(s.rng.integers(1, 4))):
                if not s.children[at]:
                    break
                at = int(s.rng.choice(s.children[at]))
                path.append(at)
            if path:
                s.descend(path)
                known = s.expandable() if s.root.id in s.outputs else []
                s.expand([s.root.id, *known[:3]])
        elif candidates := s.expandable():
            ids = s.rng.choice(candidates, size=min(len(candidates), 5), replace=False).tolist()
            # A request never holds a node together with its parent.
            ids = [i for i in ids if s.nodes[i].parent not in ids]
            s.expand(ids + ([s.root.id] if s.rng.random() < 0.5 else []))


def test_every_node_again_after_every_commit():
    s = Session(11)
    s.commit([3, 1, 4, 1, 5])
    s.plant()
    s.expand([s.root.id])
    for _ in range(6):
        first = list(s.children[s.root.id])
        s.expand(first)
        s.expand([c for i in first for c in s.children[i]])
        s.expand(first)  # a second time: approximated rows replaced
        s.descend([first[0]])
        s.expand([s.root.id])


def test_the_cache_grows_past_its_first_size():
    s = Session(5)
    s.commit([int(t) for t in s.rng.integers(0, V, size=240)])
    s.plant()
    s.expand([s.root.id])
    s.expand(s.children[s.root.id])
    s.descend([s.children[s.root.id][1]])
    s.commit([int(t) for t in s.rng.integers(0, V, size=40)])
    s.plant()
    s.expand([s.root.id])
    s.expand(s.children[s.root.id])


def test_root_again_without_new_text_runs_no_row():
    s = Session(2)
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
    s = Session(3)
    s.commit([1, 2, 3, 4])
    s.plant()
    s.expand([s.root.id])
    s.expand(s.children[s.root.id])
    s.drafter.reset(*s.ranking)
    s.text, s.features = [], []
    s.commit([9, 8])
    s.plant()
    s.expand([s.root.id])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.05), ("bfloat16", 0.3)])
def test_half_precision_heads_take_features_of_their_dtype(dtype, tolerance):
    head, lm_head = make_head(4), torch.randn(V, H, dtype=torch.float64) / 8
    features = torch.randn(6, H).to(getattr(torch, dtype))
    array = features.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else features.numpy()
    reference = Reference(head, lm_head)
    rows = [(f, t, i) for i, (f, t) in enumerate(zip(features.double().numpy(), range(1, 7), strict=True))]
    x = reference.lm_head @ reference.row(rows)
    drafter = EagleDrafter(head.to(getattr(torch, dtype)), lm_head.to(getattr(torch, dtype)))
    drafter.commit([0], None)
    drafter.commit(list(range(1, 7)), Payload(dtype, array))
    got = drafter.expand(DraftRequest(0, (DraftNode(0, -1, 6, 6),), V))
    want = log_softmax(x)
    assert np.abs(got.scores[0] - want[got.tokens[0]]).max() < tolerance * np.abs(want).max()


def test_misuse_is_named():
    s = Session(6)
    s.commit([5])
    with pytest.raises(ProtocolError, match="nothing has been committed"):
        s.drafter.expand(DraftRequest(0, (DraftNode(0, -1, 5, 0),), 2))
    with pytest.raises(ProtocolError, match="only the first token"):
        s.drafter.commit([1], None)
    with pytest.raises(ProtocolError, match="as many features"):
        s.drafter.commit([1, 2], Payload("float32", np.zeros((1, H), np.float32)))
    s.commit([5, 6])
    s.plant()
    s.expand([s.root.id])
    with pytest.raises(ProtocolError, match="before its parent 77"):
        s.drafter.expand(DraftRequest(s.root.id, (DraftNode(80, 77, 1, 5),), 2))
    with pytest.raises(ProtocolError, match="before its parent 81"):  # 81 becomes root, unexpanded
        s.drafter.expand(DraftRequest(81, (DraftNode(82, 81, 1, 6),), 2))
    with pytest.raises(ProtocolError, match="root stands at position 9"):
        s.drafter.expand(DraftRequest(s.root.id, (DraftNode(s.root.id, -1, 1, 9),), 2))

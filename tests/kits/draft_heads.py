"""Draft heads by their formulas, and histories to hold drafters against: numpy, float64, no cache.

Also a writer of EAGLE-3 heads in the published formats.  Every row is recomputed from its inputs, so
nothing here knows slots, masks or what was computed before.
"""

from __future__ import annotations

import json

import numpy as np
import safetensors.torch
import torch

from flowspec_edge.sampling.rule import Sampling, gumbel
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

GREEDY = Sampling()
# Rotary angles are float32 at any dtype.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def rotate(x, position, theta=10000.0):
    """Rotary embedding of [heads, head_dim] at one position."""
    d = x.shape[-1]
    angle = position * theta ** (-np.arange(0, d, 2) / d)
    c, s = np.cos(angle), np.sin(angle)
    a, b = x[:, : d // 2], x[:, d // 2 :]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


class Layer:
    """A Llama layer's parts over tensors ``w`` (name -> float64 array) below ``prefix``."""

    def __init__(self, w, prefix, heads, kv_heads, eps, theta=10000.0):
        self.w, self.prefix, self.heads, self.kv_heads = w, prefix, heads, kv_heads
        self.eps, self.theta = eps, theta

    def linear(self, name, x):
        y = self.w[name + ".weight"] @ x
        bias = self.w.get(name + ".bias")
        return y if bias is None else y + bias

    def norm(self, name, x):
        return x / np.sqrt((x**2).mean() + self.eps) * self.w[name + ".weight"]

    def head_norm(self, name, heads):
        """Of each of ``heads`` [n, d], where the layer has such a norm."""
        return np.stack([self.norm(name, x) for x in heads]) if name + ".weight" in self.w else heads

    def turn(self, x, position):
        return rotate(x, position, self.theta)

    def query(self, x):
        """Of each head [heads, d], before its norm; and what gates the heads' outputs, all of them by 1 here."""
        return self.linear(self.prefix + "self_attn.q_proj", x).reshape(self.heads, -1), 1.0

    def attend(self, rows):
        """Attention of the last of ``rows`` = [(x, position)] over all of them: [H]."""
        a = self.prefix + "self_attn."
        keys = [self.turn(self.head_norm(a + "k_norm", self.linear(a + "k_proj", x).reshape(self.kv_heads, -1)), p)
                for x, p in rows]
        values = [self.linear(a + "v_proj", x).reshape(self.kv_heads, -1) for x, _ in rows]
        x, position = rows[-1]
        q, gate = self.query(x)
        q = self.turn(self.head_norm(a + "q_norm", q), position)
        out = []
        for i in range(self.heads):
            j = i // (self.heads // self.kv_heads)
            scores = np.array([k[j] @ q[i] for k in keys]) / np.sqrt(q.shape[-1])
            out.append(np.exp(log_softmax(scores)) @ np.array([v[j] for v in values]))
        return self.linear(a + "o_proj", (np.array(out) * gate).reshape(-1))

    def mlp(self, x):
        gate, up = (self.linear(f"{self.prefix}mlp.{name}_proj", x) for name in ("gate", "up"))
        return self.linear(self.prefix + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)


class Eagle2:
    """An EAGLE-1/2 head: h = fc([embedding; feature]), a layer without norm in front."""

    def __init__(self, w, lm_head, heads, kv_heads, eps, window=2048):
        self.layer = Layer(w, "layers.0.", heads, kv_heads, eps)
        self.w, self.lm_head, self.window = w, lm_head, window

    def state(self, known):
        return known

    def row(self, inputs):
        """Output of the last of ``inputs`` = [(state, token, position)], each seeing those before it."""
        embedding = self.w["embed_tokens.weight"]
        rows = [(self.layer.linear("fc", np.concatenate([embedding[token], state])), position)
                for state, token, position in inputs[-self.window :]]
        x = rows[-1][0] + self.layer.attend(rows)
        return x + self.layer.mlp(self.layer.norm("layers.0.post_attention_layernorm", x))

    def logits(self, output):
        return self.lm_head @ output


class Eagle3:
    """An EAGLE-3 head; logits of tokens that it cannot name are -inf.  ``switches``: of its config.json."""

    def __init__(self, w, heads, kv_heads, eps, window=2048, theta=10000.0, **switches):
        self.layer = Layer(w, "midlayer.", heads, kv_heads, eps, theta)
        self.w, self.window, self.switches = w, window, switches

    def state(self, known):
        if self.switches.get("norm_before_fc"):
            known = self.layer.norm("input_norm", known)
        if self.switches.get("fc_norm"):
            count = sum(name.startswith("fc_norm.") for name in self.w)
            known = np.concatenate([self.layer.norm(f"fc_norm.{i}", part)
                                    for i, part in enumerate(np.split(known, count))])
        return self.layer.linear("fc", known)

    def row(self, inputs):
        norm = self.layer.norm
        rows = [(np.concatenate([norm("midlayer.input_layernorm", self.w["embed_tokens.weight"][token]),
                                 norm("midlayer.hidden_norm", state)]), position)
                for state, token, position in inputs[-self.window :]]
        x = inputs[-1][0]
        if self.switches.get("norm_before_residual"):
            x = norm("midlayer.hidden_norm", x)
        x = x + self.layer.attend(rows)
        x = x + self.layer.mlp(norm("midlayer.post_attention_layernorm", x))
        return norm("norm", x) if self.switches.get("norm_output") else x

    def logits(self, output):
        normed = output if self.switches.get("norm_output") else self.layer.norm("norm", output)
        drafted = self.w["lm_head.weight"] @ normed
        if "efficient_lm_head.weight" in self.w:
            low = self.w["efficient_lm_head.weight"] @ (self.w["efficient_lm_head_down_proj.weight"] @ normed)
            return rescored(low, drafted, self.switches["num_candidates"])
        if "d2t" not in self.w:
            return drafted
        x = np.full(len(self.w["embed_tokens.weight"]), -np.inf)
        for token, logit in enumerate(drafted):
            x[token + int(self.w["d2t"][token])] = logit
        return x


def rescored(low, exact, count):
    """EAGLE-4: the ``count`` tokens that are best by ``low`` get their ``exact`` logits, [V] each.

    Ours is the rest: it keeps ``low``, moved by the candidates' mean error, below the least of them.
    """
    best = np.argsort(-low)[:count]
    found = np.minimum(low + (exact - low)[best].mean(), exact[best].min())
    found[best] = exact[best]
    return found


def causal_pass(head, states, tokens):
    """A head's outputs for rows [n, H] from position 0 on, each of which sees those before it."""
    head.prepare()
    shape, n = head.cache_shape(), len(tokens)
    cache, mask = shape.arena(n).take(n), shape.mask(np.tri(n, dtype=bool))
    with torch.inference_mode():
        return head(states, torch.tensor(tokens), torch.arange(n), mask, cache)


SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_IDS = "eagle_aux_hidden_state_layer_ids"
VARIANTS = {  # options of published_eagle3, for targets of 8 layers or more
    "speculators": {"form": "speculators", "drafted": 20, "norm_before_residual": True},
    "speculators with Qwen3's layer": {"form": "speculators", "qk_norm": True, "embedding": True,
                                       "norm_before_residual": True},
    "speculators, EAGLE-3.1": {"form": "speculators", "fc_norm": True, "norm_output": True, "states": 5,
                               "norm_before_residual": True, _IDS: [2, 3, 4, 6, 8]},
    "one norm before fc": {"form": "speculators", "norm_before_fc": True, "drafted": 20},
    "DeepSpec": {"form": "deepspec", "states": 5, "qk_norm": True, "embedding": True,
                 "target_layer_ids": [0, 1, 3, 5, 6]},
    "SpecForge, EAGLE-3.1": {"fc_norm": True, "norm_output": True, "drafted": 20},
    "EAGLE-4": {"form": "eagle4", "fc_norm": True, "norm_output": True, "embedding": True, "num_candidates": 16,
                "sliding_window": 9, "factor": 8},
    "one state": {"states": 1, _IDS: [5]},
}


def published_eagle3(directory, seed, target_width, vocabulary, width=None, drafted=None, heads=4, kv_heads=4,
                     embedding=False, states=3, form="classic", qk_norm=False, factor=0, **config):
    """An EAGLE-3 head as others publish them, written without our code: its config and tensors.

    ``form``: whose file it is: "classic" (EAGLE's authors), "speculators", "deepspec" or "eagle4" (with a ``factor``
    of that rank).
    Returned are the classic form's fields and names.
    """
    width, drafted = width or target_width, drafted or vocabulary
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": width,
           "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": heads,
           "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1,
           "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 2048,
           "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": vocabulary,
           "draft_vocab_size": drafted, **config}
    kv = width // heads * kv_heads
    shapes = {"fc.weight": (width, states * target_width), "norm.weight": (width,),
              "lm_head.weight": (drafted, width),
              "midlayer.hidden_norm.weight": (width,), "midlayer.input_layernorm.weight": (width,),
              "midlayer.post_attention_layernorm.weight": (width,),
              "midlayer.self_attn.q_proj.weight": (width, 2 * width),
              "midlayer.self_attn.k_proj.weight": (kv, 2 * width),
              "midlayer.self_attn.v_proj.weight": (kv, 2 * width),
              "midlayer.self_attn.o_proj.weight": (width, width),
              "midlayer.mlp.gate_proj.weight": (40, width), "midlayer.mlp.up_proj.weight": (40, width),
              "midlayer.mlp.down_proj.weight": (width, 40)}
    if embedding:
        shapes["embed_tokens.weight"] = (vocabulary, width)
    if qk_norm:
        shapes |= {f"midlayer.self_attn.{name}_norm.weight": (width // heads,) for name in "qk"}
    if raw.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(states)}
    if raw.get("norm_before_fc"):
        shapes["input_norm.weight"] = (states * target_width,)
    if factor:
        shapes |= {"efficient_lm_head.weight": (drafted, factor), "efficient_lm_head_down_proj.weight": (factor, width)}
    weights = drawn_weights(shapes, drafted, vocabulary, seed)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_in_form(form, raw, qk_norm)))
    names = {n: n if form == "classic" else n.replace("midlayer.", "layers.0.") for n in weights}
    safetensors.torch.save_file({names[n]: w for n, w in weights.items()}, directory / "model.safetensors")
    return raw, weights


def drawn_weights(shapes, drafted, vocabulary, seed):
    """Random tensors of those shapes, and a draft vocabulary of ``drafted`` tokens if it is not the whole."""
    generator = torch.Generator().manual_seed(seed)
    weights = {n: torch.randn(s, generator=generator) / (s[-1] ** 0.5 if len(s) == 2 else 1)
               for n, s in shapes.items()}
    if drafted < vocabulary:
        ids = torch.randperm(vocabulary, generator=generator)[:drafted].sort().values
        weights["d2t"] = ids - torch.arange(drafted)
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def _in_form(form, raw, qk_norm):
    if form == "speculators":
        beside = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", *SWITCHES)
        layer = {key: value for key, value in raw.items() if key not in (*beside, "architectures")}
        layer |= {"model_type": "qwen3" if qk_norm else "llama",
                  "head_dim": raw["hidden_size"] // raw["num_attention_heads"]}
        return {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
                "transformer_layer_config": layer, **{key: raw.get(key) for key in beside}}
    if form == "eagle4":
        return raw | {"architectures": ["LlamaForCausalLMEagle4"]}
    if form == "deepspec":
        return {key: value for key, value in raw.items() if key != "draft_vocab_size"} | {
            "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "layer_types": ["full_attention"]}
    return raw


class Session:
    """Drives a drafter through a history and checks every expansion.

    ``width``: values of what the target tells of a row; ``tell(rows, known)`` shows the drafter those
    of rows with these numbers before they are committed, if it does not take them as features.
    """

    def __init__(self, reference, drafter, width, vocabulary, seed=0, sampling=GREEDY, rank="draft", tau=0.7,
                 tell=None):
        self.rng = np.random.default_rng(seed)
        self.reference, self.drafter, self.width, self.vocabulary = reference, drafter, width, vocabulary
        self.ranking, self.tell = (sampling, rank, tau), tell
        self.drafter.reset(*self.ranking)
        self.text, self.states = [], []  # states[i] entered the row that text[i + 1] came of
        self.nodes, self.children = {}, {}  # every node of the current tree; id -> child ids
        self.inputs, self.outputs = {}, {}  # of expanded tree rows
        self.next_id, self.next_number, self.root = 0, 0, None

    def commit(self, tokens):
        if not self.text:
            self.text.append(tokens[0])
            self.drafter.commit(tokens[:1], None)
            tokens = tokens[1:]
        if not tokens:
            return
        known = self.rng.normal(size=(len(tokens), self.width)).astype(np.float32)
        # Numbers of dead rows lie between those that become text.
        rows = [self.next_number + 2 * i for i in range(len(tokens))]
        self.next_number = rows[-1] + 1
        self.text += tokens
        self.states += [self.reference.state(k) for k in known.astype(np.float64)]
        if self.tell:
            self.tell(rows, known)
        self.drafter.commit(tokens, torch.from_numpy(known), rows)

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
        true_rows = [(s, t, i) for i, (s, t) in enumerate(zip(self.states, self.text[1:], strict=True))]
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
            x = self.reference.logits(self.outputs[i])
            sampling, rank, tau = self.ranking
            if rank == "noise" and not sampling.greedy:
                x = log_softmax(x / sampling.temperature)
                x = (x + gumbel(sampling.seed, self.nodes[i].position + 1, self.vocabulary)) / tau
            x = log_softmax(x)
            best = np.argsort(-x)[:k]
            np.testing.assert_allclose(got.scores[row], x[best], **TOLERANCE)
            np.testing.assert_allclose(got.scores[row], x[got.tokens[row]], **TOLERANCE)
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

    def rewind(self, tokens):
        """Another session goes on after the first ``tokens`` tokens, and counts anew."""
        assert self.drafter.rewind(tokens, *self.ranking)
        self.text, self.states = self.text[:tokens], self.states[: tokens - 1]
        self.next_id = self.next_number = 0

    def rewinds(self):
        """To before what a pass has computed, to after it, to the very end and to the first token."""
        self.random_history(6, prompt=12)
        for more, keep in ((0, 11), (4, 13), (3, 16), (0, 1)):
            if more:
                self.commit(self.rng.integers(0, self.vocabulary, size=more).tolist())
            self.rewind(keep)
            self.random_history(6, prompt=2)
        assert not self.drafter.rewind(len(self.text) + 1, *self.ranking)
        assert not self.drafter.rewind(0, *self.ranking)

    def forgets(self):
        """After a reset another text begins."""
        self.commit([1, 2, 3, 4])
        self.plant()
        self.expand([self.root.id])
        self.expand(self.children[self.root.id])
        self.drafter.reset(*self.ranking)
        self.text, self.states, self.next_number = [], [], 0
        self.commit([9, 8])
        self.plant()
        self.expand([self.root.id])

    def expandable(self):
        return [i for i, n in self.nodes.items() if i != self.root.id and n.parent in self.outputs]

    def random_history(self, steps, prompt=7):
        """Commits, misses, hits and expansions as they come."""
        self.commit(self.rng.integers(0, self.vocabulary, size=prompt).tolist())
        self.plant()
        self.expand([self.root.id])
        for _ in range(steps):
            kind = self.rng.integers(0, 6)
            if kind == 0:  # a miss: any token, a fresh root
                self.commit(self.rng.integers(0, self.vocabulary, size=int(self.rng.integers(1, 4))).tolist())
                self.plant()
                self.expand([self.root.id])
            elif kind <= 2:  # one or several levels down
                path, at = [], self.root.id
                for _ in range(int(self.rng.integers(1, 4))):
                    if not self.children[at]:
                        break
                    at = int(self.rng.choice(self.children[at]))
                    path.append(at)
                if path:
                    self.descend(path)
                    known = self.expandable() if self.root.id in self.outputs else []
                    self.expand([self.root.id, *known[:3]])
            elif candidates := self.expandable():
                ids = self.rng.choice(candidates, size=min(len(candidates), 5), replace=False).tolist()
                # A request never holds a node together with its parent.
                ids = [i for i in ids if self.nodes[i].parent not in ids]
                self.expand(ids + ([self.root.id] if self.rng.random() < 0.5 else []))

    def every_node_again(self, rounds=6):
        """Chains and levels, every node expanded twice, with a commit after each."""
        for _ in range(rounds):
            first = list(self.children[self.root.id])
            self.expand(first)
            self.expand([c for i in first for c in self.children[i]])
            self.expand(first)  # a second time: approximated rows replaced
            self.descend([first[0]])
            self.expand([self.root.id])

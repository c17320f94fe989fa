"""Block drafters by their formulas (numpy, float64), and a writer of heads as others publish them."""

from __future__ import annotations

import json

import numpy as np
import safetensors.torch

from kits.draft_heads import Layer, drawn_weights

WIDTH, VOCABULARY, MASK = 32, 61, 60
VARIANTS = {  # options of published_block, for targets of 8 layers or more
    "z-lab": {"ids": [1, 3, 5]},
    "z-lab, windows": {"ids": [1, 4], "kinds": ["sliding_attention", "full_attention"], "window": 5},
    "z-lab, default ids": {"ids": None, "layers": 3},
    "JetSpec": {"ids": [1, 5], "causal": True},
    "SpecForge, gated": {"form": "specforge", "ids": [1, 3, 5], "rank": 6, "gated": True, "window": 3,
                         "kinds": ["full_attention", "sliding_attention"]},
    "DeepSpec": {"form": "deepspec", "ids": [-1, 1, 3, 4, 5], "rank": 6, "block": 5},
    "DeepSpec, DFlash": {"form": "deepspec", "ids": [1, 5], "block": 5},
    "z-lab, DFlash2": {"ids": [1, 5], "top": 5, "is_causal": False, "window": 7,
                       "kinds": ["sliding_attention", "full_attention"]},
    "speculators": {"form": "speculators", "ids": [2, 6], "drafted": 20},
    "speculators, DSpark": {"form": "speculators", "ids": [2, 4, 6], "rank": 6, "drafted": 20, "window": 4,
                            "kinds": ["full_attention", "sliding_attention"]},
    "speculators, DFlash2": {"form": "speculators", "ids": [2, 4, 6], "top": 9, "taps": 3, "window": 4,
                             "kinds": ["full_attention", "sliding_attention"]},
}


def published_block(directory, seed=1, form="zlab", ids=(1, 5), layers=2, block=6, rank=0, gated=False,
                    causal=False, drafted=None, kinds=None, window=None, width=WIDTH,
                    vocabulary=VOCABULARY, heads=4, kv_heads=2, top=0, taps=2, **config):
    """A head as others publish it, written without our code: (facts for :class:`Block`, tensors); with
    ``top`` candidates it is a DFlash2."""
    kinds, drafted = kinds or ["full_attention"] * layers, drafted or vocabulary
    layer = {"model_type": "qwen3", "hidden_size": width, "intermediate_size": 40, "head_dim": 8,
             "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
             "rms_norm_eps": 1e-6, "rope_theta": 5e5, "vocab_size": vocabulary,
             "max_position_embeddings": 512,
             "layer_types": kinds,
             "sliding_window": window, "use_sliding_window": window is not None,
             "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    markov = {"markov_rank": rank, "markov_head_type": "gated" if gated else "vanilla"}
    second = {"conv_kernel_size": taps, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": top}
    second = second if top else {}
    mask = vocabulary - 1
    captured = [depth + (form != "speculators") for depth in ids] if ids else [2, 4, 6]
    if form == "deepspec":
        raw = {**layer, **markov, "architectures": ["Qwen3DSparkModel"], "block_size": block,
               "mask_token_id": mask, "target_layer_ids": list(ids), "num_anchors": 4,
               "enable_confidence_head": rank > 0, "confidence_head_with_markov": rank > 0}
    elif form == "speculators":
        kind = "dspark" if rank else "dflash2" if top else "dflash"
        raw = {"speculators_model_type": kind, "transformer_layer_config": layer, **second,
               "aux_hidden_state_layer_ids": list(ids), "block_size": block, "mask_token_id": mask,
               "draft_vocab_size": drafted, "sample_from_anchor": rank > 0, **(markov if rank else {})}
    else:
        own = {"mask_token_id": mask, **({"target_layer_ids": list(ids)} if ids else {}),
               **({"causal_head": True} if causal else {}),
               **({**markov, "projector_type": "dspark"} if rank else {}), **second}
        raw = {**layer, "architectures": ["DFlash2DraftModel" if top else "DFlashDraftModel"],
               "block_size": block, "num_target_layers": 8, "dflash_config": own}
    raw |= config
    shapes = {"fc.weight": (width, len(captured) * width), "hidden_norm.weight": (width,),
              "norm.weight": (width,)}
    for i in range(layers):
        a = f"layers.{i}."
        shapes |= {a + "input_layernorm.weight": (width,), a + "post_attention_layernorm.weight": (width,),
                   a + "self_attn.q_proj.weight": (heads * 8, width), a + "self_attn.q_norm.weight": (8,),
                   a + "self_attn.k_proj.weight": (kv_heads * 8, width), a + "self_attn.k_norm.weight": (8,),
                   a + "self_attn.v_proj.weight": (kv_heads * 8, width),
                   a + "self_attn.o_proj.weight": (width, heads * 8),
                   a + "mlp.gate_proj.weight": (40, width), a + "mlp.up_proj.weight": (40, width),
                   a + "mlp.down_proj.weight": (width, 40)}
        if top:
            shapes |= {a + f"{part}_conv.{name}": shape for part in ("attention", "mlp") for name, shape in
                       (("base_kernel", (2, taps, width)),
                        ("kernel_projection.weight", (2 * taps * width // 4, width)))}
    if top:  # as published: without lm_head, and the codebooks are no modules
        shapes |= {"candidate_selector.hidden_projection.weight": (6, width),
                   "candidate_selector.predecessor_codebook": (vocabulary, 6),
                   "candidate_selector.successor_codebook": (vocabulary, 6)}
    elif form in ("deepspec", "speculators"):
        shapes["lm_head.weight"] = (drafted, width)
    if form == "deepspec":
        shapes["embed_tokens.weight"] = (vocabulary, width)
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocabulary, rank),
                   "markov_head.markov_w2.weight": (drafted, rank), "confidence_head.proj.bias": (1,),
                   "confidence_head.proj.weight": (1, width + rank)}
    if gated:
        shapes |= {"markov_head.gate_proj.weight": (rank, width + rank),
                   "markov_head.gate_proj.bias": (rank,)}
    weights = drawn_weights(shapes, drafted, vocabulary, seed)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    safetensors.torch.save_file(weights, directory / "model.safetensors")
    facts = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "block": block, "mask": mask,
             "captured": captured, "from_root": form == "deepspec" or (form == "speculators" and rank > 0),
             "windows": [window if kind == "sliding_attention" else None for kind in kinds],
             "causal": [causal or (not top and kind == "sliding_attention") for kind in kinds],
             "window_from_root": form == "speculators", "top": top}
    return facts, weights


class Convolutions:
    """Those around a sublayer whose inputs are ``rows``; none where a head has no kernels."""

    def __init__(self, w, prefix, rows):
        self.base = w.get(prefix + "base_kernel")
        if self.base is not None:
            _, taps, width = self.base.shape
            changes = [(w[prefix + "kernel_projection.weight"] @ x).reshape(2, taps, -1) for x in rows]
            self.changes = [np.repeat(change, width // change.shape[-1], axis=-1) for change in changes]

    def __call__(self, side, rows):
        if self.base is None:
            return rows
        return [sum((self.base[side, tap] + change[side, tap]) * rows[slot - tap]
                    for tap in range(self.base.shape[1]) if slot >= tap)
                for slot, change in enumerate(self.changes)]


class Block:
    """One row at a time, of tensors by name as float64 arrays; ``embedding``, ``lm_head``: the target's."""

    def __init__(self, facts, weights, embedding, lm_head):
        self.f = facts
        self.w = {"embed_tokens.weight": embedding, "lm_head.weight": lm_head, **weights}
        self.w = {name: tensor.double().numpy() for name, tensor in self.w.items()}
        self.layers = [Layer(self.w, f"layers.{i}.", facts["heads"], facts["kv_heads"], 1e-6, 5e5)
                       for i in range(facts["layers"])]

    def outputs(self, states, root):
        """Of all slots of the block whose root follows the text with these ``states``."""
        norm, first = self.layers[0].norm, len(states)
        text = [(norm("hidden_norm", self.w["fc.weight"] @ state), i) for i, state in enumerate(states)]
        slots = [self.w["embed_tokens.weight"][token]
                 for token in (root, *[self.f["mask"]] * (self.f["block"] - 1))]
        for i, layer in enumerate(self.layers):
            window, causal = self.f["windows"][i], self.f["causal"][i]
            normed = [norm(f"layers.{i}.input_layernorm", x) for x in slots]
            convolve = Convolutions(self.w, f"layers.{i}.attention_conv.", normed)
            rows = [(x, first + j) for j, x in enumerate(convolve(0, normed))]
            out = []
            for own, at in rows:
                seen = [(row, place) for row, place in rows if place != at and not (causal and place > at)]
                nearest = (first - 1 if self.f["window_from_root"] else at) - (window or 10**6)
                seen += [(row, place) for row, place in text if place > nearest]
                out.append(layer.attend([*seen, (own, at)]))
            slots = [x + y for x, y in zip(slots, convolve(1, out), strict=True)]
            normed = [norm(f"layers.{i}.post_attention_layernorm", x) for x in slots]
            convolve = Convolutions(self.w, f"layers.{i}.mlp_conv.", normed)
            out = convolve(1, [layer.mlp(x) for x in convolve(0, normed)])
            slots = [x + y for x, y in zip(slots, out, strict=True)]
        return [norm("norm", x) for x in slots]

    def logits(self, outputs, depth, token):
        """Of the children of a node ``depth`` below the root that holds ``token``; None: the block ends."""
        slot = depth + (not self.f["from_root"])
        if slot >= self.f["block"]:
            return None
        drafted = self.w["lm_head.weight"] @ outputs[slot]
        if "markov_head.markov_w1.weight" in self.w:
            before = self.w["markov_head.markov_w1.weight"][token]
            if "markov_head.gate_proj.weight" in self.w:
                gate = self.w["markov_head.gate_proj.weight"] @ np.concatenate([outputs[slot], before])
                before = before / (1 + np.exp(-gate - self.w["markov_head.gate_proj.bias"]))
            drafted = drafted + self.w["markov_head.markov_w2.weight"] @ before
        if self.f["top"]:
            a, h, b = (self.w[f"candidate_selector.{name}"] for name in
                       ("predecessor_codebook", "hidden_projection.weight", "successor_codebook"))
            kept = np.argsort(-drafted)[: self.f["top"]]
            x = np.full_like(drafted, -np.inf)
            for child in kept:
                x[child] = drafted[child] + (a[token] * (h @ outputs[slot])) @ b[child]
            return x
        if "d2t" not in self.w:
            return drafted
        x = np.full(len(self.w["embed_tokens.weight"]), -np.inf)
        x[np.arange(len(drafted)) + self.w["d2t"].astype(int)] = drafted
        return x

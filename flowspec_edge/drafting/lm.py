"""A small causal language model of transformers as the drafter.

Tree rows see all of the text, despite a sliding window; that can only worsen drafts in longer texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.tree_cache import CacheShape, JointCache, TreeCache
from flowspec_edge.drafting.tree_drafter import Rows, TreeDrafter
from flowspec_edge.errors import FlowspecError, UsageError, first_line
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest
from flowspec_edge.util.bounded_read import UncachedFile
from flowspec_edge.util.tensors import indices, no_loading_bars
from flowspec_edge.util.weight_file import SAFETENSORS


class LMDrafter(TreeDrafter):
    """``model`` shares the target's tokenizer; ``vocabulary`` is the target's, by default the model's.  Where
    padding differs, tokens beyond the target's are not drafted, those beyond the model's read as its last."""

    def __init__(self, model: PreTrainedModel, vocabulary: int | None = None,
                 shape: CacheShape | None = None) -> None:
        self._model = model.eval().requires_grad_(False)
        self._last_token = model.get_input_embeddings().weight.shape[0] - 1
        self._vocabulary = vocabulary
        self._shape = shape or _cache_shape(model)
        # No method of this object: in a circle of references its cache would wait for the collector.
        super().__init__(self._shape, partial(_logits, model, vocabulary))

    def clone_session(self) -> LMDrafter:
        """For a concurrent session: the same weights, another cache."""
        return LMDrafter(self._model, self._vocabulary, self._shape)

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        self._queue.extend(tokens)
        self._text_length += len(tokens)

    def _rows(self, text: list[int], nodes: list[DraftNode], mask: Tensor) -> Tensor:
        return self._run(self._inputs(text, nodes), mask, self._cache)

    def shares_passes_with(self, other: Drafter) -> bool:
        return isinstance(other, LMDrafter) and other._model is self._model

    def _rows_together(self, begun: Sequence[tuple[TreeDrafter, Rows]]) -> list[Tensor]:
        inputs = [drafter._inputs(text, nodes) for drafter, (text, nodes, _) in begun
                  if isinstance(drafter, LMDrafter)]
        counts = [block.shape[1] for block in inputs]
        caches = JointCache([drafter._cache for drafter, _ in begun], counts)
        mask = caches.mask([mask for _, (_, _, mask) in begun])
        return list(self._run(torch.cat(inputs, 1), mask, caches).split(counts))

    def _inputs(self, text: list[int], nodes: list[DraftNode]) -> Tensor:
        """Tokens and positions, int64 [2, n]."""
        start = self._cache.committed - len(text)
        tokens = [min(token, self._last_token) for token in (*text, *(node.token for node in nodes))]
        positions = [*range(start, start + len(text)), *(node.position for node in nodes)]
        return indices([tokens, positions], self._cache.device)

    def _run(self, inputs: Tensor, mask: Tensor, cache: TreeCache | JointCache) -> Tensor:
        """Last hidden states [n, H] of ``inputs`` [2, n]."""
        out: Tensor = self._model.base_model(
            input_ids=inputs[:1],
            position_ids=inputs[1:],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return out[0]


def _logits(model: PreTrainedModel, vocabulary: int | None, outputs: Tensor) -> Tensor:
    """Last hidden states [n, H] to [n, target's vocabulary], as the model computes them."""
    config = model.config
    logits: Tensor = model.get_output_embeddings()(outputs)[:, :vocabulary]
    logits = logits * (getattr(config, "logit_scale", None) or 1.0)  # Cohere
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


@torch.inference_mode()
def _cache_shape(model: PreTrainedModel) -> CacheShape:
    """From a forward pass, since config.json has many names for it.  ValueError for a model that keeps
    anything but keys and values, all of one shape."""
    cache = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True
                  ).past_key_values
    layers = getattr(cache, "layers", ())
    states = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    shapes = {tuple(state.shape) for state in states if isinstance(state, Tensor)}
    if len(shapes) != 1 or any(state is None for state in states):
        raise ValueError("its layers do not all keep keys and values of one shape")
    [(_, kv_heads, _, head_dim)] = shapes
    return CacheShape(len(layers), kv_heads, head_dim, model.dtype, model.device)


# How far the drafter's log probabilities may be from the model's own.
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.5}


def load_lm(path: Path, target: Path, vocabulary: int, dtype: torch.dtype, device: torch.device) -> LMDrafter:
    """Of ``target`` only the tokenizer is read; ``vocabulary`` is the target's, padding included.  UsageError
    if there is no model, FlowspecError if it cannot be loaded, shares no tokenizer or cannot draft trees."""
    model = _read(path, dtype).to(device)
    for file in path.glob(f"*{SAFETENSORS}"):  # transformers maps them
        UncachedFile(file).drop()
    own = int(model.config.vocab_size)
    if own != vocabulary:
        require_padding(path, target, own, vocabulary)
    unfit = f"{path}: models of type {model.config.model_type!r} cannot draft trees"
    try:
        drafter = LMDrafter(model, vocabulary)
        error = _error_on_a_tree(drafter, model, min(own, vocabulary))
    except Exception as fault:  # forward passes raise many kinds of errors
        raise FlowspecError(f"{unfit}: {first_line(fault)}") from fault
    if not error <= _TOLERANCE[dtype]:
        raise FlowspecError(f"{unfit}: on one, their log probabilities come out wrong by {error:.2g}")
    return drafter


def _read(path: Path, dtype: torch.dtype) -> Any:
    if not (path / "config.json").is_file():
        raise UsageError(f"no draft model at {path}: config.json is missing")
    try:
        with no_loading_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, output_loading_info=True)
    except Exception as error:  # transformers and safetensors raise many kinds of errors
        raise FlowspecError(f"{path}: the draft model cannot be loaded: {first_line(error)}") from error
    if report["missing_keys"]:  # transformers would use random weights
        raise FlowspecError(f"{path}: tensor {min(report['missing_keys'])} is missing from the draft model")
    return model


def require_padding(path: Path, target: Path, own: int, vocabulary: int) -> None:
    """FlowspecError unless the vocabularies differ only in ids that no tokenizer gives."""
    sizes = (f"{path}: the draft model's vocabulary has {own} tokens, the target's {vocabulary}; "
             "they must share one tokenizer")
    tokens = [_tokens(directory) for directory in (path, target)]
    for directory, known in zip((path, target), tokens, strict=True):
        if not known:
            raise FlowspecError(f"{sizes}, and without one in {directory} it cannot be told whether they do")
    own_tokens, target_tokens = tokens
    shared = min(own, vocabulary)
    for directory, known in zip((path, target), tokens, strict=True):
        if (last := max(known)) >= shared:
            raise FlowspecError(f"{sizes}, but token {last} ({known[last]!r}) of {directory} is unknown to "
                                "the other")
    for token in sorted(own_tokens.keys() & target_tokens.keys()):
        if own_tokens[token] != target_tokens[token]:
            raise FlowspecError(f"{sizes}, but token {token} is {own_tokens[token]!r} here and "
                                f"{target_tokens[token]!r} there")


def _tokens(directory: Path) -> dict[int, str]:
    """Id to token; empty without a tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception:  # as above
        return {}
    return {number: token for token, number in tokenizer.get_vocab().items()}


@torch.inference_mode()
def _error_on_a_tree(drafter: LMDrafter, model: PreTrainedModel, vocabulary: int) -> float:
    """The largest difference from the model's own forward pass, for a root and two children of it: some
    families misread a tree's mask without an error."""
    text = [1 % vocabulary, 2 % vocabulary, 3 % vocabulary]
    drafter.commit(text, None)
    nodes = (DraftNode(0, -1, text[-1], 2), DraftNode(1, 0, 0, 3), DraftNode(2, 0, text[0], 3))
    errors = []
    for request, paths in ((nodes[:1], [[]]), (nodes[1:], [[nodes[1].token], [nodes[2].token]])):
        got = drafter.expand(DraftRequest(0, tuple(request), 1))
        for row, path in enumerate(paths):
            ids = torch.tensor([[*text, *path]], device=model.device)
            logits = model(input_ids=ids).logits[0, -1, : vocabulary].double()
            own = torch.log_softmax(logits, -1)[int(got.tokens[row, 0])]
            errors.append(abs(float(own) - float(got.scores[row, 0])))
    drafter.reset(Sampling(), "draft", 1.0)
    return float(np.max(errors))  # unlike max(), keeps NaN



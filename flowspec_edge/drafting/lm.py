"""An ordinary small causal language model as the drafter.

Knows transformers' causal models with a cache; ignores the target's features.  Row i is token i
at position i; its output is the last hidden state, which the model's own lm_head turns to logits.

A tree row sees all of the text: a model with a sliding window is run without it, so its drafts may
become worse, and no more than that, in texts longer than the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowspec_edge.drafting.tree_cache import CacheShape
from flowspec_edge.drafting.tree_drafter import TreeDrafter
from flowspec_edge.tensors import indices
from flowspec_edge.tree.requests import DraftNode


class LMDrafter(TreeDrafter):
    """Drafts with ``model``, a transformers causal LM that shares the target's tokenizer.

    ``vocabulary`` is the target's, by default the model's own.  Where one of the two is padded
    further than the other, the model's tokens beyond the target's are never drafted, and a token
    beyond the model's, which no text holds, is read as its last one.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: int | None = None,
                 shape: CacheShape | None = None) -> None:
        """``shape`` of the model's cache, if it is known."""
        self._model = model.eval().requires_grad_(False)
        self._head = model.get_output_embeddings()
        self._last_token = model.get_input_embeddings().weight.shape[0] - 1
        self._vocabulary = vocabulary
        self._shape = shape or _cache_shape(model)
        super().__init__(self._shape, self._logits_of)

    def another(self) -> LMDrafter:
        """One for a session beside this one's: the same weights, a cache of its own."""
        return LMDrafter(self._model, self._vocabulary, self._shape)

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        self._queue.extend(tokens)
        self._text_length += len(tokens)

    def _rows(self, text: list[int], nodes: list[DraftNode], mask: Tensor) -> Tensor:
        start = self._cache.committed - len(text)
        tokens = [min(token, self._last_token) for token in (*text, *(node.token for node in nodes))]
        positions = [*range(start, start + len(text)), *(node.position for node in nodes)]
        block = indices([tokens, positions], self._cache.device)
        out: Tensor = self._model.base_model(
            input_ids=block[:1],
            position_ids=block[1:],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        return out[0]

    def _logits_of(self, outputs: Tensor) -> Tensor:
        """What the model does with its last hidden states [n, H]: logits [n, target's vocabulary]."""
        config = self._model.config
        logits: Tensor = self._head(outputs)[:, : self._vocabulary]
        logits = logits * (getattr(config, "logit_scale", None) or 1.0)  # Cohere
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits = cap * torch.tanh(logits / cap)
        return logits


@torch.inference_mode()
def _cache_shape(model: PreTrainedModel) -> CacheShape:
    """The shape of the model's cache as its own forward pass makes it; config.json has many words for it.

    ValueError for a model that keeps anything but keys and values, all of one shape.
    """
    cache = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True
                  ).past_key_values
    layers = getattr(cache, "layers", ())
    states = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    shapes = {tuple(state.shape) for state in states if isinstance(state, Tensor)}
    if len(shapes) != 1 or any(state is None for state in states):
        raise ValueError("its layers do not all keep keys and values of one shape")
    [(_, kv_heads, _, head_dim)] = shapes
    return CacheShape(len(layers), kv_heads, head_dim, model.dtype, model.device)

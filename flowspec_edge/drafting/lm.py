"""An ordinary small causal language model as the drafter.

Knows transformers' causal models with a cache; ignores the target's features.  Row i is token i
at position i; its output is the last hidden state, which the model's own lm_head turns to logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowspec_edge.drafting.tree_cache import CacheShape
from flowspec_edge.drafting.tree_drafter import TreeDrafter
from flowspec_edge.messages import Payload
from flowspec_edge.tree.requests import DraftNode


class LMDrafter(TreeDrafter):
    """Drafts with ``model``, a transformers causal LM that shares the target's tokenizer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval().requires_grad_(False)
        config = model.config
        heads = config.num_attention_heads
        shape = CacheShape(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype, device=model.device,
        )
        super().__init__(shape, model.get_output_embeddings())

    def commit(self, tokens: Sequence[int], features: Payload | None, rows: Sequence[int] = ()) -> None:
        self._queue.extend(tokens)
        self._text_length += len(tokens)

    def _rows(self, text: list[int], nodes: list[DraftNode], mask: Tensor) -> Tensor:
        start = self._cache.committed - len(text)
        tokens = [*text, *(node.token for node in nodes)]
        positions = [*range(start, start + len(text)), *(node.position for node in nodes)]
        device = mask.device
        out: Tensor = self._model.base_model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=mask[None, None],
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        return out[0]

"""Block drafters (DFlash, DSpark): initial weights, and the loss of blocks that start at drawn tokens.

As published, but for the loss: cross-entropy to the target's whole distribution, which JetSpec trains with,
too, and which the EAGLE heads here have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowspec_edge.drafting.block.formats import default_layers, load_block_head, save_block_head
from flowspec_edge.drafting.block.head import BlockConfig, BlockHead
from flowspec_edge.drafting.checkpoint import layer_config
from flowspec_edge.lab.training.differentiable import BlockPass, ContextCache
from flowspec_edge.lab.training.heads import (
    HeadRecipe,
    HeadTrainer,
    Reading,
    Student,
    TextTokens,
    frozen_embedding,
)
from flowspec_edge.lab.training.target import layer_shape
from flowspec_edge.model.families import QWEN3


@dataclass(frozen=True)
class BlockRecipe(HeadRecipe):
    """How a block drafter's head is trained.

    depth   slots of a block, each of which ranks the tokens after it
    chains  blocks a window
    layers  of the head
    states  of the target that it reads
    rank    of the Markov head, 0 without one
    """

    depth: int = 16
    chains: int = 16
    plain: float = 0.0
    layers: int = 2
    states: int = 3
    rank: int = 0


def new_block_head(target: Any, recipe: BlockRecipe, mask_token: int) -> BlockHead:
    """Make an untrained head of the target's shape.

    It has the target's embedding, which is frozen, ranks by the target's lm_head, and begins with the target's
    final norm.
    """
    config, layers = target.config, target.config.num_hidden_layers
    shape = layer_shape(config)
    layer = layer_config({
        **shape, "num_hidden_layers": recipe.layers, "tie_word_embeddings": False,
        "head_dim": shape.get("head_dim") or config.hidden_size // config.num_attention_heads}, "the target", QWEN3)
    head_config = BlockConfig(
        **vars(layer), captured=default_layers(layers, min(recipe.states, layers)), block_size=recipe.depth,
        mask_token_id=mask_token, from_root=True, causal=(False,) * recipe.layers, windows=(None,) * recipe.layers,
        markov_rank=recipe.rank, draft_vocab_size=config.vocab_size)
    head = BlockHead(head_config).requires_grad_(True)
    head.embed_tokens.weight = frozen_embedding(target)
    head.norm.weight.data.copy_(target.model.norm.weight)
    if head.markov_head is not None:
        torch.nn.init.zeros_(head.markov_head.markov_w2.weight)  # a block's own logits to begin with
    return head


def rarest_token(tokens: Tensor, vocabulary: int) -> int:
    """Return the mask token: the last of those that the text has least often."""
    counts = torch.bincount(tokens.long(), minlength=vocabulary)
    return int(vocabulary - 1 - counts.flip(0).argmin())


class Block(Student):
    name = "block"

    def __init__(self, head: BlockHead, target: Any) -> None:
        super().__init__(head, target)
        self._pass = BlockPass(head)

    def read(self, rows: Tensor) -> Reading:
        out = self.target.model(input_ids=rows, use_cache=False, output_hidden_states=True)
        states = torch.cat([out.hidden_states[layer] for layer in self.head.config.captured], dim=-1)
        return Reading(states.float(), out.last_hidden_state)

    def hidden(self, states: Tensor, rows: Tensor, anchors: Tensor) -> Tensor:
        """Return the slots' outputs [B, A, slots, H] of blocks whose roots are the tokens anchors + 1."""
        head, slots = self.head, self.head.config.block_size
        batch, count = len(rows), len(anchors)
        text = torch.arange(states.shape[1], device=rows.device)
        context = list(self._pass.keys_values(states, text[None].expand(batch, -1)))
        tokens = rows.new_full((batch, count, slots), head.config.mask_token_id)
        tokens[:, :, 0] = rows[:, anchors + 1]
        positions = (anchors[:, None] + 1 + torch.arange(slots, device=rows.device)).flatten()
        before = (text[None] <= anchors[:, None]).repeat_interleave(slots, 0)
        same_block = torch.eye(count, dtype=torch.bool, device=rows.device)
        same_block = same_block.repeat_interleave(slots, 0).repeat_interleave(slots, 1)
        mask = torch.cat((before, same_block), 1)[None, None]
        out = self._pass(head.embed_tokens(tokens.flatten(1)), positions[None].expand(batch, -1),
                         [mask] * len(head.layers), ContextCache(context))
        hidden: Tensor = out.view(batch, count, slots, -1)
        return hidden

    def logits(self, hidden: Tensor, rows: Tensor, anchors: Tensor) -> Tensor:
        """Float32 [B, A, slots, V]; the token before a slot's is the text's."""
        before = rows[:, self._positions(anchors).clamp(max=rows.shape[1] - 1)]
        return self.head.after(before, hidden, self.target_logits(hidden))

    def _positions(self, anchors: Tensor) -> Tensor:
        """Return where the tokens stand after which slots rank: [A, slots]."""
        return anchors[:, None] + 1 + torch.arange(self.head.config.block_size, device=anchors.device)

    def step_loss(self, fade: float, rows: Tensor, reading: Reading, noise: Tensor, anchors: Tensor,
                  depth: int) -> Tensor:
        states, features = reading
        with torch.no_grad():
            target_probs = self.target_logits(features).softmax(-1)[:, self._positions(anchors)]
        logits = self.logits(self.hidden(states[:, :-1] + noise, rows, anchors), rows, anchors)
        costs = (logits.logsumexp(-1) - (target_probs * logits).sum(-1)).mean((0, 1))
        weights = fade ** torch.arange(len(costs), device=costs.device)
        return (weights * costs).sum() / weights.sum()

    def drafts(self, states: Tensor, rows: Tensor, anchors: Tensor, depth: int) -> Iterator[Tensor]:
        best = self.logits(self.hidden(states[:, :-1], rows, anchors), rows, anchors).argmax(-1)
        yield from best[:, :, :depth].unbind(2)


def _block(target: Any, recipe: HeadRecipe, text: TextTokens, drafted: int, start: None) -> Block:
    assert isinstance(recipe, BlockRecipe)
    return Block(new_block_head(target, recipe, text.rarest()), target)


def _stored(directory: Path, target: Any) -> Block:
    layers = target.config.num_hidden_layers
    return Block(load_block_head(directory, target.get_input_embeddings().weight, torch.float32, layers), target)


TRAINER = HeadTrainer(BlockRecipe(steps=900), _block, _stored,
                      lambda head, directory: save_block_head(head, directory, torch.float16))
MARKOV_TRAINER = replace(TRAINER, recipe=BlockRecipe(steps=900, rank=64))

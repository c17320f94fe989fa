"""SPD's speculation module: the next token from the states that the pipeline has reached so far.

(Speculative Pipeline Decoding, sections 3.2 and 3.3 and appendix A.3.)  The *feature* of a row that has
passed l layers is FC[H^0; H^(l//2); H^l] (eq. 1), that of a row that has passed none FC(H^0): H^0 is the
embedding, H^l the hidden state after l layers, H^L the target's post-norm final state.  Only the newest rows,
the *queries*, go through the layers.  Older rows give keys and values, at every layer from the same feature,
so these are kept until the feature changes.

Keys and values depend only on the row's own feature: they are valid until a deeper state of it arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from flowspec_edge.drafting import checkpoint
from flowspec_edge.errors import FlowspecError, last_line
from flowspec_edge.lab.training.differentiable import ContextCache
from flowspec_edge.messages import Tap
from flowspec_edge.util.tensors import to_device, to_torch

KeyValues = tuple[Tensor, Tensor]  # of one layer, keys rotated: 2 x [B, kv_heads, m, head_dim]


class SpdModule(nn.Module):
    """SPD's draft module.

    ``config``: the target's, but ``num_hidden_layers`` is the module's, ``target_layers`` the target's.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.target_layers = int(config.target_layers)
        config._attn_implementation = "sdpa"
        width = config.hidden_size
        self.fuse = nn.Linear(3 * width, width, bias=False)
        self.fuse_newest = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def feature(self, embedding: Tensor, middle: Tensor, deepest: Tensor) -> Tensor:
        """Compute g (eq. 1) of rows that have passed l > 0 layers, from H^0, H^(l//2) and H^l, each [..., H]."""
        out: Tensor = self.fuse(torch.cat((embedding, middle, deepest), dim=-1))
        return out

    def newest(self, embedding: Tensor) -> Tensor:
        """g^0 of rows that have passed no layer: [..., H] to [..., H]."""
        out: Tensor = self.fuse_newest(embedding)
        return out

    def keys_values(self, features: Tensor, positions: Tensor) -> list[KeyValues]:
        """Features [B, m, H], positions [B, m] to each layer's keys and values [B, kv_heads, m, head_dim]."""
        cos, sin = self.rotary_emb(features, position_ids=positions)
        shape = (*features.shape[:2], -1, self.config.head_dim)
        offered = []
        for layer in self._layers():
            inputs = layer.input_layernorm(features)
            attention: Any = layer.self_attn
            keys = attention.k_proj(inputs).view(shape).transpose(1, 2)
            values = attention.v_proj(inputs).view(shape).transpose(1, 2)
            _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
            offered.append((keys, values))
        return offered

    def forward(self, features: Tensor, positions: Tensor, context: Sequence[KeyValues], mask: Tensor
                ) -> Tensor:
        """Return the layers over the newest rows; ``lm_head`` turns the result into logits.

        features   [B, n, H]         g^0 of the queries
        positions  [B, n]            int64
        context    of m older rows, from :meth:`keys_values`
        mask       [B, 1, n, m + n]  bool or additive: older rows, then queries (appendix A: only itself)
        returns    [B, n, H]         after the final norm
        """
        rotary = self.rotary_emb(features, position_ids=positions)
        cache = ContextCache(context)
        x = features
        for layer in self._layers():
            x = layer(x, attention_mask=mask, past_key_values=cache, position_embeddings=rotary)
        out: Tensor = self.norm(x)
        return out

    def _layers(self) -> Iterator[LlamaDecoderLayer]:
        return (cast(LlamaDecoderLayer, layer) for layer in self.layers)


_TITLE = "an SPD module"
_COUNTS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "target_layers", "vocab_size")
_STORED = (
    *_COUNTS, "attention_bias", "head_dim", "hidden_act", "intermediate_size", "max_position_embeddings",
    "mlp_bias", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
)


def load_module(directory: Path, dtype: torch.dtype) -> SpdModule:
    """Raise UsageError for a missing file, FlowspecError that names a bad setting or tensor."""
    config = module_config(directory)
    weights = checkpoint.read_weights(directory, _TITLE)
    module = checkpoint.build(SpdModule, config, weights, directory, _TITLE, dtype)
    module.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers are computed, not stored
    return module


def module_config(directory: Path) -> LlamaConfig:
    """Read a module's configuration; UsageError or FlowspecError if config.json is missing or unusable."""
    raw = checkpoint.read_config(directory, _TITLE)
    for key in _COUNTS:
        if not isinstance(raw.get(key), int):
            raise FlowspecError(f"{directory / 'config.json'} has no {key}: this is not an SPD module's")
    fields = {key: raw[key] for key in _STORED if key in raw}
    try:
        return LlamaConfig.from_dict(fields)
    except Exception as error:  # transformers and huggingface_hub raise many kinds of errors
        raise FlowspecError(f"{directory / 'config.json'}: {last_line(error)}") from error


def save_module(module: SpdModule, directory: Path, dtype: torch.dtype) -> None:
    facts = module.config.to_dict()
    config = {key: facts[key] for key in _STORED if key in facts}
    config.update(architectures=["SpdModule"], dtype=str(dtype).removeprefix("torch."))
    checkpoint.write(directory, config, module.state_dict(), dtype)


_UNKNOWN = -1
FIRST_CAPACITY = 256  # slots


@dataclass(slots=True, eq=False)
class SpdRow:
    """A text position or a tree node.

    number          -1: unknown
    slot            of its keys and values; -1: the row is gone
    computed_depth  the depth, in layers, of the state from which its keys and values were computed; -1: they were
                    not computed
    """

    token: int
    position: int
    parent: SpdRow | None
    slot: int
    number: int = _UNKNOWN
    computed_depth: int = _UNKNOWN
    is_text: bool = False
    children: dict[int, SpdRow] = field(default_factory=dict)


class RowStore:
    """One session's rows; ``layers`` is the target's, the depth of the final state."""

    def __init__(self, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self.reset()

    def reset(self) -> None:
        self.text: list[SpdRow] = []
        self._open: dict[int, SpdRow] = {}  # text rows by slot whose keys and values may still change
        self._states: dict[int, dict[int, Tensor]] = {}  # number -> layers passed -> hidden state [H]
        self._awaited: set[int] = set()  # numbers of open text rows
        self._newest = _UNKNOWN  # the newest number that is text and has its final state
        self._free: list[int] = []
        self._holds_text = np.zeros(FIRST_CAPACITY, dtype=bool)  # by slot
        self.slots = 0  # in use or free: one past the highest

    # ---- arrivals ----------------------------------------------------------------------

    def tap(self, message: Tap) -> None:
        hidden = to_device(to_torch(message.hidden), self._device).to(self._dtype)
        for number, state in zip(message.numbers.tolist(), hidden, strict=True):
            if number > self._newest or number in self._awaited:
                self._states.setdefault(number, {})[message.layer] = state

    def begin(self, token: int) -> None:
        """Begin the text with ``token``."""
        self._append(SpdRow(token, 0, None, self._take_slot()))

    def commit(self, tokens: Sequence[int], features: Tensor, numbers: Sequence[int]) -> None:
        """Append ``tokens``; row i of ``features`` is the final state of the row before token i."""
        hidden = features.to(self._device, self._dtype)
        for token, number, state in zip(tokens, numbers, hidden, strict=True):
            last = self.text[-1]
            self.number(last, number)
            self._states.setdefault(number, {})[self._layers] = state
            row = last.children.pop(token, None)
            for other in last.children.values():
                self._drop(other)
            last.children.clear()
            self._append(row or SpdRow(token, last.position + 1, None, self._take_slot()))
        self._newest = max(self._newest, int(numbers[-1]))
        self._states = {n: s for n, s in self._states.items() if n > self._newest or n in self._awaited}

    def number(self, row: SpdRow, number: int) -> None:
        """Set a row's number, unless it is -1."""
        if number in (_UNKNOWN, row.number):
            return
        if row.number != _UNKNOWN:  # resent under another number, with other states
            row.computed_depth = _UNKNOWN
            self._awaited.discard(row.number)
        row.number = number
        if row.is_text:
            self._awaited.add(number)

    def child(self, parent: SpdRow, token: int) -> SpdRow:
        row = parent.children.get(token)
        if row is None:
            row = parent.children[token] = SpdRow(token, parent.position + 1, parent, self._take_slot())
        return row

    # ---- queries -----------------------------------------------------------

    def state(self, row: SpdRow, layer: int) -> Tensor:
        """[H], after ``layer`` > 0 layers; the state must have arrived."""
        return self._states[row.number][layer]

    def depth(self, row: SpdRow) -> int:
        """Layers passed by the deepest state whose middle state has arrived too; 0: none."""
        states = self._states.get(row.number, {})
        usable = (layer for layer in states if layer and (layer // 2 == 0 or layer // 2 in states))
        return max(usable, default=0)

    def stale_rows(self, queries: Sequence[SpdRow]) -> list[tuple[SpdRow, int]]:
        """Older rows visible to ``queries`` with outdated keys and values, and their depths."""
        older: dict[int, SpdRow] = dict(self._open)
        for query in queries:
            older.update((row.slot, row) for row in self._guesses_above(query))
        newest = self.text[-1] if all(query.is_text for query in queries) else None
        depths = ((row, self.depth(row)) for row in older.values() if row is not newest)
        return [(row, depth) for row, depth in depths if depth > row.computed_depth]

    def mark_computed(self, rows: Sequence[tuple[SpdRow, int]]) -> None:
        for row, depth in rows:
            row.computed_depth = depth
            if row.is_text and depth == self._layers:
                self._open.pop(row.slot, None)
                self._awaited.discard(row.number)
                self._states.pop(row.number, None)

    def visible(self, queries: Sequence[SpdRow]) -> NDArray[np.bool_]:
        """Return what each query sees, [queries, slots]: the text and the guesses above it, without itself."""
        mask = np.tile(self._holds_text[: self.slots], (len(queries), 1))
        for i, query in enumerate(queries):
            for row in self._guesses_above(query):
                mask[i, row.slot] = True
            mask[i, query.slot] = False
        return mask

    def _guesses_above(self, row: SpdRow) -> Iterator[SpdRow]:
        ancestor = row.parent
        while ancestor is not None and not ancestor.is_text:
            yield ancestor
            ancestor = ancestor.parent

    def _append(self, row: SpdRow) -> None:
        row.is_text, row.parent = True, None
        self._holds_text[row.slot] = True
        self.text.append(row)
        self._open[row.slot] = row
        if row.number != _UNKNOWN:
            self._awaited.add(row.number)

    def _drop(self, row: SpdRow) -> None:
        for below in row.children.values():
            self._drop(below)
        self._free.append(row.slot)
        row.slot = _UNKNOWN

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self.slots == len(self._holds_text):
            self._holds_text = np.pad(self._holds_text, (0, self.slots))
        self.slots += 1
        return self.slots - 1

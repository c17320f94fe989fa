"""What the tests of stages share: a text with its draft tree, a chain of engines, an oracle.

The oracle is transformers: the plain forward pass of a row's root-to-row path, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from flowspec_edge.messages import Open, Output, Prune, Segment, Tap
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.layers import kv_cache, recurrent
from flowspec_edge.stage.layers.kinds import KeysValues
from flowspec_edge.stage.layers.recurrent import GatedDelta
from flowspec_edge.stage.shard import Shard, load_shard, stage_ranges
from flowspec_edge.tree.segment_builder import SegmentBuilder
from flowspec_edge.util.tensors import to_torch
from kits.tiny_models import tiny_model


class Book:
    """D0's view: numbers through a SegmentBuilder, and for every number the text it stands for."""

    def __init__(self, session: int = 1, epoch: int = 0, kept: tuple[int, ...] = ()) -> None:
        """``kept``: tokens of the rows that the session begins with."""
        self.builder = SegmentBuilder(session, epoch, reused_rows=len(kept))
        # number -> tokens from the start, its own last
        self.paths: dict[int, tuple[int, ...]] = {i: kept[: i + 1] for i in range(len(kept))}
        self.committed = list(self.paths)
        self.given_up: set[int] = set()  # although they might still have become text

    def add(self, token: int, parent: int | None, committed: bool = False) -> int:
        """A row below ``parent`` (None: the first of the text)."""
        path = self.paths[parent] if parent is not None else ()
        number = self.builder.add(token, len(path), -1 if parent is None else parent, committed)
        self.paths[number] = (*path, token)
        if committed:
            self.committed.append(number)
        return number

    def text(self, tokens: Iterable[int]) -> Segment:
        """A segment of tokens that are text already, after what is committed."""
        for token in tokens:
            self.add(token, self.committed[-1] if self.committed else None, committed=True)
        return self.builder.seal()

    def commit(self, number: int) -> None:
        self.builder.commit(number)
        self.committed.append(number)

    def live(self) -> set[int]:
        """Numbers given out that may still become text, from the base upwards."""
        root = self.paths[self.committed[-1]]
        return {n for n, path in self.paths.items()
                if n >= self.builder.base and path[: len(root)] == root and n not in self.given_up}

    def prune(self) -> Prune:
        """The hint that only committed and live numbers are wanted."""
        return self.builder.prune(self.live())


@dataclass
class Truth:
    """What transformers computes for the last token of a path."""

    hidden: Tensor  # [H], after the final norm
    layer_inputs: list[Tensor]  # [H] each
    held: list[Tensor]  # by layer: keys and values [2, kv_heads, head_dim], or the state [heads, k, v]


class Oracle:
    """transformers' model of a checkpoint."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.truth = lru_cache(maxsize=4096)(self._truth)
        # Between transformers' chunks and its steps there is more than 1e-4: small outputs are normed.
        kinds = getattr(self.model.config, "layer_types", None) or ()
        self.atol = 5e-4 if "linear_attention" in kinds else 1e-4

    @torch.inference_mode()
    def forward(self, tokens: Iterable[int]) -> Tensor:
        """Post-norm hidden states of a whole text: [n, H]."""
        ids = torch.tensor([list(tokens)])
        return torch.as_tensor(self.model.model(ids, use_cache=False).last_hidden_state[0])

    @torch.inference_mode()
    def _truth(self, path: tuple[int, ...]) -> Truth:
        cache = DynamicCache(config=self.model.config)
        out = self.model.model(torch.tensor([list(path)]), past_key_values=cache, use_cache=True,
                               output_hidden_states=True)
        held = [layer.recurrent_states[0][0] if isinstance(layer, LinearAttentionLayer) else
                torch.stack([layer.keys[0, :, -1], layer.values[0, :, -1]]) for layer in cache.layers]
        return Truth(out.last_hidden_state[0, -1], [h[0, -1] for h in out.hidden_states[:-1]], held)


def engines(path: Path, stages: int, dtype: str = "fp32", capacity: int = 256,
            device: str = "cpu", row_step: int | None = None) -> list[StageEngine]:
    """A chain of opened stages for session 1, epoch 0; empty ones where layers run out."""
    ranges = stage_ranges(path, stages, allow_empty=True)
    if ranges[-1][0] == ranges[-1][1]:  # as in virtual time: real stages are never empty
        whole = load_shard(path, 0, 1, dtype, device, row_step)
        shards = [whole.subset(i, stages, layers) for i, layers in enumerate(ranges)]
    else:
        shards = [load_shard(path, i, stages, dtype, device, row_step) for i in range(stages)]
    chain = [StageEngine(shard) for shard in shards]
    for engine in chain:
        engine.open(Open(session=1, epoch=0, capacity=capacity))
    return chain


def stored_state(layer: nn.Module, config: DecoderConfig) -> dict[str, Tensor]:
    """A llama-like layer's tensors by their names in checkpoints, which it has joined by rows."""
    heads, others = config.num_attention_heads, config.num_key_value_heads
    joined = {"self_attn.qkv_proj": {"q_proj": heads, "k_proj": others, "v_proj": others},
              "mlp.gate_up_proj": {"gate_proj": 1, "up_proj": 1}}
    found: dict[str, Tensor] = {}
    for name, tensor in layer.state_dict().items():
        path, _, last = name.rpartition(".")
        if path not in joined:
            found[name] = tensor
            continue
        parts, parent = joined[path], path.rpartition(".")[0]
        unit = len(tensor) // sum(parts.values())
        pieces = tensor.split([unit * share for share in parts.values()])
        found |= {f"{parent}.{part}.{last}": piece for part, piece in zip(parts, pieces, strict=True)}
    return found


def admit(engine: StageEngine, segment: Segment) -> Segment:
    """What a stage admits of a segment, which must not be stale."""
    admitted = engine.admit(segment)
    assert admitted is not None
    return admitted


def through(chain: list[StageEngine], segment: Segment) -> tuple[list[Tap], Output]:
    """Pass a segment down the chain; taps of all stages, and the output."""
    taps: list[Tap] = []
    message: Segment | Output = segment
    for engine in chain:
        assert isinstance(message, Segment)
        more, message, *_ = engine.compute([admit(engine, message)])[0]
        taps += more
    assert isinstance(message, Output)
    return taps, message


def assert_rows(output: Output, book: Book, oracle: Oracle, atol: float | None = None) -> None:
    """Every row of ``output`` is what the oracle computes for its path."""
    hidden = to_torch(output.hidden)
    assert hidden.shape[0] == len(output.numbers)
    for number, row in zip(output.numbers.tolist(), hidden, strict=True):
        truth = oracle.truth(book.paths[number]).hidden
        torch.testing.assert_close(row, truth, atol=atol or oracle.atol, rtol=1e-4)


def assert_cache(engine: StageEngine, book: Book, oracle: Oracle, atol: float | None = None) -> None:
    """Every row that layers hold has the keys and values that the oracle has at the end of its path; rows
    that they do not hold are text, and no later row sees them, or they are in the oracle's state."""
    cache = engine.cache_of(book.builder.session)
    assert cache is not None
    assert isinstance(engine.model, Shard)
    assert sorted(layer for part in cache.parts for layer in part.rows()) == [*range(*engine.model.layers)]
    for part, kind in zip(cache.parts, engine.model.layers_of_kinds, strict=True):
        if isinstance(kind, GatedDelta):
            assert part.first <= cache.committed < part.first + recurrent.BLOCK
            for layer, state in part.rows().items() if part.first else ():
                truth = oracle.truth(book.paths[cache.numbers[part.first - 1]]).held[layer]
                torch.testing.assert_close(state, truth, atol=atol or oracle.atol, rtol=1e-4)
            continue
        assert isinstance(kind, KeysValues)
        assert part.first <= max(0, cache.committed - (kind.window or cache.committed + 1) + 1)
        for slot, number in enumerate(cache.numbers[part.first:].tolist()):
            for layer, held in part.rows().items():
                truth = oracle.truth(book.paths[number]).held[layer]
                torch.testing.assert_close(held[:, slot], truth, atol=atol or oracle.atol, rtol=1e-4)


RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
WINDOWED: dict[str, Any] = {
    "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]}


def windowed(path: Path, vocab: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model of four layers, three of which see four rows and hold two more of the text at most."""
    monkeypatch.setattr(kv_cache, "SLACK", 1)
    return tiny_model("qwen3", path, layers=4, hidden=32, vocab=vocab, **WINDOWED)


def recurring(path: Path, vocab: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model of four layers, three of which are recurrent, fold two rows at once and keep snapshots
    after each four rows."""
    monkeypatch.setattr(recurrent, "BLOCK", 2)
    monkeypatch.setattr(recurrent, "GRID", 4)
    return tiny_model("qwen3_5_text", path, layers=4, hidden=32, vocab=vocab, **RECURRENT)


def random_tokens(n: int, vocab: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(1, vocab, size=n).tolist()
    return tokens

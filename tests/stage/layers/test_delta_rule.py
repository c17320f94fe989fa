"""The gated delta rule over trees against transformers' own code, step by step and in chunks, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from flowspec_edge.stage.layers import delta_rule
from flowspec_edge.stage.layers.delta_rule import FOLDED, DeltaRows, Entries

KEY_HEADS, HEADS, K, V = 2, 4, 8, 6


class _InDouble(TorchFunctionMode):
    """What asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(torch.float64 if arg is torch.float32 else arg for arg in args), **(kwargs or {}))


def inputs(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    """As a layer has them after the convolution: [n, heads, …]; decays from mild to forgetting all."""
    def normal(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=generator, dtype=torch.float64)

    return {"query": normal(KEY_HEADS, K), "key": normal(KEY_HEADS, K), "value": normal(HEADS, V),
            "g": -(normal(HEADS) * 3).exp(), "beta": normal(HEADS).sigmoid()}


def ours(raw: dict[str, Tensor]) -> DeltaRows:
    queries, keys = (theirs.l2norm(raw[name]) for name in ("query", "key"))
    return DeltaRows(queries * K**-0.5, keys, raw["value"], raw["g"], raw["beta"])


def published(rule: Any, raw: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, v] and the state behind them, by ``rule`` of transformers."""
    args = {name: value[None].repeat_interleave(HEADS // KEY_HEADS, 2) if name in ("query", "key")
            else value[None] for name, value in raw.items()}
    with _InDouble():
        out, last = rule(**args, initial_state=state[None], output_final_state=True,
                         use_qk_l2norm_in_kernel=True)
    assert out.dtype == last.dtype == torch.float64
    return out[0], last[0]


def room(entries: Entries, rows: int) -> Entries:
    return Entries(*(torch.cat((tensor, tensor.new_empty(rows, *tensor.shape[1:]))) for tensor in entries))


class _Tree:
    """Live rows with the states that the recurrence has behind each, and the cache of ours."""

    def __init__(self, seed: int, block: int) -> None:
        self.generator, self.block = torch.Generator().manual_seed(seed), block
        self.state = torch.randn(HEADS, K, V, generator=self.generator, dtype=torch.float64)
        self.states = [self.state]  # by row; row 0 is the text that is folded at first
        self.parents = [-1]
        none = ours(inputs(0, self.generator))
        self.cached = Entries(none.keys, none.values, none.betas, none.betas)
        self.held: list[int] = []  # the cached rows
        self.committed = 0  # how many of them, from the first on
        self.root = 0
        self.folded = 0  # the last folded row
        self.ahead: tuple[int, Tensor] | None = None  # a held row, and the state behind it that ours keeps

    def path(self, row: int) -> set[int]:
        rows = set()
        while row > self.folded:
            rows.add(row)
            row = self.parents[row]
        return rows

    def grow(self, parents: list[int]) -> None:
        """A segment of a row for each parent: an index among live rows, or among the segment's own."""
        live = [self.root, *self.held[self.committed:]]
        raw, first = inputs(len(parents), self.generator), len(self.states)
        new = range(first, first + len(parents))
        wanted = []
        for i, chosen in enumerate(parents):
            places = [*live, *range(first, first + i)]
            self.parents.append(places[chosen % len(places)])
            one = {name: value[i : i + 1] for name, value in raw.items()}
            out, state = published(theirs.torch_recurrent_gated_delta_rule, one,
                                   self.states[self.parents[-1]])
            wanted.append(out[0])
            self.states.append(state)
        columns = [*self.held, *new]
        visible = np.array([[j in path for j in columns] for path in map(self.path, new)])
        states, known = {FOLDED: self.state}, FOLDED
        if self.ahead is not None:
            known = columns.index(self.ahead[0])
            states[known] = self.ahead[1]
        plan = delta_rule.make_plan(visible, (KEY_HEADS, HEADS), self.block, known, torch.device("cpu"))
        self.cached = room(self.cached, len(new))
        out, ahead = delta_rule.segment(ours(raw), states, self.cached, plan)
        torch.testing.assert_close(out, torch.stack(wanted), atol=1e-12, rtol=0)
        if ahead is not None:
            self.ahead = columns[plan.ahead], ahead
            torch.testing.assert_close(ahead, self.states[self.ahead[0]], atol=1e-12, rtol=0)
        self.held += new

    def keep(self, stay: set[int]) -> None:
        slots = [i for i, row in enumerate(self.held) if row in stay]
        self.held = [self.held[i] for i in slots]
        self.cached = Entries(*(tensor[slots] for tensor in self.cached))
        if self.ahead is not None and self.ahead[0] not in self.held:
            self.ahead = None

    def prune(self, row: int) -> None:
        self.keep({other for other in self.held if row not in self.path(other)})

    def commit(self, row: int) -> None:
        path = self.path(row)
        self.keep({other for other in self.held if path <= self.path(other) or other in path})
        self.committed, self.root = len(path), row

    def fold(self) -> None:
        """A block of the committed rows."""
        done, left = (Entries(*(tensor[rows] for tensor in self.cached))
                      for rows in (slice(self.block), slice(self.block, None)))
        self.state, self.cached = delta_rule.fold(self.state, done), left
        self.folded = self.held[self.block - 1]
        self.held, self.committed = self.held[self.block :], self.committed - self.block
        torch.testing.assert_close(self.state, self.states[self.folded], atol=1e-12, rtol=0)
        if self.ahead is not None and self.ahead[0] not in self.held:
            self.ahead = None


@examples(300, quick=15)
@given(data=st.data())
def test_trees_segments_commits_and_prunes(data: st.DataObject) -> None:
    """Paths through several blocks, which are folded late or at once."""
    tree = _Tree(data.draw(st.integers(0, 1 << 30)), block=data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(1, 8))):
        tree.grow(data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=6)))
        live = tree.held[tree.committed:]
        match data.draw(st.sampled_from(["grow", "prune", "commit", "commit", "fold"])):
            case "prune" if live:
                tree.prune(data.draw(st.sampled_from(live)))
            case "commit" if live:
                tree.commit(data.draw(st.sampled_from(live)))
            case "fold" if tree.committed >= tree.block:
                tree.fold()


def in_segments(rows: DeltaRows, state: Tensor, block: int, sizes: int) -> tuple[Tensor, Tensor]:
    """Outputs of a text in segments of up to ``sizes`` rows whose blocks are folded at once, and the state behind its
    last whole block."""
    outputs = []
    cached = Entries(rows.keys[:0], rows.values[:0], rows.betas[:0], rows.betas[:0])
    for tensors in zip(*(tensor.split(sizes) for tensor in rows), strict=True):
        part = DeltaRows(*tensors)
        held, n = len(cached.keys), len(part.keys)
        plan = delta_rule.make_plan(np.tri(n, held + n, held, dtype=bool), (KEY_HEADS, HEADS), block, FOLDED,
                                    state.device)
        cached = room(cached, n)
        outputs.append(delta_rule.segment(part, {FOLDED: state}, cached, plan)[0])
        while len(cached.keys) >= block:
            state = delta_rule.fold(state, Entries(*(tensor[:block] for tensor in cached)))
            cached = Entries(*(tensor[block:] for tensor in cached))
    return torch.cat(outputs), state


@pytest.mark.parametrize(("n", "sizes"), [(1, 1), (48, 5), (64, 16), (150, 64)])
def test_a_text_in_segments(n: int, sizes: int) -> None:
    generator = torch.Generator().manual_seed(n)
    state = torch.randn(HEADS, K, V, generator=generator, dtype=torch.float64)
    raw = inputs(n, generator)
    out, last = in_segments(ours(raw), state, 16, sizes)
    whole = {name: value[: n // 16 * 16] for name, value in raw.items()}
    for rule in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
        torch.testing.assert_close(out, published(rule, raw, state)[0], atol=1e-11, rtol=0)
        if n >= 16:
            torch.testing.assert_close(last, published(rule, whole, state)[1], atol=1e-11, rtol=0)


def test_float32_is_as_near_as_theirs() -> None:
    """Of 600 rows in segments: at most twice as far from float64 as transformers' chunks."""
    generator = torch.Generator().manual_seed(0)
    raw = inputs(600, generator)
    state = torch.zeros(HEADS, K, V, dtype=torch.float64)
    truth, _ = published(theirs.torch_recurrent_gated_delta_rule, raw, state)
    single = {name: value.float() for name, value in raw.items()}
    repeated = {name: value[None].repeat_interleave(HEADS // KEY_HEADS, 2) if name in ("query", "key")
                else value[None] for name, value in single.items()}
    wanted, _ = theirs.torch_chunk_gated_delta_rule(**repeated, use_qk_l2norm_in_kernel=True)
    out, _ = in_segments(ours(single), state.float(), 16, 64)
    allowed = (wanted[0].double() - truth).abs().max()
    assert 0 < (out.double() - truth).abs().max() < 2 * allowed


def test_the_convolution_is_theirs() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(9, 5, generator=generator), torch.randn(5, 4, generator=generator)
    wanted = theirs.causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T
    padded = torch.cat((torch.zeros(3, 5), x))
    torch.testing.assert_close(delta_rule.convolved(padded.unfold(0, 4, 1).mT, weight), wanted)

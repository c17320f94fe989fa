"""Every strategy against a toy language in which any wrong row shows at once.

The toy target is a hash of the exact sequence of tokens that a row sees, so a row that sees one
token too many, too few, or in the wrong place answers something else.  The toy pipeline applies
the visibility rule of ``messages`` literally, knows no tree, drops rows by the prunes it happens
to have received, and hypothesis chooses what happens next: a stage works, a prune arrives
somewhere, D0 drafts or reads an output.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples

from flowspec_edge.d0.lm_head import LmHead
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.scheduler import Scheduler
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.messages import Cancel, Credit, Output, Payload, Prune, Segment, unpack_bits
from flowspec_edge.sampling.rule import Rank, Sampling
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES
from flowspec_edge.tree.draft_api import ABSENT, DraftOutput, DraftRequest

VOCABULARY = 12
STOP = 11
MOST_PASSES = 500  # in a row, without anything arriving


def toy_next(seen: tuple[int, ...]) -> int:
    """The target's next token; repetitive enough that a draft can guess it."""
    if len(seen) % 5:
        return (seen[-1] * 3 + len(seen)) % 10
    return int(np.random.default_rng(list(seen)).integers(0, VOCABULARY))


def plain(prompt: list[int], limit: int) -> tuple[list[int], str]:
    tokens: list[int] = []
    while len(tokens) < limit:
        token = toy_next((*prompt, *tokens))
        if token == STOP:
            return tokens, "stop"
        tokens.append(token)
    return tokens, "length"


class ToyDrafter:
    """Ranks the children of a path: the truth is among them most of the time.

    Of every node's children only the first few are there; each is the last with probability ``absent``.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, absent: float) -> None:
        self.absent = absent

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self.text: list[int] = []
        self.paths: dict[int, tuple[int, ...]] = {}
        self.positions: dict[int, int] = {}

    def commit(self, tokens: list[int], features: torch.Tensor | None, rows: list[int] = ()) -> None:
        self.text += tokens
        # Row i of the features belongs to the row that predicted token i; the toy pipeline
        # writes the length of what that row saw into it.
        if features is not None:
            lengths = features[:, 1].int().tolist()
            assert lengths == list(range(len(self.text) - len(tokens), len(self.text)))

    def expand(self, request: DraftRequest) -> DraftOutput:
        tokens, scores = [], []
        for node in request.nodes:
            assert node.token >= 0
            if node.id == request.root:
                path: tuple[int, ...] = ()
                assert node.token == self.text[-1]
                assert node.position == len(self.text) - 1
            else:
                path = (*self._path(node.parent, request.root), node.token)
                assert node.position == self.positions[node.parent] + 1
            self.paths[node.id] = path
            self.positions[node.id] = node.position
            rng = np.random.default_rng([7, len(self.text), *path])
            order = rng.permutation(VOCABULARY)[: request.children]
            truth = toy_next((*self.text, *path))
            if rng.random() < 0.8 and truth not in order[:2]:
                order[int(rng.integers(0, min(2, len(order))))] = truth
            _, first = np.unique(order, return_index=True)
            order = np.concatenate([order[np.sort(first)], np.setdiff1d(np.arange(VOCABULARY), order)])
            tokens.append(order[: request.children])
            scores.append(np.sort(np.log(rng.dirichlet(np.ones(request.children) * 0.4) + 1e-9))[::-1].copy())
            gone = np.logical_or.accumulate(rng.random(request.children) < self.absent)
            tokens[-1][gone], scores[-1][gone] = ABSENT, -np.inf
        return DraftOutput(np.array(tokens, np.int32), np.minimum(np.array(scores), 0.0))

    def _path(self, node: int, root: int) -> tuple[int, ...]:
        return () if node == root else self.paths[node][self._cut(node, root):]

    def _cut(self, node: int, root: int) -> int:
        # A path was recorded below an older root: drop what has become text since.
        return max(0, len(self.paths[root]) if root in self.paths else 0)

    def tap(self, message: object) -> None:
        raise AssertionError("no taps were asked for")


@dataclass
class ToyStage:
    """The visibility rule and nothing else: no cache, only who sees whom."""

    inbox: deque[Segment] = field(default_factory=deque)
    prunes: list[Prune] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)  # runs
    tokens: dict[int, tuple[int, int]] = field(default_factory=dict)  # number -> token, position
    committed: list[int] = field(default_factory=list)

    def dead(self, number: int) -> bool:
        return any(p.start <= number < p.stop and number not in p.keep for p in self.prunes)

    def work(self) -> tuple[Segment, list[tuple[int, int]]]:
        """The segment without its dead rows, and (number, next token) for the rows left."""
        segment = self.inbox.popleft()
        self.committed += segment.committed.tolist()
        assert self.committed == sorted(self.committed)
        alive = [i for i, n in enumerate(segment.numbers.tolist()) if not self.dead(n)]
        if segment.run in self.cancelled:
            assert not set(segment.committed.tolist()) & set(segment.numbers.tolist())
            alive = []
        assert segment.tokens is not None
        for i in alive:
            self.tokens[int(segment.numbers[i])] = (int(segment.tokens[i]), int(segment.positions[i]))
        bits = unpack_bits(segment.bits, segment.stop - segment.base)
        answers = []
        for i in alive:
            seen = [*self.committed, *(segment.base + np.flatnonzero(bits[i])).tolist()]
            rows = sorted((self.tokens[n][1], self.tokens[n][0]) for n in seen if n in self.tokens)
            positions = [p for p, _ in rows]
            if positions == list(range(int(segment.positions[i]) + 1)):
                answers.append((int(segment.numbers[i]), toy_next(tuple(t for _, t in rows))))
            else:  # an ancestor was pruned, so this row is dead even if no prune names it here
                answers.append((int(segment.numbers[i]), 0))
        keep = np.array(alive, dtype=np.int64)
        reduced = Segment(
            segment.session, segment.epoch, segment.run, segment.first, segment.stop,
            segment.numbers[keep], segment.positions[keep], segment.base, segment.bits[keep],
            segment.committed, segment.tokens[keep],
        )
        return reduced, answers


class ToyHead(LmHead):
    """The first number of a toy state is its successor."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(VOCABULARY, 2))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(states[:, 0].long(), VOCABULARY).float()


def drive(name: str, stages: int, prompt: list[int], limit: int, params: Params,
          choice: st.DataObject, absent: float = 0.0, eager: bool = False) -> DraftSession:
    """``eager``: passes take no time, so that D0 drafts until it has nothing left to draft."""
    now = [0.0]
    request = Request(prompt, name, limit, params=params, stop_ids=frozenset({STOP}))
    c = DraftSession(request, lambda builder: STRATEGIES[name](params, builder, Pipeline(stages)),
                     ToyDrafter(absent), ToyHead(), lambda: now[0])
    scheduler = Scheduler()
    scheduler.add(c)
    pipeline = [ToyStage() for _ in range(stages)]
    undelivered: list[tuple[int, Prune | Cancel]] = []
    outputs: deque[Output] = deque()
    rng = np.random.default_rng(choice.draw(st.integers(0, 2**32)))
    for _ in range(20_000):
        if c.finished:
            return c
        now[0] += 1.0
        for message in scheduler.take_messages():
            if isinstance(message, Segment):
                pipeline[0].inbox.append(message)
            else:
                undelivered += [(i, message) for i in range(stages)]
        busy = [i for i, stage in enumerate(pipeline) if stage.inbox]
        kind = rng.choice(["stage", "prune", "d0", "output"], p=[0.35, 0.15, 0.3, 0.2])
        if kind == "stage" and busy:
            at = int(rng.choice(busy))
            segment, answers = pipeline[at].work()
            if at == 0:
                scheduler.receive(Credit(segment.session, segment.epoch, segment.run))
            if at + 1 < stages:
                pipeline[at + 1].inbox.append(segment)
            else:
                rows = [(a, p) for (_, a), p in zip(answers, segment.positions.tolist(), strict=True)]
                array = np.array([[a, p + 1] for a, p in rows], np.float32).reshape(-1, 2)
                outputs.append(Output(segment.session, segment.epoch, segment.run,
                                      np.array([n for n, _ in answers], np.int32), Payload("float32", array)))
        elif kind == "prune" and undelivered:
            at, hint = undelivered.pop(int(rng.integers(0, len(undelivered))))
            if isinstance(hint, Prune):
                pipeline[at].prunes += [hint] * int(rng.integers(0, 3))
            else:
                pipeline[at].cancelled.update(hint.runs)
        elif kind == "output" and outputs:
            scheduler.receive(outputs.popleft())
        elif kind == "d0":
            for _ in range(MOST_PASSES if eager else 1):
                if (job := scheduler.next_job()) is None:
                    break
                assert not job.complete()
            else:
                assert not eager, "D0 never falls idle"
    raise AssertionError("the text was never completed")


@pytest.mark.parametrize("name", STRATEGIES)
@given(stages=st.integers(1, 8), prompt=st.lists(st.integers(0, 9), min_size=1, max_size=9),
       limit=st.integers(1, 24), segment=st.sampled_from([1, 2, 5, 16]), depth=st.integers(1, 4),
       width=st.integers(1, 4), size=st.integers(4, 30), absent=st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0]),
       eager=st.sampled_from([False, False, False, True]), choice=st.data())
@examples(40, quick=8)
def test_the_tokens_of_plain_decoding(name: str, stages: int, prompt: list[int], limit: int, segment: int,
                                      depth: int, width: int, size: int, absent: float, eager: bool,
                                      choice: st.DataObject) -> None:
    params = Params(tree_size=size, width=width, segment=segment, depth=depth, expand_depth=depth,
                    expand_size=size, extend_size=size, prefill_chunk=3, pipedec_width=size,
                    pipedec_children=width, pipeinfer_tokens=depth, pipeinfer_split=0.3, pearl_gamma=depth,
                    pipeinfer_canonical=choice.draw(st.sampled_from(["all", "needed"])),
                    speculative_gamma=depth, stpp_branching=f"{width},1,2", spd_width=width)
    expected, reason = plain(prompt, limit)
    c = drive(name, stages, prompt, limit, params, choice, absent, eager)
    assert c.new_tokens() == expected
    assert c.finish_reason == reason
    result = c.result(1.0, 0)
    generated = max(0, len(expected) - 1)
    assert result.stats.accepted <= generated
    if name == "autoregressive" and generated:
        assert result.stats.rounds in (generated, generated + 1)

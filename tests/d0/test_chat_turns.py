"""The next turn of a chat: rows and drafter of the last one are taken over, and the text stays the same.

Without processes or time: a draft session, real stages and a pool of rows, one message after another.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from kits.cases import DISTINCT
from kits.family_checkpoints import VOCAB, family_dir
from kits.requests import prompt, text
from kits.stages import random_tokens, through
from kits.tiny_model_dir import with_eagle3

from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.prefix_cache import PrefixCache
from flowspec_edge.d0.request import Request, Result
from flowspec_edge.d0.scheduler import Scheduler
from flowspec_edge.messages import Cancel, Close, Credit, Prune, Segment
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.layers import kv_cache
from flowspec_edge.stage.shard import Shard, load_shard
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES

SMALL = Params(segment=4, width=4, tree_size=20, depth=3, prefill_chunk=16, pipeinfer_split=0.1)
SAMPLINGS = (Sampling(), Sampling(1.0, seed=11))
KINDS = {"own": SMALL, "eagle3": replace(SMALL, draft="eagle3"), "lm": replace(SMALL, draft="lm"),
         "ngram": replace(SMALL, draft="ngram", ngram_min=1),
         "merged": replace(SMALL, draft="eagle3", ngram=True, ngram_min=1)}
PIPELINED = [name for name, chosen in STRATEGIES.items() if chosen.parallelism == "pipeline"]
CASES = [*((name, "own") for name in PIPELINED if name != "spd"),  # whose drafter cannot be handed on
         *(("flowspec", kind) for kind in KINDS if kind != "own"), ("pipeinfer", "merged")]
STAGES = 2
PASSES = 3  # of drafting, while a segment is in the pipeline


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with an EAGLE-3 head, too."""
    return with_eagle3(tiny_model, tmp_path_factory.mktemp("chat"), drafted=64)


@cache
def _draft_models(model: Path) -> DraftModels:
    return DraftModels(model)


@cache
def _shards(model: Path) -> list[Shard]:
    return [load_shard(model / "target", i, STAGES, "fp32") for i in range(STAGES)]


class Direct:
    """Stages and D0 in one; a message is there when it is sent."""

    def __init__(self, model: Path, limit: int | None = 10_000) -> None:
        self.pool = PrefixCache(limit)
        self.device0 = _draft_models(model)
        self.pool.suit(self.device0.kinds, 2)
        self.engines = [StageEngine(shard) for shard in _shards(model)]
        self.session = 0

    def answer(self, request: Request, leave_after: int | None = None) -> Result:
        """``leave_after``: the client leaves after so many segments."""
        self.session += 1
        reuse = self.pool.find(request.prompt, lambda p: self.device0.can_share_drafter(p.request, request))
        d0 = self.device0.draft_session(request, STAGES, lambda: 0.0, self.session, lambda kind: 1.0,
                                        prefix=reuse)
        scheduler = Scheduler()
        opening = scheduler.add(d0)
        held = self.pool.begin(self.session, opening.capacity, opening.parent_session)
        for engine in self.engines:
            engine.open(replace(opening, retained=held))
        sent, queue = 0, deque[Segment]()
        while not d0.finished:
            self.send(scheduler, queue)
            for _ in range(PASSES):
                if job := scheduler.next_job():
                    assert not job.complete()
            if leave_after == sent:
                d0.cancel()
            elif queue:
                sent += 1
                self.pass_on(scheduler, queue.popleft())
        kept = self.pool.retain(d0)
        for engine in self.engines:
            engine.close(Close(self.session, kept))
            assert set(engine.retained) == set(self.pool.retained)
            assert sum(engine.retained.values()) == self.pool.rows
        return d0.result(1.0, 0)

    def send(self, scheduler: Scheduler, queue: deque[Segment]) -> None:
        for message in scheduler.take_messages():
            if isinstance(message, Segment):
                queue.append(message)
            for engine in self.engines:
                if isinstance(message, Prune):
                    engine.prune(message)
                elif isinstance(message, Cancel):
                    engine.cancel(message)

    def pass_on(self, scheduler: Scheduler, segment: Segment) -> None:
        taps, output = through(self.engines, segment)
        for message in (*taps, Credit(segment.session, segment.epoch, segment.run), output):
            scheduler.receive(message)


def asked(model: Path, tokens: list[int], name: str, kind: str, sampling: Sampling, count: int = 9
          ) -> tuple[Request, list[int]]:
    """A request, and the answer that it must get."""
    return Request(tokens, name, count, sampling, KINDS[kind]), text(model, tuple(tokens), count, sampling)


@pytest.mark.parametrize(("name", "kind", "place"), [
    pytest.param(name, kind, place, marks=() if (i + place) % 2 and (name in DISTINCT or not place)
                 else pytest.mark.soak)
    for i, (name, kind) in enumerate(CASES) for place in range(len(SAMPLINGS))])
def test_every_turn_is_the_text_of_plain_decoding(model: Path, name: str, kind: str, place: int) -> None:
    """Three turns, then the second once more with another question: all but the new is there."""
    sampling = SAMPLINGS[place]
    cluster = Direct(model)
    history, reused = prompt(1, 40), 0
    for turn in range(3):
        request, expected = asked(model, history, name, kind, sampling)
        result = cluster.answer(request)
        assert result.tokens == expected, turn
        # Of the last turn's text, whose newest token no stage has seen, all but one row; the newest
        # tokens may have been decided with others that came too late for the answer.
        assert reused - 1 <= result.stats.reused <= reused
        if turn == 1:
            branch = history[:50]
        reused = len(history) + len(expected) - 1
        history = [*history, *expected, *prompt(turn + 2, 5)]
    fork = [*branch[:-1], (branch[-1] + 1) % 97, *prompt(9, 4)]
    request, expected = asked(model, fork, name, kind, sampling)
    result = cluster.answer(request)
    assert result.tokens == expected
    assert result.stats.reused == len(branch) - 2


def test_a_drafter_handed_on_drafts_as_a_fresh_one(model: Path) -> None:
    """What is drafted and accepted is what a session that read the whole text would draft."""
    for kind in ("eagle3", "merged"):
        request, _ = asked(model, prompt(1, 40), "flowspec", kind, SAMPLINGS[0])
        first = Direct(model)
        history = [*request.prompt, *first.answer(request).tokens, *prompt(3, 5)]
        again, expected = asked(model, history, "flowspec", kind, SAMPLINGS[0], 20)
        warm, cold = first.answer(again), Direct(model).answer(again)
        assert warm.stats.reused > 40 > cold.stats.reused == 0
        assert warm.tokens == cold.tokens == expected
        assert (warm.stats.drafted, warm.stats.accepted) == (cold.stats.drafted, cold.stats.accepted), kind
        assert cold.stats.drafted > 0


def test_one_that_goes_away_leaves_what_was_read(model: Path) -> None:
    """After two of three chunks of the prompt, and before the first of those that it takes over."""
    cluster = Direct(model)
    request, expected = asked(model, prompt(1, 48), "flowspec", "own", SAMPLINGS[0])
    assert cluster.answer(request, leave_after=2).finish_reason == "cancelled"
    assert cluster.answer(request, leave_after=0).stats.reused == 31
    result = cluster.answer(request)
    assert (result.tokens, result.stats.reused) == (expected, 30)
    assert cluster.answer(request, leave_after=5).stats.reused == 47  # never the whole prompt
    assert cluster.answer(request).tokens == expected


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3.5"])
def test_a_chat_that_leaves_its_reasoning_out(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    """Layers with a window, or a state, go on a little before the last prompt's end."""
    monkeypatch.setattr(kv_cache, "SLACK", 2)
    path = family_dir(family, tmp_path / family)
    cluster, history, reused = Direct(path), random_tokens(40, VOCAB, 1), []
    for turn in range(3):
        request, expected = asked(path, history, "flowspec", "own", SAMPLINGS[0], 24)
        result = cluster.answer(request)
        assert result.tokens == expected, turn
        reused.append(result.stats.reused)
        history = [*history, *random_tokens(20, VOCAB, 2 + turn)]
    assert reused == [0, 40 - 16, 60 - 16]


def test_what_is_not_taken_over(model: Path) -> None:
    """Less than half of a text, a few rows, and the text of one that drafts in another way; without a
    budget nothing is."""
    long, _ = asked(model, prompt(1, 60), "flowspec", "own", SAMPLINGS[0])
    other, _ = asked(model, [*long.prompt[:30], *prompt(2, 30)], "flowspec", "own", SAMPLINGS[0])
    drafts, _ = asked(model, list(long.prompt), "flowspec", "lm", SAMPLINGS[0])
    none, _ = asked(model, list(long.prompt), "autoregressive", "own", SAMPLINGS[0])
    short, _ = asked(model, prompt(3, 17), "flowspec", "own", SAMPLINGS[0], 1)
    spd, _ = asked(model, list(long.prompt), "spd", "own", SAMPLINGS[0])
    cluster = Direct(model)
    requests = (long, other, drafts, none, spd, spd, short, long, short)
    assert [cluster.answer(r).stats.reused for r in requests] == [0, 0, 0, 0, 0, 0, 0, 59, 16]
    cluster = Direct(model, None)
    assert [cluster.answer(none).stats.reused for _ in range(2)] == [0, 0]
    few, _ = asked(model, prompt(3, 16), "flowspec", "own", SAMPLINGS[0], 1)
    cluster = Direct(model)
    assert [cluster.answer(few).stats.reused for _ in range(2)] == [0, 0]


def test_stop_tokens_behind_the_end_do_no_harm(model: Path) -> None:
    """What was accepted behind the end of an answer is text to the stages, and may be of the next prompt."""
    request, expected = asked(model, prompt(1, 40), "flowspec", "own", SAMPLINGS[0], 12)
    stop = next(token for i, token in enumerate(expected) if i > 3 and token not in expected[:i])
    place = expected.index(stop)
    cluster = Direct(model)
    ended = cluster.answer(replace(request, stop_ids=frozenset({stop})))
    assert (ended.tokens, ended.finish_reason) == (expected[:place], "stop")
    for answer in (expected[: place + 2], [*expected[:place], 7]):
        following = [*request.prompt, *answer, 5]
        again, wanted = asked(model, following, "flowspec", "own", SAMPLINGS[0])
        result = cluster.answer(again)
        assert result.tokens == wanted
        assert result.stats.reused >= 40 + place - 2

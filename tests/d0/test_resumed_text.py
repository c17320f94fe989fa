"""A draft session that goes on where one was that lost its stages: the text, and the figures, are one.

One stage in this process, driven by hand; what it holds is lost after any number of messages, so that
the moment may be in the prompt, between tokens, or with outputs that have not been looked at.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.stages import admit

from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.scheduler import Scheduler
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.messages import Cancel, Credit, Output, Prune, Segment
from flowspec_edge.sampling.settings import Penalties, Sampling
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES

PIPELINED = sorted(name for name, cls in STRATEGIES.items() if cls.parallelism == "pipeline")
CASES = ((Sampling(), None), (Sampling(1.0, top_p=0.9, seed=12), None), (Sampling(), Penalties(0.7, 0.5)))
SMALL = Params(segment=4, width=4, tree_size=20, depth=3, prefill_chunk=16)
SESSIONS = count(1)  # never the same again
PROMPT = [(7 * i + 3) % 97 for i in range(40)]  # three chunks


@cache
def models(model: Path) -> tuple[DraftModels, StageEngine, tuple[list[int], ...]]:
    """D0's models, the one stage, and what plain decoding makes of the prompt in each case."""
    plain = PlainDecoder(model)
    texts = tuple(plain.generate(PROMPT, 12, sampling, penalties=penalties)[0]
                  for sampling, penalties in CASES)
    return DraftModels(model), StageEngine(load_shard(model / "target", 0, 1, "fp32")), texts


def run(draft_session: DraftSession, engine: StageEngine, steps: int) -> list[int]:
    """Until it is finished, or so many segments were computed; the new tokens."""
    scheduler = Scheduler()
    engine.open(scheduler.add(draft_session))
    streamed: list[int] = []
    while not draft_session.finished:
        messages = scheduler.take_messages()
        for message in messages:
            match message:
                case Prune():
                    engine.prune(message)
                case Cancel():
                    engine.cancel(message)
                case Segment():
                    if not steps:
                        return streamed
                    steps -= 1
                    taps, output, *_ = engine.compute([admit(engine, message)])[0]
                    assert isinstance(output, Output)
                    for arrival in (*taps, output, Credit(message.session, message.epoch, message.run)):
                        scheduler.receive(arrival)
        job = scheduler.next_job()
        assert messages or job
        if job:
            assert not job.complete()
            streamed += draft_session.new_tokens()
    return streamed


@examples(20, quick=8)
@given(name=st.sampled_from(PIPELINED), at=st.integers(0, len(CASES) - 1),
       moments=st.lists(st.integers(0, 12), max_size=3))
def test_a_text_in_parts_is_the_text(tiny_model: Path, name: str, at: int, moments: list[int]) -> None:
    device0, engine, texts = models(tiny_model)
    sampling, penalties = CASES[at]
    request = Request(PROMPT, name, 12, sampling, SMALL, penalties=penalties)
    ticks = count()
    streamed: list[int] = []
    drafted, before = 0, None
    for steps in [*moments, 1000]:
        draft_session = device0.draft_session(request, 1, lambda: next(ticks), next(SESSIONS),
                                                  lambda kind: 1.0, predecessor=before)
        streamed += run(draft_session, engine, steps)
        drafted += draft_session.strategy.counters.drafted
        if draft_session.finished:
            break
        before = draft_session
    result = draft_session.result(1.0, 0)
    assert result.tokens == streamed == texts[at]
    assert result.finish_reason == "length"
    stats = result.stats
    assert stats.drafted == drafted
    assert stats.accepted <= stats.verified
    assert 0 < stats.rounds <= len(result.tokens)
    assert stats.ttft_s > 0
    assert stats.decode_s == stats.turns > 0
    assert stats.itl_p50_s >= 0

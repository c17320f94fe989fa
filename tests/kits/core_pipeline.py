"""D0's and the stages' cores over lists, for ``test_cores``: a pipeline that delivers in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import inf
from pathlib import Path

from flowspec_edge.d0.core import DraftCore
from flowspec_edge.d0.events import Back, Compute, Finish, Lost, Reported, Send, Wait, Worked
from flowspec_edge.d0.events import Outgoing as ToStages
from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.request import Request, RequestHandle
from flowspec_edge.d0.request_queue import RequestQueue
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.d0.slot_curve import SlotCurve
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.messages import Batch, Close, Computed, Credit, Output, Segment, Tap, parts_of
from flowspec_edge.model.draft_kinds import PlannedDraftName
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.core import Arrived, Emit, Idle, Pass, Passed, StageCore
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import Shard, load_shard
from flowspec_edge.strategies.params import Params

STAGES, TOKENS = 2, 12
STRATEGIES = ("flowspec", "flowspec_plus", "pipedec", "pipeinfer", "chunk_pp", "pearl", "autoregressive")
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7] * 40, [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3])


class Draw:
    """Choices of an example; 0 after the last one."""

    def __init__(self, choices: list[int]) -> None:
        self._choices = iter(choices)

    def below(self, count: int) -> int:
        return next(self._choices, 0) % count


class Pipeline:
    """Both kinds of cores, and lists for links: each delivers in order, in no order among them."""

    def __init__(self, model: Path, draw: Draw, cache_rows: int | None = 4000, places: float = inf,
                 queue: RequestQueue | None = None) -> None:
        self.draw = draw
        self.now = 0.0
        self.models = draft_models(model)
        self.curve = SlotCurve()
        self.core = DraftCore(self._draft_session, self._clock, Observer(), lambda: -1, STAGES, self.curve,
                              cache_rows, queue or RequestQueue(places, lambda: self.now))
        self._shards = shards(model)
        self.work: Compute | None = None  # what D0 was told to do
        self.replace_stages()

    def replace_stages(self) -> None:
        """All stages, and what was under way, are lost; new ones know nothing."""
        self.stages = [StageCore(StageEngine(shard), i + 1)
                       for i, shard in enumerate(self._shards)]
        self._data: list[deque[Segment | Output | Batch]] = [deque() for _ in range(STAGES + 1)]
        self._control: list[deque[ToStages]] = [deque() for _ in range(STAGES)]
        self._back: list[deque[Credit | Tap | Computed]] = [deque() for _ in range(STAGES)]
        self._closed: dict[int, int] = {}  # session -> stages that have closed it

    def _clock(self) -> float:
        self.now += 1e-6
        return self.now

    def _draft_session(self, handle: RequestHandle, session: int, before: DraftSession | None
                       ) -> DraftSession:
        text = [*handle.request.prompt, *(before.tokens if before else ())]
        prefix = self.core.pool.find(
            text, lambda kept: self.models.can_share_drafter(kept.request, handle.request))
        return self.models.draft_session(handle.request, STAGES, lambda: self.now, session, lambda kind: 4.0,
                                       predecessor=before, prefix=prefix)

    # ---- one step of each part ---------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Steps that the example chooses, then each part in turn."""
        for turn in range(20_000):
            if until():
                return
            ready = [*self._ready()]
            assert ready, "nothing can go on, but a request is open"
            ready[(self.draw.below(len(ready)) + turn * (turn > 400)) % len(ready)]()
        raise AssertionError("the requests do not end")

    def _ready(self) -> Iterator[Callable[[], None]]:
        yield self._draft_device
        for i in range(STAGES):
            if self._control[i]:
                yield lambda i=i: self._deliver_control(i)
            if self._data[i]:
                yield lambda i=i: self._deliver_data(i)
            if self._back[i]:
                yield lambda i=i: self.core.feed(self._back[i].popleft())
            yield lambda i=i: self._compute(i)
        if self._data[STAGES]:
            yield self._deliver_output

    def start(self, handle: RequestHandle) -> None:
        self.core.queue.put(handle)

    def _draft_device(self) -> None:
        if self.work is not None:
            work, self.work = self.work, None
            start = self.now
            work.work()
            self.core.feed(Worked(start, self._clock()))
        self.carry_out()
        for session in self.core.closing:
            if self._closed.get(session) == STAGES:
                self.core.feed(Reported(session, [{} for _ in range(STAGES)]))

    def carry_out(self) -> None:
        """What the core says; its work is done in another step."""
        while not isinstance(action := self.core.next(), Wait):
            match action:
                case Send(messages):
                    self._send(messages)
                case Compute():
                    assert self.work is None
                    self.work = action
                case Finish(session):
                    self.core.feed(Reported(session, [{}] * STAGES))

    def _send(self, messages: Sequence[ToStages]) -> None:
        for message in messages:
            if isinstance(message, Segment | Batch):
                self._data[0].append(message)
            else:
                for link in self._control:
                    link.append(message)

    def deliver_all(self) -> None:
        """What is under way to the stages arrives, such as the Close of a request that ended at once."""
        for i in range(STAGES):
            while self._control[i]:
                self._deliver_control(i)

    def _deliver_control(self, i: int) -> None:
        message = self._control[i].popleft()
        assert not isinstance(message, Segment | Batch)
        self.stages[i].feed(message, self.now)
        if isinstance(message, Close):
            self._closed[message.session] = self._closed.get(message.session, 0) + 1

    def _deliver_data(self, i: int) -> None:
        message = self._data[i].popleft()
        segments = [part for part in parts_of(message) if isinstance(part, Segment)]
        self.stages[i].feed(Arrived(segments, 1), self.now)

    def _deliver_output(self) -> None:
        for part in parts_of(self._data[STAGES].popleft()):
            assert isinstance(part, Output)
            self.core.feed(part)

    def _compute(self, i: int) -> None:
        core = self.stages[i]

        def poll() -> None:
            if self._control[i] and self.draw.below(3) == 1:
                self._deliver_control(i)

        match core.next(self.now):
            case Pass() as begun:
                begun.compute(poll)
                core.feed(Passed(self.now, self._clock()), self.now)
            case Emit(messages):
                for message in messages:
                    if isinstance(message, Credit | Tap | Computed):
                        self._back[i].append(message)
                    else:
                        self._data[i + 1].append(message)
            case Idle():
                pass
            case action:
                raise AssertionError(action)

    def lose(self) -> None:
        """A stage is lost; requests whose answers are complete get them, and the others go on with new
        stages."""
        self.core.feed(Lost("a stage is lost"))
        self.work = None
        self.carry_out()
        self.replace_stages()
        self.core.feed(Back())
        self.carry_out()


@cache
def draft_models(model: Path) -> DraftModels:
    return DraftModels(model)


@cache
def shards(model: Path) -> list[Shard]:
    return [load_shard(model / "target", i, STAGES, "fp32") for i in range(STAGES)]


@cache
def plain(model: Path, prompt: tuple[int, ...], temperature: float) -> list[int]:
    return PlainDecoder(model).generate(list(prompt), TOKENS, Sampling(temperature, seed=5))[0]


def request(place: int, strategy: str, temperature: float, draft: PlannedDraftName = "own") -> Request:
    return Request(PROMPTS[place], strategy, TOKENS, Sampling(temperature, seed=5),
                   params=Params(prefill_chunk=16, draft=draft))

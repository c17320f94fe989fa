"""A cluster in virtual time: one process, discrete events, bit-for-bit reproducible figures.

Compute and links are charged with the hidden width and layers of the profile's model, not of the loaded one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flowspec_edge.d0.core import DraftCore
from flowspec_edge.d0.draft_sessions import DraftSessions
from flowspec_edge.d0.observer import Observer
from flowspec_edge.d0.prompt_chunks import PromptCurve
from flowspec_edge.d0.request import OnTokens, Request, RequestHandle, Result, SchedulingPolicy
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.d0.slot_curve import WARM_UP_ROWS, SlotCurve
from flowspec_edge.device_profile import Profile
from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.calibrated import CalibratedDrafter
from flowspec_edge.drivers.virtual.clock import EventClock, Span
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.drivers.virtual.recording import Recording
from flowspec_edge.drivers.virtual.run import VirtualRun
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import common_parallelism, strategy_class

if TYPE_CHECKING:
    from typing_extensions import Self


class VirtualModel(Protocol):
    """What virtual time computes with: ``loaded.LoadedModel`` or ``recorded.RecordedModel``."""

    @property
    def sessions(self) -> DraftSessions: ...

    def engines(self, stages: int) -> list[StageEngine]:
        """Return ``stages`` stages; some may be without layers."""

    def whole(self, stages: int) -> StageEngine:
        """Return all layers as one stage, for a group of devices that share every layer."""

    def computing(self) -> AbstractContextManager[None]:
        """Enter around all that computes."""

    def note(self) -> str:
        """Return what a user should know of the figures; "" for nothing."""


class VirtualCluster:
    """If a single profile is given, all devices have it and share the layers of its model evenly."""

    clock = "virtual"
    spans: list[Span]  # of the newest run

    def __init__(self, model: Path | Recording, stages: int, profile: Profile | Devices, dtype: str = "fp32",
                 observer: Observer | None = None, *, device: str = "cpu", learn: bool = False,
                 scheduling_policy: SchedulingPolicy = "fair", right_children: float = 1.0) -> None:
        """Load a model, or open a recording, for devices in virtual time.

        model   a model's directory, or what it said, with which nothing is computed
        dtype, device  of D0's weights and the stages'
        learn   D0 learns segment times from the stages' reports (``slot_curve``), instead of from the profile
        scheduling_policy  how concurrent requests share the stages (``Scheduler``)
        right_children  the share of right children that drafts have (``CalibratedDrafter``): 1, the head's
        """
        self.devices = profile if isinstance(profile, Devices) else Devices.from_profile(profile, stages)
        self._model = _recorded(model) if isinstance(model, Recording) else _loaded(model, dtype, device)
        self._stages = stages
        self._observer = observer or Observer()
        self._policy = scheduling_policy
        self._curve = self._warm_curve() if learn else None
        self._engines: dict[int, list[StageEngine]] = {}  # by the number of pieces
        self._whole: list[StageEngine] = []  # one, once a group has been asked for
        self._session = 0
        self._right_children = right_children
        self._texts: dict[tuple[object, ...], list[int]] = {}  # plain decoding's, by request
        self.spans = []
        with self._model.computing():
            self._engines_of(stages)

    def under(self, profile: Profile | Devices, stages: int, right_children: float = 1.0) -> VirtualCluster:
        """Return a cluster of other devices, or another acceptance, that takes over these weights.

        Do not use this one again.
        """
        other = copy(self)
        other.devices = profile if isinstance(profile, Devices) else Devices.from_profile(profile, stages)
        other._stages, other._right_children = stages, right_children
        other._curve = other._warm_curve() if self._curve else None
        other._engines = {n: engines for n, engines in self._engines.items() if n == stages}
        other._engines_of(stages)
        return other

    def _warm_curve(self) -> SlotCurve:
        curve = SlotCurve(self.devices.sparse)
        curve.link_row_s = self.devices.link_row_seconds()
        for stage, rows in product(range(1, self._stages + 1), WARM_UP_ROWS):
            curve.observe(stage, rows, self.devices.stage_seconds(stage, rows))
        return curve

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        return self.generate_many([request], on_tokens=[on_tokens])[0]

    def generate_many(self, requests: Sequence[Request], arrivals: Sequence[float] | None = None, *,
                      leaves: Sequence[float | None] | None = None,
                      follows: Sequence[int | None] | None = None,
                      on_tokens: Sequence[OnTokens | None] | None = None,
                      stop: Callable[[], bool] | None = None) -> list[Result]:
        """Run requests concurrently; results in their order.

        arrivals   virtual seconds at which each arrives; all at 0 by default
        leaves     when each is cancelled, or None; its result is the text until then
        follows    index of the request whose end starts each, instead of a time
        stop       called after tokens of a request: whether to cancel it

        UsageError if one does not fit, or if they need different parallelism.
        """
        parallelism = common_parallelism(request.strategy for request in requests)
        if self._right_children != 1:
            for request in requests:
                self._text(request)
        clock = EventClock()
        self.spans = []
        core = DraftCore(partial(self._draft_session, parallelism, clock), lambda: clock.now, self._observer,
                         lambda: self._session, self._stages, self._curve, policy=self._policy)
        if parallelism != "pipeline" and not self._whole:
            self._whole = [self._model.whole(self._stages)]
        run = VirtualRun(core, self._engines_of(self._stages) if parallelism == "pipeline" else self._whole,
                         self.devices, parallelism, clock, self.spans)
        handles: list[RequestHandle] = []
        errors: list[BaseException] = []

        def start(index: int) -> None:
            handle = handles[index]
            if leaves and (leave := leaves[index]) is not None:
                clock.at(max(leave, clock.now), lambda: run.cancel(handle))
            run.start(handle)

        def tokens(index: int, new: list[int]) -> None:
            if on_tokens and (listener := on_tokens[index]):
                listener(new)
            if stop is not None and stop():
                clock.at(clock.now, lambda: run.cancel(handles[index]))

        def done(index: int, _: object) -> None:
            try:
                for following in [other for other, first in enumerate(follows or ()) if first == index]:
                    start(following)
            except BaseException as error:  # a future would only log it
                errors.append(error)

        for index, request in enumerate(requests):
            handles.append(RequestHandle(request, partial(tokens, index)))
            handles[index].add_done_callback(partial(done, index))
        order = sorted((index for index in range(len(requests)) if not follows or follows[index] is None),
                       key=lambda index: arrivals[index] if arrivals else 0.0)
        run.expect([(arrivals[index] if arrivals else 0.0, partial(start, index)) for index in order])
        with self._model.computing():
            run.run()
            failed = (handle.exception() for handle in handles if handle.done())
            for error in [*filter(None, failed), *errors]:
                raise error
        return [handle.result() for handle in handles]

    def _draft_session(self, parallelism: Parallelism, clock: EventClock, handle: RequestHandle, session: int,
                       before: DraftSession | None) -> DraftSession:
        request = handle.request
        self._session = session

        def calibrated(drafter: Drafter) -> Drafter:
            return CalibratedDrafter(drafter, self._text(request), self._right_children,
                                     request.sampling.seed)

        latency = self.devices.latency_seconds(request.params.segment, parallelism)
        return self._model.sessions.draft_session(
            request, self._stages, lambda: clock.now, session,
            lambda kind: latency / max(self.devices.d0.draft_seconds(kind), 1e-9),
            self._curve.seconds if self._curve else self.devices.occupied_seconds,
            around=calibrated if self._right_children != 1 else None, sparse=self.devices.sparse,
            prompts=PromptCurve(self.devices.prompt_seconds, self.devices.most_prompt_rows)
            if parallelism == "pipeline" else None)

    def _text(self, request: Request) -> list[int]:
        """Return the prompt and plain decoding's answer, which is computed once."""
        if strategy_class(request.strategy).drafter is None:
            return []  # it drafts nothing
        key = (tuple(request.prompt), request.max_new_tokens, request.sampling, request.stop_ids)
        if key not in self._texts:
            plain = self.generate(replace(request, strategy="autoregressive", params=Params()))
            self._texts[key] = [*request.prompt, *plain.tokens]
        return self._texts[key]

    def _engines_of(self, stages: int) -> list[StageEngine]:
        if stages not in self._engines:
            self._engines[stages] = self._model.engines(stages)
        return self._engines[stages]

    def note(self) -> str:
        """Return what a user should know of the figures so far; "" for nothing."""
        return self._model.note()

    def close(self) -> None:
        """Do nothing: a virtual cluster holds no processes or sockets."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _loaded(model: Path, dtype: str, device: str) -> VirtualModel:
    from flowspec_edge.drivers.virtual.loaded import LoadedModel  # imports torch

    return LoadedModel(OpenModel(model), dtype, device)


def _recorded(recording: Recording) -> VirtualModel:
    from flowspec_edge.drivers.virtual.recorded import RecordedModel

    return RecordedModel(recording)

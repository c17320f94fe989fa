"""What a measurement measures: a model with weights, or a recording of what one said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flowspec_edge.cli.bench.options import BenchOptions
from flowspec_edge.cli.common.options import (
    Clock,
    Dtype,
    DtypeChoice,
    device_of,
    dtype_of,
    plain_device_of,
    stages_of,
    weights_of,
)
from flowspec_edge.cli.common.workload import (
    chat_questions,
    demo_prompts,
    near_tie_judge,
    plain_decoding,
    requests_for,
    require_runnable,
)
from flowspec_edge.device_profile import Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.tasks import Prompt, Task, load_tasks
from flowspec_edge.model.opened import DEMO, OpenModel, resolve_model
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.strategies.params import Params

if TYPE_CHECKING:
    from flowspec_edge.drivers.virtual.recording import Recording
    from flowspec_edge.lab.bench.runner import NearTieJudge, PlainDecoding, Workload


class BenchSubject(Protocol):
    """What is measured: a model, or a recording of one.

    name       in results
    recording  what was said, if nothing is computed
    path       of the model or the recording
    """

    @property
    def name(self) -> str: ...
    @property
    def recording(self) -> Recording | None: ...
    @property
    def path(self) -> Path: ...

    def stages(self, requested: int, profile: Profile | None) -> int:
        """Return the number of stages; raise UsageError if it cannot be what was requested, 0 for none."""

    def dtype(self, requested: DtypeChoice) -> Dtype:
        """Return the dtype of what is computed."""

    def weights(self, dtype: Dtype) -> str:
        """Return the types of the weights, for results."""

    def require(self, strategies: Sequence[str], params: Params, clock: Clock, stages: int) -> None:
        """Raise UsageError if a strategy cannot run."""

    def require_temperatures(self, temperatures: Sequence[float]) -> None:
        """Raise UsageError if there is no text at one of them."""

    def device(self, requested: str, dtype: Dtype, processes: int) -> str:
        """Return the torch device."""

    def tasks(self, options: BenchOptions) -> list[Task]:
        """Return the prompts by task."""

    def workloads(self, options: BenchOptions, tasks: Sequence[Task], sampling: Sampling, params: Params
                  ) -> list[Workload]:
        """Return the requests by task; raise UsageError for a prompt that does not fit."""

    def plain(self, options: BenchOptions, processes: int) -> tuple[PlainDecoding, NearTieJudge | None]:
        """Return plain decoding, with which every text is compared."""


def subject_of(options: BenchOptions) -> BenchSubject:
    """Raise UsageError for a model or a recording that is not there, and for options that a recording does not have."""
    if options.recording is None:
        return ModelSubject(resolve_model(options.model))
    from flowspec_edge.drivers.virtual.recording import load_recording

    options.require_recorded()
    return RecordedSubject(load_recording(options.recording))


@dataclass(frozen=True)
class ModelSubject:
    """Weights that compute."""

    model: OpenModel
    recording: None = None

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def path(self) -> Path:
        return self.model.path

    def stages(self, requested: int, profile: Profile | None) -> int:
        return stages_of(self.model, requested, profile)

    def dtype(self, requested: DtypeChoice) -> Dtype:
        return dtype_of(self.model, requested)

    def weights(self, dtype: Dtype) -> str:
        return weights_of(self.model, dtype)

    def require(self, strategies: Sequence[str], params: Params, clock: Clock, stages: int) -> None:
        require_runnable(strategies, self.model, params, clock, stages)

    def require_temperatures(self, temperatures: Sequence[float]) -> None:
        return

    def device(self, requested: str, dtype: Dtype, processes: int) -> str:
        return device_of(requested, self.model, dtype, processes=processes)

    def tasks(self, options: BenchOptions) -> list[Task]:
        if options.prompts:
            return load_tasks(options.prompts, options.by_category, options.limit)
        tasks = load_tasks([chat_questions() if options.chat else demo_prompts()], options.by_category,
                           options.limit)
        return tasks if options.by_category else [Task("questions" if options.chat else DEMO, tasks[0].prompts)]

    def workloads(self, options: BenchOptions, tasks: Sequence[Task], sampling: Sampling, params: Params
                  ) -> list[Workload]:
        from flowspec_edge.lab.bench.runner import Workload
        from flowspec_edge.model.text import Tokenizer

        tokenizer = Tokenizer(self.model)
        if options.chat and not tokenizer.chats:
            raise UsageError(f"{self.model.display_path} has no chat template: leave --chat out, or take a "
                             "model that has one")
        workloads = []
        for task in tasks:
            try:
                workloads.append(Workload(task.name, requests_for(
                    tokenizer, self.model, task.prompts, options.max_new_tokens, sampling, params, options.truncate,
                    "lower --max-new-tokens, or take the end of long prompts with --truncate N",
                    chat=options.chat)))
            except UsageError as error:
                raise UsageError(f"task {task.name}: {error}") from error
        return workloads

    def plain(self, options: BenchOptions, processes: int) -> tuple[PlainDecoding, NearTieJudge | None]:
        return plain_decoding(self.model, options.dtype, self._plain_device(options, processes))

    def judge(self, options: BenchOptions, processes: int) -> NearTieJudge | None:
        """Return :meth:`plain`'s second part alone."""
        return near_tie_judge(self.model, options.dtype, self._plain_device(options, processes))

    def _plain_device(self, options: BenchOptions, processes: int) -> str:
        return plain_device_of(options.device, self.model, dtype_of(self.model, options.dtype), processes)


@dataclass(frozen=True)
class RecordedSubject:
    """What a model said.

    Its texts are the reference, and any temperature has those of the recording.
    """

    recording: Recording

    @property
    def name(self) -> str:
        return self.recording.model

    @property
    def path(self) -> Path:
        return self.recording.path or Path(self.recording.model)

    def stages(self, requested: int, profile: Profile | None) -> int:
        stages = requested or (profile.boards - 1 if profile and profile.boards else 4)
        if profile:
            profile.check_stages(stages)
        return stages

    def dtype(self, requested: DtypeChoice) -> Dtype:
        return "fp32"

    def weights(self, dtype: Dtype) -> str:
        return f"recorded in {self.recording.provenance.get('dtype', 'an unknown type')}"

    def require(self, strategies: Sequence[str], params: Params, clock: Clock, stages: int) -> None:
        from flowspec_edge.drivers.virtual.recorded import require_drafts
        from flowspec_edge.strategies.registry import strategy_class

        for name in strategies:
            require_drafts(strategy_class(name), params, self.recording)

    def require_temperatures(self, temperatures: Sequence[float]) -> None:
        for temperature in temperatures:
            self.recording.at(temperature)

    def device(self, requested: str, dtype: Dtype, processes: int) -> str:
        return "cpu"

    @cached_property
    def _prompts(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the prompts by task and name."""
        prompts: dict[str, dict[str, tuple[int, ...]]] = {}
        for text in self.recording.texts:
            prompts.setdefault(text.task, {})[text.name] = text.prompt
        return prompts

    def tasks(self, options: BenchOptions) -> list[Task]:
        by_task = {name: [Prompt(key, name, " ".join(map(str, prompt))) for key, prompt in prompts.items()]
                   for name, prompts in self._prompts.items()}
        if options.by_category:
            return [Task(name, tuple(prompts[: options.limit])) for name, prompts in by_task.items()]
        return [Task(self.name, tuple([prompt for prompts in by_task.values() for prompt in prompts][: options.limit]))]

    def workloads(self, options: BenchOptions, tasks: Sequence[Task], sampling: Sampling, params: Params
                  ) -> list[Workload]:
        from flowspec_edge.d0.request import Request
        from flowspec_edge.lab.bench.runner import Workload

        seeds = {text.sampling.seed for text in self.recording.texts if not text.sampling.greedy}
        if len(seeds) == 1 and not sampling.seed:
            sampling = replace(sampling, seed=min(seeds))
        most = min([options.max_new_tokens,
                    *(len(text.answer) for text in self.recording.texts if text.reason == "length")])
        return [Workload(task.name, [
            Request(self._prompts[prompt.category][prompt.id], max_new_tokens=most, sampling=sampling, params=params,
                    stop_ids=self.recording.stop_ids) for prompt in task.prompts]) for task in tasks]

    def plain(self, options: BenchOptions, processes: int) -> tuple[PlainDecoding, NearTieJudge | None]:
        from flowspec_edge.drivers.virtual.recorded import answer_to

        return lambda request: answer_to(request, self.recording), None

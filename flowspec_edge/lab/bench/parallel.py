"""Virtual-time measurements computed by several processes (joblib), with the figures of one.

In virtual time a result depends on the request and on the described devices alone. A dry run lists what a
measurement asks for; processes compute that ahead, and the measurement itself takes the results in its order.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowspec_edge.d0.request import OnTokens, Request, Result, Stats
from flowspec_edge.device_profile import Profile, read_profile
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.interpreter import guarded_starts

if TYPE_CHECKING:
    from flowspec_edge.drivers.virtual.cluster import VirtualCluster
    from flowspec_edge.lab.plain import PlainDecoder


@dataclass(frozen=True)
class Workplace:
    """What every process loads once.

    model    a model's directory, or a recording
    plugins  strategies from outside, as "package.module:Class"
    threads  of torch; 0: those of the Dask worker that computes; None: those that the user has chosen
    """

    model: Path
    dtype: str
    device: str = "cpu"
    plugins: tuple[str, ...] = ()
    threads: int | None = 1
    recorded: bool = False


@dataclass(frozen=True)
class PipelineTask:
    """Concurrent requests, to a pipeline or (``stages`` 0) to plain decoding.

    ``profile`` is JSON, ``right_children`` as ``VirtualCluster``'s.
    """

    requests: tuple[Request, ...]
    stages: int = 0
    profile: str = ""
    arrivals: tuple[float, ...] | None = None
    right_children: float = 1.0


class ParallelRun:
    """A measurement whose requests are computed by several processes.

    Use :meth:`cluster` and :meth:`plain` in a dry run of a measurement, enter this context, and use them again in the
    same order: the results are real now.
    """

    def __init__(self, workplace: Workplace, jobs: int, dask: str | None = None) -> None:
        """Check that the processes can be had.

        jobs  processes on this machine
        dask  address of a Dask scheduler, whose workers are used instead; they need this package

        UsageError if joblib or Dask is not installed.
        """
        self._workplace, self._jobs, self._dask = workplace, jobs, dask
        self._tasks: list[PipelineTask] = []
        self._results: Generator[list[Result] | FlowspecError, None, None] | None = None
        self._next = 0
        self._undo = ExitStack()
        _import("joblib", "jobs")
        if dask:
            _import("distributed", "dask")

    def __enter__(self) -> ParallelRun:
        import joblib
        from joblib.externals.loky.backend import fork_exec

        self._undo.enter_context(guarded_starts((fork_exec, "fork_exec")))
        if self._dask:
            self._undo.enter_context(_connected(self._dask))
            self._undo.enter_context(joblib.parallel_config("dask"))
        run = joblib.Parallel(n_jobs=-1 if self._dask else self._jobs, return_as="generator", batch_size=1)
        self._results = run(joblib.delayed(_compute)(self._workplace, task) for task in self._tasks)
        return self

    def __exit__(self, *exception: object) -> None:
        results, self._results = self._results, None
        if results is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # joblib's, about what it cancels
                results.close()
        if not self._dask:
            _end_processes()
        self._undo.close()

    def cluster(self, stages: int, profile: Profile, right_children: float = 1.0) -> ParallelCluster:
        empty = PipelineTask((), stages, profile.model_dump_json(), right_children=right_children)
        return ParallelCluster(self._take, empty)

    def plain(self, request: Request) -> tuple[list[int], str]:
        """Return a ``PlainDecoding``."""
        [result] = self._take(PipelineTask((request,)))
        return result.tokens, result.finish_reason

    def _take(self, task: PipelineTask) -> list[Result]:
        if self._results is None:
            self._tasks.append(task)
            return [Result([], "length", Stats()) for _ in task.requests]
        assert task == self._tasks[self._next], "the measurement asks in another order than its dry run"
        self._next += 1
        try:
            results = next(self._results)
        except Exception as error:  # joblib's, for a process that was killed
            raise FlowspecError(f"a process of --jobs failed ({type(error).__name__}: {error}): if memory "
                                "ran out, use fewer") from error
        if isinstance(results, FlowspecError):
            raise results
        return results


class ParallelCluster:
    """A ``d0.request.ClusterBackend`` in virtual time."""

    clock = "virtual"

    def __init__(self, take: Callable[[PipelineTask], list[Result]], empty: PipelineTask) -> None:
        """Take one process' share of the tasks; ``empty``: its tasks without their requests."""
        self._take, self._empty = take, empty

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        return self.generate_many([request])[0]

    def generate_many(self, requests: Sequence[Request], arrivals: Sequence[float] | None = None
                      ) -> list[Result]:
        """One task: concurrent requests share the devices."""
        return self._take(replace(self._empty, requests=tuple(requests),
                                  arrivals=tuple(arrivals) if arrivals else None))

    def close(self) -> None:
        """Close nothing: the processes belong to the run."""


# ---- in the processes ------------------------------------------------------------------------------------

_computing = threading.Lock()  # a Dask worker computes in several threads, a process has one set of models


def _compute(workplace: Workplace, task: PipelineTask) -> list[Result] | FlowspecError:
    try:
        with _computing:
            return _loaded(workplace).results(task)
    except FlowspecError as error:  # returned, because joblib raises one error and forgets the others
        return error


class _Loaded:
    """One process' models, loaded when first needed."""

    def __init__(self, workplace: Workplace) -> None:
        from flowspec_edge.drivers.virtual.recording import load_recording
        from flowspec_edge.strategies.registry import strategy_class

        self._source = load_recording(workplace.model) if workplace.recorded else workplace.model
        if workplace.threads is not None and not workplace.recorded:
            import torch  # a recording needs none

            torch.set_num_threads(workplace.threads or _dask_threads())
        for name in workplace.plugins:
            strategy_class(name)
        self._workplace = workplace
        self._plain: PlainDecoder | None = None
        self._cluster: VirtualCluster | None = None
        self._described: tuple[int, str, float] | None = None

    def results(self, task: PipelineTask) -> list[Result]:
        if task.stages:
            return self._through_pipeline(task)
        return [self._plainly(request) for request in task.requests]

    def _plainly(self, request: Request) -> Result:
        from flowspec_edge.lab.plain import PlainDecoder

        w = self._workplace
        self._plain = self._plain or PlainDecoder(w.model, w.dtype, w.device)
        tokens, reason = self._plain.generate(list(request.prompt), request.max_new_tokens, request.sampling,
                                              request.stop_ids)
        return Result(tokens, reason, Stats())

    def _through_pipeline(self, task: PipelineTask) -> list[Result]:
        """Clusters of other devices take over the weights."""
        from flowspec_edge.drivers.virtual.cluster import VirtualCluster

        pipeline_key = task.stages, task.profile, task.right_children
        if self._cluster is None or self._described != pipeline_key:
            w, profile = self._workplace, read_profile(task.profile)
            share = task.right_children
            self._cluster = (self._cluster.under(profile, task.stages, share) if self._cluster else
                             VirtualCluster(self._source, task.stages, profile, w.dtype, device=w.device,
                                            right_children=share))
            self._described = pipeline_key
        return self._cluster.generate_many(task.requests, task.arrivals)


def _dask_threads() -> int:
    """Return the threads that Dask counts on this worker (``dask worker --nthreads``)."""
    from distributed import get_worker

    return int(get_worker().state.nthreads)


@lru_cache(maxsize=1)
def _loaded(workplace: Workplace) -> _Loaded:
    return _Loaded(workplace)


def _end_processes() -> None:
    """End joblib's processes, which it would keep for the next run.

    A kept process ends after five idle minutes.  If the next run begins just then, and warnings are errors, joblib's
    thread dies of its own warning, and the run waits for ever.
    """
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)


def _connected(address: str) -> AbstractContextManager[Any]:
    from distributed import Client

    try:
        client: AbstractContextManager[Any] = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise FlowspecError(f"no Dask scheduler at {address}: {error}") from error
    return client


def _import(module: str, extra: str) -> None:
    try:
        __import__(module)
    except ImportError:
        raise UsageError(f"--{extra} needs {module}: pip install 'flowspec-edge[{extra}]'") from None


def plugins_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the strategies from outside among ``names``, as "package.module:Class"."""
    from flowspec_edge.strategies.registry import strategy_class

    classes = [strategy_class(name) for name in names]
    return tuple(f"{cls.__module__}:{cls.__qualname__}" for cls in classes
                 if not cls.__module__.startswith("flowspec_edge."))

"""The Python interface: a model, a cluster in virtual time or of local processes, and its answers.

    from flowspec_edge import Cluster

    with Cluster.virtual("demo", stages=4, profile="paper-7b") as cluster:
        answer = cluster.generate("def add(a, b):", max_new_tokens=32)
        print(answer.text, answer.stats.tokens_per_second)

What ``__all__`` lists, with the fields and methods that docs/reference/python.md documents, is stable: a change that
breaks a caller raises the first number of the version that is not 0.

What computes is imported with the first cluster: torch and transformers take seconds, and a strategy needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from flowspec_edge.boards.planning.testbed import profile_or_testbed
from flowspec_edge.d0.request import (
    FinishReason,
    Request,
    Result,
    SchedulingPolicy,
    Stats,
    different_tokens,
)
from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.drivers.processes.spec import ClusterSpec, Here
from flowspec_edge.drivers.virtual.clock import Span
from flowspec_edge.drivers.virtual.place import Virtual
from flowspec_edge.errors import FlowspecError, PeerLost, RequestFailed, UsageError
from flowspec_edge.messages import Segment
from flowspec_edge.model.manifest import RunDtype, types_text
from flowspec_edge.model.opened import DEMO, OpenModel, resolve_model
from flowspec_edge.model.text import TextStream, Tokenizer
from flowspec_edge.sampling.settings import Penalties, Restrictions, Sampling
from flowspec_edge.strategies.base import Pipeline, Strategy
from flowspec_edge.strategies.parameters import Parameters
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params
from flowspec_edge.strategies.registry import strategy_class, strategy_names
from flowspec_edge.strategies.tree_strategy import TreeParameters, TreeStrategy
from flowspec_edge.tree.draft_api import Commit, DraftOutput, DraftRequest
from flowspec_edge.tree.draft_tree import DraftTree, Node
from flowspec_edge.tree.segment_builder import SegmentBuilder

if TYPE_CHECKING:
    from flowspec_edge.lab.plain import PlainDecoder

__all__ = ["Cluster", "Commit", "Completion", "DraftOutput", "DraftRequest", "DraftTree", "FlowspecError",
           "Node", "Parameters", "Params", "PeerLost", "Penalties", "Pipeline", "Profile", "Request",
           "RequestFailed", "Restrictions", "Sampling", "Segment", "SegmentBuilder", "Span", "Stats",
           "Strategy",
           "TreeParameters", "TreeStrategy", "UsageError", "load_profile", "strategy_class", "strategy_names"]

_STAGES = 4  # the paper's


@dataclass(frozen=True)
class Completion:
    """An answer.

    text           the decoded tokens
    tokens         token ids, without the prompt and the end-of-sequence id
    finish_reason  "stop" after an end-of-sequence id, "length" at the request's limit
    stats          counts and times; in virtual time the times are the profile's
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats


class Cluster:
    """One model on a draft device (D0) and a pipeline of stages (V1…VN); a context manager.

    Make one with :meth:`virtual` or :meth:`local`. One thread at a time may call its methods.

    model      the model's directory and configuration
    tokenizer  its tokenizer: ``encode(text)``, ``decode(ids)``, ``chat(messages)``
    stages     N
    clock      "virtual" or "wall"
    """

    def __init__(self, model: OpenModel, stages: int, dtype: RunDtype, device: str,
                 backend: Here | Virtual, threads: int | None = None,
                 scheduling_policy: SchedulingPolicy = "fair") -> None:
        from flowspec_edge.drivers.processes.clusters import open_cluster

        self.model = model
        self.tokenizer = Tokenizer(model)
        self.stages = stages
        self._dtype, self._device = dtype, device
        self._backend = open_cluster(ClusterSpec(model.path, stages, dtype, device=device, threads=threads,
                                                 scheduling_policy=scheduling_policy), backend)
        self._plain: PlainDecoder | None = None

    @classmethod
    def virtual(cls, model: str | Path = DEMO, *, stages: int | None = None,
                profile: str | Path | Profile = "paper-7b", dtype: RunDtype | None = None,
                device: str = "cpu", scheduling_policy: SchedulingPolicy = "fair") -> Cluster:
        """Return a cluster in virtual time, in one process. The same requests give the same figures.

        model    "demo", or a model's directory
        stages   verification devices; None: those of a sharded model or of a testbed, else 4
        profile  a name of ``flowspec profiles``, a TOML file, or a testbed BOARD:N[,BOARD:N]/MODEL/DTYPE
        dtype    "fp32", "bf16", "fp16", or "mixed" (fp32 with 16-bit matrices, on CPUs); None: a sharded
                 model's own, else "fp32"
        device   torch device for all weights
        scheduling_policy  of concurrent requests: "fair", or "fcfs", the oldest first

        UsageError for an unknown model or profile, or more stages than layers of the profile's model.
        """
        device_profile = profile if isinstance(profile, Profile) else profile_or_testbed(str(profile))
        if stages is None and device_profile.boards:
            stages = device_profile.boards - 1
        open_model, stages, dtype = _choose(model, stages, dtype)
        return cls(open_model, stages, dtype, device, Virtual(device_profile), scheduling_policy=scheduling_policy)

    @classmethod
    def local(cls, model: str | Path = DEMO, *, stages: int | None = None, dtype: RunDtype | None = None,
              device: str = "cpu", threads: int | None = None,
              scheduling_policy: SchedulingPolicy = "fair") -> Cluster:
        """Return a cluster of processes on this machine, started with the first request. Times are measured.

        threads  torch threads per process; None divides the cores

        Arguments and errors otherwise as for :meth:`virtual`. A request raises PeerLost if a stage ends.
        """
        open_model, stages, dtype = _choose(model, stages, dtype)
        return cls(open_model, stages, dtype, device, Here(), threads, scheduling_policy)

    @property
    def clock(self) -> str:
        return self._backend.clock

    @property
    def types(self) -> str:
        """The types of weights and activations, such as "weights int4, computed in bf16"."""
        stored = self.model.manifest.stored if self.model.manifest else self._dtype
        return types_text(self._dtype, stored)

    @property
    def spans(self) -> list[Span]:
        """What each device did, and when, in the last request. UsageError unless virtual."""
        from flowspec_edge.drivers.virtual.cluster import VirtualCluster

        if not isinstance(self._backend, VirtualCluster):
            raise UsageError("spans exist in virtual time alone; for processes see: flowspec bench timeline")
        return self._backend.spans

    def request(self, prompt: str | Sequence[int], *, strategy: str = DEFAULT_STRATEGY,
                max_new_tokens: int = 128, sampling: Sampling | None = None, params: Params | None = None,
                penalties: Penalties | None = None, priority: int = 0,
                restrictions: Restrictions | None = None, stop_ids: Collection[int] = (),
                ignore_eos: bool = False) -> Request:
        """Build a request that ends at the model's end-of-sequence ids, and at further tokens.

        prompt    text, or token ids
        strategy  a name (:func:`strategy_names`), or "package.module:Class"
        sampling  temperature, top_p, top_k, min_p and seed; None: greedy
        params    the strategies' parameters; None: the papers' values
        penalties  on what the text repeats, and on single tokens; None: none
        restrictions  on the tokens that may come next; None: none
        stop_ids  further tokens that end the answer
        ignore_eos  the model's end-of-sequence ids do not end the answer
        priority  lower is earlier, and one less quadruples the guaranteed rows

        UsageError for an unknown strategy or an empty prompt.
        """
        strategy_class(strategy)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return Request(ids, strategy, max_new_tokens, sampling or Sampling(), params or Params(),
                       frozenset(stop_ids) | (frozenset() if ignore_eos else self.model.stop_ids),
                       priority=priority, penalties=penalties, restrictions=restrictions)

    def generate(self, prompt: str | Sequence[int] | Request, *, strategy: str = DEFAULT_STRATEGY,
                 max_new_tokens: int = 128, sampling: Sampling | None = None, params: Params | None = None,
                 on_text: Callable[[str], None] | None = None) -> Completion:
        """Run one request; ``on_text`` gets the text as it is generated.

        The other arguments are those of :meth:`request` and ignored for a ``Request``. UsageError if the request
        does not fit the model; RequestFailed if the strategy raises something.
        """
        request = prompt if isinstance(prompt, Request) else self.request(
            prompt, strategy=strategy, max_new_tokens=max_new_tokens, sampling=sampling, params=params)
        if on_text is None:
            return self._completion(self._backend.generate(request))
        stream = TextStream(self.tokenizer.decode, on_text, request.prompt)
        result = self._backend.generate(request, stream.push)
        stream.close()
        return self._completion(result)

    def generate_many(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests that arrive together and share the pipeline; answers in their order.

        UsageError if some are by groups of devices (megatron, galaxy) and others are not, or outside of virtual
        time.
        """
        return [self._completion(result) for result in self._backend.generate_many(requests)]

    def plain(self, request: Request) -> list[int]:
        """Return the tokens of plain decoding with transformers' unsharded model.

        In fp32 every strategy gives them; in 16 bits near ties may differ. The first call loads the model a second
        time.
        """
        if self._plain is None:
            from flowspec_edge.lab.plain import PlainDecoder

            self._plain = PlainDecoder(self.model.path, self._dtype, self._device)
        return self._plain.generate(list(request.prompt), request.max_new_tokens, request.sampling,
                                    request.stop_ids, request.penalties, request.restrictions)[0]

    def different_tokens(self, request: Request, answer: Completion) -> int:
        """Count the places at which ``answer`` and :meth:`plain` differ, also after the end of the shorter text."""
        return different_tokens(answer.tokens, self.plain(request))

    def close(self) -> None:
        """End the processes; idempotent."""
        self._backend.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _completion(self, result: Result) -> Completion:
        return Completion(self.tokenizer.decode(result.tokens), result.tokens, result.finish_reason,
                          result.stats)


def _choose(model: str | Path, stages: int | None, dtype: RunDtype | None
            ) -> tuple[OpenModel, int, RunDtype]:
    open_model = resolve_model(model)
    manifest = open_model.manifest
    if manifest is None:
        return open_model, _STAGES if stages is None else stages, dtype or "fp32"
    if stages is not None:
        manifest.check_stages(stages)
    return open_model, manifest.stages, dtype or manifest.compute_dtype

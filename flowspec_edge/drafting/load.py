"""From a model directory to a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.checkpoint import HeadFiles, refuse_other_kind
from flowspec_edge.drafting.format import Surroundings, format_of, require_vocabulary
from flowspec_edge.drafting.recorded import record_passes, warm_up
from flowspec_edge.drafting.tree_cache import CacheMemory
from flowspec_edge.drafting.tree_drafter import TreeDrafter
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.candidates import Candidates
from flowspec_edge.model.draft_kinds import draft_kind_named, recognise_kind
from flowspec_edge.model.opened import OpenModel, missing_own_layer, opened
from flowspec_edge.model.output_head import OutputHead, as_output_head
from flowspec_edge.util.bounded_read import read_json_object
from flowspec_edge.util.graphs import KernelChoice, Recorder
from flowspec_edge.util.tensors import parse_dtype
from flowspec_edge.util.weight_file import Embedding, as_embedding


@dataclass
class SharedMemory:
    """Memory of ``rows`` for the caches of all sessions on CUDA, allocated at the start.

    record  records passes over it
    choice  which passes are recorded, once the draft model has been loaded
    """

    rows: int
    record: Recorder
    choice: KernelChoice | None = None

    def drafters(self, make: Callable[..., Drafter]) -> Callable[[], Drafter]:
        first = make()
        assert isinstance(first, TreeDrafter)
        memory, model = CacheMemory(first.shape, self.rows), first.pass_model
        warm_up(model, memory)
        recorded, self.choice = record_passes(model, memory, self.record)
        return partial(make, memory=memory, recorded=recorded)


def load_drafters(kind: str, directory: OpenModel | Path, lm_head: Tensor | OutputHead,
                  embedding: Tensor | Embedding | None, dtype: str, layers: int,
                  quantise: Callable[[nn.Module], None] = lambda module: None,
                  memory: SharedMemory | None = None, candidates: Candidates | None = None) -> Callable[[], Drafter]:
    """Load a draft model of a model; returns a factory of drafters (one per session) that share it.

    kind       of draft model, one with files
    lm_head    [V, H], or a module of it, the target's; the drafter works on its device
    embedding  [V, H], the target's, or None if :func:`needs_embedding` says that it is not needed
    dtype      "fp32", "fp16" or "bf16": of weights, cache and arithmetic
    layers     the target's; the states that a head captures depend on it
    quantise   replaces those linears of a head that have weights; it is called after each tensor.  Draft
               models that are no heads stay in ``dtype``
    memory     where the drafters of kinds that share memory keep their caches; None: each in its own
    candidates of heads that rank by the whole of lm_head

    UsageError for an unknown kind or a missing directory, FlowspecError for bad weights.
    """
    record, model, target = draft_kind_named(kind), opened(directory), as_output_head(lm_head)
    draft_path = model.draft(kind)
    if record.in_target and draft_path is None:
        raise UsageError(missing_own_layer(record, model))
    if draft_path is not None and not record.in_target:
        config = read_json_object(draft_path / "config.json")
        refuse_other_kind(draft_path, record, recognise_kind(config, HeadFiles(draft_path).shapes))
    draft_path = draft_path or model.parts / record.directory
    if record.looks_up_target and embedding is None:
        raise FlowspecError(f"{draft_path} looks up embeddings, and {model.target} has none")
    loaded = format_of(record).load(draft_path, Surroundings(
        model.target, target, None if embedding is None else as_embedding(embedding), layers,
        parse_dtype(dtype), quantise, candidates))
    if loaded.vocabulary is not None:
        require_vocabulary(draft_path, loaded.vocabulary, target)
    return memory.drafters(loaded.make) if memory and record.shares_memory else loaded.make


def needs_embedding(kind: str, model: OpenModel | Path) -> bool:
    """Whether :func:`load_drafters` needs the target's: their file is read as a whole to check it."""
    record = draft_kind_named(kind)
    return record.looks_up_target or format_of(record).needs_embedding(opened(model).parts / record.directory)

"""From a model directory to a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.block.drafter import BlockDrafter
from flowspec_edge.drafting.block.formats import load_block_head
from flowspec_edge.drafting.checkpoint import has_embedding
from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter, head_config, load_head, require_fit
from flowspec_edge.drafting.eagle.eagle3 import Eagle3Drafter
from flowspec_edge.drafting.eagle.eagle3_formats import head3_layers, load_head3
from flowspec_edge.drafting.eagle.head_drafter import FusibleHead
from flowspec_edge.drafting.eagle.mtp import load_mtp
from flowspec_edge.drafting.lm import load_lm
from flowspec_edge.drafting.recorded import record_passes, warm_up
from flowspec_edge.drafting.spd.drafter import SpdDrafter
from flowspec_edge.drafting.spd.module import load_module
from flowspec_edge.drafting.tree_cache import CacheMemory
from flowspec_edge.drafting.tree_drafter import TreeDrafter
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.modeldir import BLOCKS, DRAFT_PARTS, ModelDir, missing_mtp
from flowspec_edge.model.output_head import OutputHead, as_output_head
from flowspec_edge.util.graphs import KernelChoice, Recorder
from flowspec_edge.util.tensors import parse_dtype
from flowspec_edge.util.torchdevice import release
from flowspec_edge.util.weight_file import Embedding, as_embedding

_Head = TypeVar("_Head", bound=FusibleHead)


@dataclass
class SharedMemory:
    """``rows`` of one memory, allocated at the start, for the caches of all sessions; on CUDA.

    record  records passes over it
    choice  which passes are recorded, once the draft model has been loaded
    """

    rows: int
    record: Recorder
    choice: KernelChoice | None = None

    def drafters(self, make: Callable[..., Drafter]) -> Callable[[], Drafter]:
        first = make()
        assert isinstance(first, TreeDrafter)
        memory, model = CacheMemory(first.shape, self.rows), first.pass_model()
        warm_up(model, memory)
        recorded, self.choice = record_passes(model, memory, self.record)
        return partial(make, memory=memory, recorded=recorded)


def load_drafters(kind: str, model_dir: Path, lm_head: Tensor | OutputHead,
                  embedding: Tensor | Embedding | None, dtype: str, layers: int,
                  quantise: Callable[[nn.Module], None] = lambda module: None,
                  memory: SharedMemory | None = None) -> Callable[[], Drafter]:
    """Load a draft model of ``model_dir``; returns a factory of drafters (one per session) that share it.

    kind       a key of ``DRAFT_PARTS``
    lm_head    [V, H], or a module of it, the target's; the drafter works on its device
    embedding  [V, H], the target's or None; for "spd", "mtp" and EAGLE heads without their own
    dtype      "fp32", "fp16" or "bf16": of weights, cache and arithmetic
    layers     the target's; an EAGLE-3 head's captured states depend on it
    quantise   replaces those linears of a draft model that have weights; it is called after each tensor.
               SPD's module and language models stay in ``dtype``
    memory     where the drafters of EAGLE heads and language models keep their caches; None: each in its own

    UsageError for an unknown kind or a missing directory, FlowspecError for bad weights.
    """
    if kind not in DRAFT_PARTS:
        raise UsageError(f"unknown kind of draft model {kind!r}; there is: {', '.join(DRAFT_PARTS)}")
    path, torch_dtype = model_dir / DRAFT_PARTS[kind], parse_dtype(dtype)
    fused = memory is not None or None
    target = as_output_head(lm_head)
    if kind in ("eagle2", "eagle2-deep"):
        raw = head_config(path)
        require_fit(path, "width", raw.hidden_size, target.hidden_size)
        vocabulary = raw.vocab_size
        _require_vocabulary(path, vocabulary, target)
        head = load_head(path, embedding, torch_dtype, True, quantise, target)
        placed = _placed(head, target.device, fused)
        ranks, drafted = placed.ranking(target)
        make: Callable[..., Drafter] = partial(EagleDrafter, placed, ranks, draft_vocabulary=drafted)
    elif kind == "mtp":
        home = ModelDir(model_dir).draft(kind)
        if home is None or embedding is None:
            raise UsageError(missing_mtp(ModelDir(model_dir)))
        mtp = load_mtp(home, embedding, torch_dtype, quantise)
        vocabulary = mtp.config.vocab_size
        make = partial(EagleDrafter, _placed(mtp, target.device, fused), target)
    elif kind == "eagle3":
        head3 = load_head3(path, embedding, torch_dtype, True, quantise)
        require_fit(path, "target width", head3.config.target_hidden_size, target.hidden_size)
        vocabulary = head3.config.vocab_size
        captured = head3_layers(path, head3.config, layers)
        _require_vocabulary(path, vocabulary, target)
        placed3 = _placed(head3, target.device, fused)
        make = partial(Eagle3Drafter, placed3, captured, lm_head=placed3.shared_lm_head(target))
    elif kind == "spd":
        if embedding is None:
            raise FlowspecError(f"{path} looks up embeddings, and {model_dir / 'target'} has none")
        module = load_module(path, torch_dtype).to(target.device)
        vocabulary = module.config.vocab_size
        shared = as_embedding(embedding)
        if module.config.hidden_size != shared.embedding_dim:
            raise FlowspecError(
                f"{path}: the module's width is {module.config.hidden_size}, the target's "
                f"{shared.embedding_dim}; a module works with the target that it was trained for only"
            )
        make = partial(SpdDrafter, module, shared.to(target.device, torch_dtype))
    elif kind in BLOCKS:
        block = load_block_head(path, embedding, torch_dtype, layers, True, quantise).to(target.device)
        require_fit(path, "width", block.config.hidden_size, target.hidden_size)
        vocabulary = block.config.vocab_size
        make = partial(BlockDrafter, block, target)
    else:  # compares the vocabularies by their tokenizers
        model = load_lm(path, model_dir / "target", target.vocabulary, torch_dtype, target.device, fused)
        return memory.drafters(model.clone_session) if memory else model.clone_session
    _require_vocabulary(path, vocabulary, target)
    return memory.drafters(make) if memory and kind not in ("spd", *BLOCKS) else make


def _require_vocabulary(path: Path, vocabulary: int, target: OutputHead) -> None:
    if vocabulary != target.vocabulary:
        raise FlowspecError(f"{path}: the draft model's vocabulary has {vocabulary} tokens, "
                            f"the target's {target.vocabulary}; they must share one tokenizer")


def needs_embedding(kind: str, model_dir: Path) -> bool:
    """Whether :func:`load_drafters` needs the target's: their file is read as a whole to check it."""
    return kind != "lm" and (kind == "spd" or not has_embedding(model_dir / DRAFT_PARTS[kind]))


def _placed(head: _Head, device: torch.device, fused: bool | None) -> _Head:
    head.to(device)
    if device.type == "cuda" or fused:
        head.fuse_layer()
        release(device)
    return head

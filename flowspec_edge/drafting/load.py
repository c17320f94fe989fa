"""From a model directory to a drafter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter, load_head, require_fit
from flowspec_edge.drafting.eagle.eagle3 import Eagle3Drafter, head3_layers, load_head3
from flowspec_edge.drafting.lm import load_lm
from flowspec_edge.drafting.spd.drafter import SpdDrafter
from flowspec_edge.drafting.spd.module import load_module
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.modeldir import DRAFT_PARTS
from flowspec_edge.util.embedding_table import Embedding, as_embedding
from flowspec_edge.util.tensors import parse_dtype


def load_drafters(kind: str, model_dir: Path, lm_head: Tensor, embedding: Tensor | Embedding | None,
                  dtype: str, layers: int) -> Callable[[], Drafter]:
    """Load a draft model of ``model_dir``; returns a factory of drafters (one per session) that share it.

    kind       a key of ``DRAFT_PARTS``
    lm_head    [V, H], the target's; the drafter works on its device
    embedding  [V, H], the target's or None; for "spd" and EAGLE heads without their own
    dtype      "fp32", "fp16" or "bf16": of weights, cache and arithmetic
    layers     the target's; an EAGLE-3 head's captured states depend on it

    UsageError for an unknown kind or a missing directory, FlowspecError for bad weights.
    """
    if kind not in DRAFT_PARTS:
        raise UsageError(f"unknown kind of draft model {kind!r}; there is: {', '.join(DRAFT_PARTS)}")
    path, torch_dtype = model_dir / DRAFT_PARTS[kind], parse_dtype(dtype)
    if kind in ("eagle2", "eagle2-deep"):
        head = load_head(path, embedding, torch_dtype, in_file=True).to(lm_head.device)
        require_fit(path, "width", head.config.hidden_size, lm_head.shape[1])
        vocabulary = head.config.vocab_size
        weights = lm_head.to(torch_dtype)
        make: Callable[[], Drafter] = partial(EagleDrafter, head, weights)
    elif kind == "eagle3":
        head3 = load_head3(path, embedding, torch_dtype, in_file=True).to(lm_head.device)
        require_fit(path, "target width", head3.config.target_hidden_size, lm_head.shape[1])
        vocabulary = head3.config.vocab_size
        captured = head3_layers(path, head3.config, layers)
        make = partial(Eagle3Drafter, head3, captured)
    elif kind == "spd":
        if embedding is None:
            raise FlowspecError(f"{path} looks up embeddings, and {model_dir / 'target'} has none")
        module = load_module(path, torch_dtype).to(lm_head.device)
        vocabulary = module.config.vocab_size
        shared = as_embedding(embedding)
        if module.config.hidden_size != shared.embedding_dim:
            raise FlowspecError(
                f"{path}: the module's width is {module.config.hidden_size}, the target's "
                f"{shared.embedding_dim}; a module works with the target that it was trained for only"
            )
        make = partial(SpdDrafter, module, shared.to(lm_head.device, torch_dtype))
    else:  # compares the vocabularies by their tokenizers
        return load_lm(path, model_dir / "target", len(lm_head), torch_dtype, lm_head.device).clone_session
    if vocabulary != len(lm_head):
        raise FlowspecError(f"{path}: the draft model's vocabulary has {vocabulary} tokens, "
                            f"the target's {len(lm_head)}; they must share one tokenizer")
    return make

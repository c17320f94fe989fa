"""What quantised weights cost: KL divergence and perplexity against the checkpoint.

No model is in memory as a whole. The texts pass through one stage after another, and only one stage is loaded
at a time: a layer of the checkpoint, a part of the sharded model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.errors import UsageError
from flowspec_edge.messages import Open, Output, Payload, Segment
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.output_head import OutputHead
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.output_head import load_output_head
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.stage.weights.load import head_scheme_of
from flowspec_edge.util.tensors import to_torch

_ROWS = 64  # compared at a time: 39 MB of float32 for 152,000 tokens


@dataclass(frozen=True)
class WeightLoss:
    """Against the checkpoint, over ``tokens`` next tokens; divergences in nats a token.

    kl               mean of KL(checkpoint || quantised)
    perplexity       of the texts; reference_perplexity: the checkpoint's
    same_best_token  share of positions where both find the same token likeliest
    """

    weights: str
    tokens: int
    kl: float
    perplexity: float
    reference_perplexity: float
    same_best_token: float


def weight_losses(sharded: OpenModel, checkpoint: OpenModel, texts: Sequence[Sequence[int]],
                  device: str = "cpu", advance: Callable[[], None] = lambda: None) -> list[WeightLoss]:
    """Measure what quantised layers lose with the checkpoint's lm_head, then with the sharded model's own.

    The second is left out if the two lm_heads are equal.

    texts    token ids, at least two each
    advance  called after each stage; there are :func:`steps`

    UsageError unless ``sharded`` was made from a model of ``checkpoint``'s shape.
    """
    manifest = sharded.require_manifest()
    shape = checkpoint.layers, int(checkpoint.config["vocab_size"])
    if (manifest.layers, manifest.vocabulary) != shape:
        raise UsageError(f"{sharded.path} was not made from {checkpoint.display_path}: it has {manifest.layers} "
                         f"layers and {manifest.vocabulary} tokens, the checkpoint {shape[0]} and {shape[1]}")
    dtype = manifest.compute_dtype
    true = _hidden(checkpoint, checkpoint.layers, dtype, texts, device, advance)
    quantised = _hidden(sharded, manifest.stages, dtype, texts, device, advance)
    head = load_output_head(checkpoint, dtype, device)
    layers = manifest.quantisation.stored if manifest.quantisation else manifest.dtype
    losses = [_compared(f"layers {layers}", texts, (true, head), (quantised, head))]
    if (scheme := head_scheme_of(sharded)) is not None:
        stored_head = load_output_head(sharded, dtype, device)
        weights = f"layers {layers}, lm_head {scheme.kind}"
        losses.append(_compared(weights, texts, (true, head), (quantised, stored_head)))
    return losses


def steps(sharded: OpenModel, checkpoint: OpenModel) -> int:
    return checkpoint.layers + sharded.require_manifest().stages


def _hidden(model: OpenModel, stages: int, dtype: str, texts: Sequence[Sequence[int]], device: str,
            advance: Callable[[], None]) -> list[Tensor]:
    """Post-norm states [n, H] of each text."""
    segments = [_chain(number, text) for number, text in enumerate(texts)]
    states: list[Payload] = []
    for index in range(stages):
        engine = StageEngine(load_shard(model, index, stages, dtype, device))
        results: list[Segment | Output] = []
        for segment in segments:
            engine.open(Open(session=segment.session, epoch=0, capacity=len(segment.numbers)))
            admitted = engine.admit(segment)
            assert admitted is not None
            results.append(engine.compute([admitted])[0][1])
        segments = [result for result in results if isinstance(result, Segment)]
        states = [result.hidden for result in results if isinstance(result, Output)]
        del engine
        advance()
    return [to_torch(payload).to(device) for payload in states]


def _chain(session: int, text: Sequence[int]) -> Segment:
    rows = len(text)
    numbers = np.arange(rows, dtype=np.int32)
    return Segment(session=session, epoch=0, run=0, first=0, stop=rows, numbers=numbers, positions=numbers,
                   base=0,
                   bits=np.packbits(np.tri(rows, dtype=np.uint8), axis=1, bitorder="little"),
                   committed=np.empty(0, np.int32), tokens=np.asarray(text, np.int32), hidden=None)


@torch.inference_mode()
def _compared(weights: str, texts: Sequence[Sequence[int]], true: tuple[list[Tensor], OutputHead],
              quantised: tuple[list[Tensor], OutputHead]) -> WeightLoss:
    divergence = quantised_nll = reference = 0.0
    equal_choices = tokens = 0
    for successors, p, q in _log_probs(texts, true, quantised):
        divergence += float((p.exp() * (p - q)).sum())
        reference -= float(p.gather(1, successors).sum())
        quantised_nll -= float(q.gather(1, successors).sum())
        equal_choices += int((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += len(successors)
    return WeightLoss(weights, tokens, divergence / tokens, math.exp(quantised_nll / tokens),
                      math.exp(reference / tokens), equal_choices / tokens)


def _log_probs(texts: Sequence[Sequence[int]], true: tuple[list[Tensor], OutputHead],
               quantised: tuple[list[Tensor], OutputHead]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Next tokens [n, 1], and both models' log-probabilities [n, V] in float64, some rows at a time."""
    for text, a, b in zip(texts, true[0], quantised[0], strict=True):
        for lo in range(0, len(text) - 1, _ROWS):
            rows = slice(lo, min(lo + _ROWS, len(text) - 1))
            p, q = (torch.log_softmax(head(states[rows]).double(), -1)
                    for states, head in ((a, true[1]), (b, quantised[1])))
            yield torch.tensor(text[lo + 1:rows.stop + 1], device=p.device)[:, None], p, q

"""Whether a model writes the same tokens on a device as on the CPU.

The draft device and all stages run on the device in virtual time.  Every token is judged given its
predecessors, by transformers' model on the CPU in float32 with weights rounded to the device's dtype: it must
be the choice of plain decoding, or nearly tie with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowspec_edge.boards.gpu_check.computations import Computation
from flowspec_edge.boards.probe.checks import Check, result_check
from flowspec_edge.boards.probe.compute_rules import ComputeDevice, computed
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.plain import transformers_model
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling, choose

SAMPLINGS = {"greedy": Sampling(), "T=1": Sampling(1.0, seed=1),
             "T=0.8 top-p": Sampling(0.8, 50, 0.9, seed=2)}
STRATEGIES = ("autoregressive", "flowspec_plus")  # a row at a time; trees, and a draft head
DTYPES = ("fp32", "fp16", "bf16")
# Two tokens nearly tie if their logits differ by less than this share of the logits' standard deviation:
# sums in another order move a logit by less (docs/explained/exactness.md).
NEAR_TIE = {"fp32": 1e-4, "mixed": 1e-4, "fp16": 0.05, "bf16": 0.05}
_STAGES = 2
PROMPTS = ("def fibonacci(n):\n", 'class Stack:\n    """A stack."""\n\n    def push(self, item):\n')
NEW_TOKENS = 48


def token_kinds(dtypes: Sequence[str] = DTYPES) -> tuple[str, ...]:
    """Return the names of the checks: dtype, strategy and sampling."""
    return tuple(" ".join(parts) for parts in product(dtypes, STRATEGIES, SAMPLINGS))


def token_checks(model: OpenModel, new_tokens: int = NEW_TOKENS, dtypes: Sequence[str] = DTYPES
                 ) -> tuple[Check[ComputeDevice], ...]:
    """Generate ``new_tokens`` after each of ``PROMPTS``, for each of ``token_kinds``.

    model  unsharded and with a draft head, such as the demonstration model
    """
    prompts = [Tokenizer(model).encode(text) for text in PROMPTS]
    return tuple(result_check("tokens", kind, lambda compute_device, result: computed(result), partial(
        _computations, kind, {"model": str(model.path), "prompts": prompts, "new_tokens": new_tokens}))
        for kind in token_kinds(dtypes))


def _computations(kind: str, arguments: Mapping[str, Any], compute_device: ComputeDevice) -> list[Computation]:
    return [Computation(kind, f"{__name__}:compare", {"kind": kind, "device": compute_device.name, **arguments})]


def compare(kind: str, model: str, device: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> str:
    """Say how many tokens there are, and how many nearly tie; FlowspecError for one that is wrong."""
    dtype, strategy, name = kind.split(" ", 2)
    directory, total, ties = Path(model), 0, 0
    for prompt in prompts:
        request = Request(list(prompt), strategy, new_tokens, SAMPLINGS[name])
        tokens = _cluster(directory, device, dtype).generate(request).tokens
        if len(tokens) != new_tokens:
            raise FlowspecError(f"{len(tokens)} tokens, and {new_tokens} were asked for")
        logits = _logits(directory, dtype, [*prompt, *tokens])[len(prompt) - 1 : -1]
        firsts, wrong_at = judge(logits, len(prompt) - 1, tokens, SAMPLINGS[name], NEAR_TIE[dtype])
        if wrong_at is not None:
            raise FlowspecError(f"token {wrong_at + 1} after a prompt of {len(prompt)} is {tokens[wrong_at]}, and "
                                f"on the CPU {firsts[wrong_at]}, which is no near tie")
        total += len(tokens)
        ties += sum(first != token for first, token in zip(firsts, tokens, strict=True))
    near = f", {ties} of them near tie{'s' if ties > 1 else ''}" if ties else ", the same"
    return f"{total} tokens{near}"


def judge(logits: NDArray[np.float32], position: int, tokens: Sequence[int], sampling: Sampling,
          near: float) -> tuple[list[int], int | None]:
    """Return the reference's tokens, and the first index where ``tokens`` differs by more than a near tie or None.

    logits    [n, V]  of the reference, at the rows whose successors are ``tokens``
    position  of the first row
    near      share of the logits' standard deviation; a near tie is a token that plain decoding would choose
              with its logit raised by this much
    """
    positions = position + np.arange(len(tokens))
    firsts = choose(logits, positions, sampling).tolist()
    raised = logits.copy()
    raised[np.arange(len(tokens)), tokens] += near * logits.std()
    nearly = choose(raised, positions, sampling).tolist()
    wrong_indexes = [i for i, (token, first, near) in enumerate(zip(tokens, firsts, nearly, strict=True))
                     if token not in (first, near)]
    return firsts, wrong_indexes[0] if wrong_indexes else None


@cache
def _cluster(model: Path, device: str, dtype: str) -> VirtualCluster:
    return VirtualCluster(model, _STAGES, load_profile("paper-7b"), dtype, device=device)


@cache
def _reference(model: Path, dtype: str) -> Any:
    return transformers_model(OpenModel(model), dtype).float()


@torch.inference_mode()
def _logits(model: Path, dtype: str, text: Sequence[int]) -> NDArray[np.float32]:
    """[len(text), V] of one pass over the whole text, in float32 on the CPU."""
    logits = _reference(model, dtype)(torch.tensor([list(text)]), use_cache=False).logits[0]
    return np.asarray(logits.float().numpy())

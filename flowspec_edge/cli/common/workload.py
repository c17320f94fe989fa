"""Requests and their checks, and plain decoding as the reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flowspec_edge.cli.common.options import Clock, DtypeChoice, dtype_of
from flowspec_edge.cli.common.progress import progress as progress
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.opened import ANSWERING, DEMO, OpenModel
from flowspec_edge.util.resources import resource_dir

if TYPE_CHECKING:
    from flowspec_edge.d0.request import Request
    from flowspec_edge.lab.bench.near_ties import NearTies
    from flowspec_edge.lab.bench.runner import NearTieJudge, PlainDecoding
    from flowspec_edge.lab.bench.tasks import Prompt
    from flowspec_edge.lab.plain import PlainDecoder
    from flowspec_edge.model.text import Tokenizer
    from flowspec_edge.sampling.settings import Sampling
    from flowspec_edge.strategies.params import Params


def demo_prompts() -> Path:
    """Return the file of held-out prompts of the demonstration model."""
    return resource_dir("models") / DEMO / "prompts.jsonl"


def chat_questions() -> Path:
    """Return the file of questions of six kinds, in turn, for a model that answers."""
    return resource_dir("models") / ANSWERING / "prompts.jsonl"


def shipped_recording(model: str) -> Path:
    """Return what came with this package of a model's and its head's answers."""
    return resource_dir("models") / model / "recording.flowrec"


def requests_for(tokenizer: Tokenizer, model: OpenModel, prompts: Sequence[Prompt], max_new_tokens: int,
                 sampling: Sampling, params: Params, truncate: int | None = None,
                 advice: str = "lower --max-new-tokens", chat: bool = False) -> list[Request]:
    """Make one request per prompt, of its last ``truncate`` tokens; raise UsageError for a prompt that does not fit.

    ``chat``: prompts are questions, and go through the model's chat template.
    """
    from flowspec_edge.d0.request import Request
    from flowspec_edge.model.chat import Message

    requests, stops = [], model.stop_ids | (tokenizer.chat_stop_ids if chat else frozenset())
    for prompt in prompts:
        ids = tokenizer.chat([Message("user", prompt.text)]) if chat else tokenizer.encode(prompt.text)
        ids = ids[-truncate:] if truncate else ids
        name = f"prompt {prompt.id}" if prompt.id else "the prompt"
        require_fitting(len(ids), model, max_new_tokens, name, advice)
        requests.append(Request(ids, max_new_tokens=max_new_tokens, sampling=sampling, params=params,
                                stop_ids=stops))
    return requests


def require_fitting(length: int, model: OpenModel, max_new_tokens: int, name: str = "the prompt",
                    advice: str = "lower --max-new-tokens") -> None:
    """Raise UsageError if a prompt of ``length`` tokens and its answer exceed the model's positions."""
    if length + max_new_tokens > model.max_positions:
        raise UsageError(f"{name} has {length} tokens and {max_new_tokens} more are asked for, but the model "
                         f"stops at {model.max_positions}; {advice}")


def require_runnable(strategies: Sequence[str], model: OpenModel, params: Params, clock: Clock,
                     stages: int) -> None:
    """Raise UsageError if a strategy lacks its draft model, or processes cannot run it.

    Processes need a layer each.  Needs no torch.
    """
    from flowspec_edge.strategies.draft_choice import require_draft
    from flowspec_edge.strategies.registry import require_pipelines, strategy_class

    if clock == "wall":
        require_pipelines(strategies)
    for name in strategies:
        require_draft(strategy_class(name), params, model)
        if clock == "wall" and stages > model.layers:
            raise UsageError(f"{name}: {stages} stages are more than the model's {model.layers} layers: "
                             f"use at most --stages {model.layers}, or --clock virtual")


def with_a_draft(strategy: str, model: OpenModel, params: Params) -> Params:
    """Do as ``draft_choice.with_a_draft``, and print its note."""
    from flowspec_edge.strategies import draft_choice
    from flowspec_edge.strategies.registry import strategy_class

    params, note = draft_choice.with_a_draft(strategy_class(strategy), params, model)
    if note:
        print(f"flowspec: note: {note}", file=sys.stderr)
    return params


def plain_decoding(model: OpenModel, dtype: DtypeChoice, device: str = "cpu"
                   ) -> tuple[PlainDecoding, NearTieJudge | None]:
    """Return a function that decodes token by token with the unsharded model.

    In 16 bits also return a judge that tells whether near ties alone explain a difference between two texts.
    """
    from flowspec_edge.lab.plain import PlainDecoder

    decoder = PlainDecoder(model.path, dtype_of(model, dtype), device)
    explains = near_tie_judge(model, dtype, device, decoder)
    return lambda r: decoder.generate(list(r.prompt), r.max_new_tokens, r.sampling, r.stop_ids), explains


def near_tie_judge(model: OpenModel, dtype: DtypeChoice, device: str, decoder: PlainDecoder | None = None
                   ) -> NearTieJudge | None:
    """Return a judge of near ties, None if activations are in 32 bits.

    Without a ``decoder`` one is loaded for the first text that differs.
    """
    if dtype_of(model, dtype) in ("fp32", "mixed"):
        return None

    @cache
    def judge() -> NearTies:
        from flowspec_edge.lab.bench.near_ties import NearTies
        from flowspec_edge.lab.plain import PlainDecoder

        return NearTies((decoder or PlainDecoder(model.path, dtype_of(model, dtype), device)).model)

    return lambda request, tokens, reason: judge().explain(request, tokens, reason)


def fail_if_different(differences: Sequence[object]) -> None:
    """Print one line on stderr for each text that differs from plain decoding's, then raise an error."""
    for difference in differences:
        print(f"flowspec: not identical: {difference}", file=sys.stderr)
    if differences:
        raise FlowspecError("not every text is that of plain decoding; see above")

"""Different requests, and what plain decoding makes of each alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np

from flowspec_edge.d0.request import Request
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.params import Params

SAMPLINGS = (Sampling(), Sampling(1.0, seed=11), Sampling(1.0, top_p=0.9, seed=12))
SMALL = Params(segment=4, width=4, tree_size=20, depth=3, prefill_chunk=16)


@cache
def plain(model: Path) -> PlainDecoder:
    return PlainDecoder(model)


@cache
def text(model: Path, prompt: tuple[int, ...], count: int, sampling: Sampling) -> list[int]:
    return plain(model).generate(list(prompt), count, sampling)[0]


def answer(decoder: PlainDecoder, request: Request) -> tuple[list[int], str]:
    """What plain decoding makes of a request, and why it ends there."""
    return decoder.generate(list(request.prompt), request.max_new_tokens, request.sampling, request.stop_ids)


def plain_answers(model: Path) -> Callable[[Request], tuple[list[int], str]]:
    return partial(answer, plain(model))


def own_text(model: Path, request: Request) -> list[int]:
    """What plain decoding makes of a request without an end of sequence."""
    return text(model, tuple(request.prompt), request.max_new_tokens, request.sampling)


@cache
def continued(model: OpenModel, prompt: str, count: int, sampling: Sampling = SAMPLINGS[0]) -> tuple[list[int], str]:
    """Plain decoding's tokens after a prompt, up to an end of sequence, and the text that they add."""
    tokenizer = Tokenizer(model)
    ids = tokenizer.encode(prompt)
    tokens, _ = plain(model.path).generate(ids, count, sampling, model.stop_ids)
    return tokens, tokenizer.decode(ids + tokens)[len(tokenizer.decode(ids)):]


def prompt(i: int, length: int = 12) -> list[int]:
    return np.random.default_rng(i).integers(1, 97, length).tolist()


def some(count: int, names: list[str], start: int = 0) -> list[Request]:
    """Different prompts, samplings and lengths; of strategies one after the other."""
    return [Request(prompt(start + i, 5 + 13 * i), names[(start + i) % len(names)], 8 + 3 * i,
                    SAMPLINGS[(start + i) % 3], SMALL) for i in range(count)]

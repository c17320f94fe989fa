"""Log-probabilities as clients get them, against transformers' own logits of the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.http_server import NAME, Held, Running, running, served
from kits.process_clusters import PATIENCE
from transformers import AutoModelForCausalLM

from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def target(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model / "target", dtype=torch.float64)


@pytest.fixture
def server(model: Path, held: Held) -> Iterator[Running]:
    with running(served(model), held) as it:
        yield it


def expected(target: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """[len(tokens), V]: log p where each of ``tokens``, which follow the prompt, stands."""
    with torch.inference_mode():
        logits = target(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits, -1).numpy()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_completions(server: Running, model: Path, plain: PlainDecoder, target: Any, temperature: float
                       ) -> None:
    tokens, _ = plain.generate(PROMPT, 12, Sampling(temperature, seed=3))
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": temperature, "seed": 3,
             "logprobs": 4}
    decode = served(model).tokenizer.decode
    whole = server.client.completions.create(**asked).choices[0]
    found = whole.logprobs
    assert found is not None
    table = expected(target, tokens)
    assert found.tokens == [decode([token]) for token in tokens]
    np.testing.assert_allclose(found.token_logprobs, table[range(12), tokens], atol=1e-4)
    for row, token, top in zip(table, tokens, found.top_logprobs or [], strict=True):
        wanted = {*np.argsort(-row, kind="stable")[:4].tolist(), token}  # what was drawn is always there
        assert top.keys() == {decode([one]) for one in wanted}
        np.testing.assert_allclose(sorted(top.values()), sorted(row[[*wanted]]), atol=1e-4)
    assert [whole.text[at:at + len(text)] for at, text in zip(found.text_offset or [], found.tokens or [],
                                                              strict=True)] == found.tokens
    pieces = [chunk.choices[0] for chunk in server.client.completions.create(**asked, stream=True)]
    told = [piece.logprobs for piece in pieces if piece.logprobs]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [text for part in told for text in part.tokens or []] == found.tokens
    np.testing.assert_allclose([value for part in told for value in part.token_logprobs or []],
                               found.token_logprobs, atol=1e-5)
    assert [at for part in told for at in part.text_offset or []] == found.text_offset


def test_a_chats(server: Running, model: Path, target: Any) -> None:
    def ask(**more: Any) -> Any:
        return server.client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "hi"}], max_tokens=9, timeout=PATIENCE, **more)

    alone = ask(logprobs=True).choices[0]
    assert len(alone.logprobs.content) == 9
    assert not any(token.top_logprobs for token in alone.logprobs.content)
    beside = ask(logprobs=True, top_logprobs=3).choices[0]
    for token in beside.logprobs.content:
        best = token.top_logprobs[0]
        assert (token.token, token.logprob) == (best.token, best.logprob)  # greedy takes the likeliest
        assert bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 3
    assert "".join(token.token for token in beside.logprobs.content) == beside.message.content
    assert ask().choices[0].logprobs is None
    stop = alone.message.content[4:6]
    cut = ask(logprobs=True, stop=stop)
    assert len(cut.choices[0].logprobs.content) == cut.usage.completion_tokens < 9

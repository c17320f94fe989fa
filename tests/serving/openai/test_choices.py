"""Several answers to one request, by ``n`` or several prompts: each is what it would be alone, in one piece
and as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from kits.http_server import NAME, Running, ask, running, served
from kits.plain_answers import plain_text

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.sampling.rule import Sampling

PROMPT = [40, 41, 42, 43]
HOW: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 10, "temperature": 1, "seed": 7, "n": 3}


@pytest.fixture(scope="module")
def server(model: Path, processes: ProcessCluster) -> Iterator[Running]:
    with running(served(model), processes, capacity=4) as it:
        yield it


@pytest.fixture(scope="module")
def texts(model: Path) -> list[str]:
    """Plain decoding with seeds 7, 8 and 9."""
    return [plain_text(model, PROMPT, 10, Sampling(1.0, seed=seed)) for seed in (7, 8, 9)]


def test_the_seeds_of_the_choices_follow_one_another(server: Running, texts: list[str]) -> None:
    assert len({*texts}) == 3
    whole = ask(server, **HOW)
    assert [(choice.index, choice.text) for choice in whole.choices] == [*enumerate(texts)]
    assert whole.usage.prompt_tokens == len(PROMPT)
    assert whole.usage.completion_tokens <= 30
    assert len(whole.flowspec["choices"]) == 3
    pieces = ["", "", ""]
    finished = []
    for chunk in ask(server, **HOW, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            assert choice.index not in finished
            pieces[choice.index] += choice.text
            finished += [choice.index] if choice.finish_reason else []
    assert pieces == texts
    assert sorted(finished) == [0, 1, 2]
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens


def test_a_stop_string_ends_its_choice_alone(server: Running, texts: list[str]) -> None:
    pairs = [texts[1][i:i + 2] for i in range(1, 8)]
    stop = next(pair for pair in pairs if pair not in texts[0] and pair not in texts[2])
    found = ask(server, **HOW, stop=stop, extra_body={"flowspec": {"tokens": True}})
    assert [choice.text for choice in found.choices] == [texts[0], texts[1][:texts[1].index(stop)], texts[2]]
    assert [choice.finish_reason for choice in found.choices] == ["length", "stop", "length"]
    details = [choice.model_extra["flowspec"] for choice in found.choices]
    assert [one["stats"] is None for one in details] == [False, True, False]
    assert sum(len(one["tokens"]) for one in details) == found.usage.completion_tokens < 30


def test_chats_have_choices_too_and_each_its_role(server: Running) -> None:
    how: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6,
                           "temperature": 1, "n": 2, "seed": 1}
    whole = server.client.chat.completions.create(**how, logprobs=True)
    assert all(len(choice.logprobs.content) == 6 for choice in whole.choices if choice.logprobs)
    found = [["", ""], ["", ""]]
    for chunk in server.client.chat.completions.create(**how, stream=True):
        (choice,) = chunk.choices
        found[choice.index][0] += choice.delta.role or ""
        found[choice.index][1] += choice.delta.content or ""
    assert found == [["assistant", choice.message.content] for choice in whole.choices]


@pytest.mark.parametrize("n", [0, 6, 9])
def test_too_many_or_too_few_are_refused(server: Running, n: int) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **{**HOW, "n": n})
    assert caught.value.param == "n"


@pytest.mark.parametrize(("n", "prompts"), [
    (1, [PROMPT, "def f(x):", [50], "x"]), (2, [PROMPT, "def f(x):"]), (1, ["a b", "c"]), (1, [[40, 41], [42]])])
def test_several_prompts_are_answered_as_each_alone(server: Running, n: int, prompts: list[Any]) -> None:
    """Texts and token ids, together or, as lm-evaluation-harness sends them, of one kind; prompt-major: choice i of
    prompt p has the index n p + i."""
    alone: list[tuple[str, str]] = []
    counted = [0, 0]
    how = {**HOW, "n": n, "logprobs": 1}
    for prompt in prompts:
        done = ask(server, **{**how, "prompt": prompt})
        alone += [(choice.text, choice.finish_reason) for choice in done.choices]
        counted = [counted[0] + done.usage.prompt_tokens, counted[1] + done.usage.completion_tokens]
    whole = ask(server, **{**how, "prompt": prompts})
    assert [choice.index for choice in whole.choices] == [*range(n * len(prompts))]
    assert [(choice.text, choice.finish_reason) for choice in whole.choices] == alone
    assert all(choice.logprobs.token_logprobs for choice in whole.choices)
    assert [whole.usage.prompt_tokens, whole.usage.completion_tokens] == counted
    assert len(whole.flowspec["choices"]) == n * len(prompts)
    pieces = [""] * len(alone)
    for chunk in ask(server, **{**how, "prompt": prompts}, stream=True,
                     stream_options={"include_usage": True}):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == [text for text, _ in alone]
    assert chunk.usage.total_tokens == sum(counted)


def test_prompts_times_n_take_as_many_places(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match=r"at most 5 answers at once here, not 6: .*--queue") as caught:
        ask(server, **{**HOW, "prompt": [PROMPT, PROMPT]})
    assert caught.value.param == "prompt"

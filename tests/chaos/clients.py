"""Clients that ask without end, try again as an error tells them to, and compare every answer with plain
decoding's."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2

from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling
from tests.chaos.services import Service

DEADLINE_S = 600.0  # of a request, with all its tries; only what hangs takes so long
_PAUSE_S = 0.2  # before another try
_LEAVES = 0.05  # the share of requests whose client does not wait for the answer
_SAMPLINGS = (Sampling(), Sampling(1.0, seed=11), Sampling(1.0, top_p=0.9, seed=12))
NAME = "demo"


class Violation(Exception):
    """What must not happen."""


class _Retry(Exception):
    """An answer that tells the client to try again."""


@dataclass(frozen=True)
class Question:
    prompt: str
    sampling: Sampling
    tokens: tuple[int, ...]  # plain decoding's
    finish: str
    text: str

    def body(self, strategy: str, stream: bool) -> dict[str, Any]:
        stops = self.finish == "stop"  # one more than its text has
        return {"model": NAME, "prompt": self.prompt, "max_tokens": len(self.tokens) + stops,
                "temperature": self.sampling.temperature, "top_p": self.sampling.top_p,
                "seed": self.sampling.seed, "stream": stream,
                "flowspec": {"strategy": strategy, "tokens": True}}


def questions(model: OpenModel, prompts: int, lengths: Sequence[int]) -> list[Question]:
    """The first prompts of the model, each with every sampling and length."""
    plain, tokenizer, found = PlainDecoder(model.path), Tokenizer(model), []
    lines = (model.path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    for prompt in (json.loads(line)["prompt"] for line in lines[:prompts]):
        for sampling in _SAMPLINGS:
            tokens, finish = plain.generate(tokenizer.encode(prompt), max(lengths), sampling, model.stop_ids)
            for length in lengths:
                short = tuple(tokens[:length])
                found.append(Question(prompt, sampling, short, finish if len(tokens) < length else "length",
                                      tokenizer.decode(short)))
    return found


@dataclass
class Load:
    """Clients of one server."""

    service: Service
    questions: Sequence[Question]
    strategies: Sequence[str]
    seed: int
    clients: int = 3
    answers: Counter[str] = field(default_factory=Counter)  # "strategy T=1 stream" -> count
    refusals: Counter[str] = field(default_factory=Counter)  # errors that told a client to try again
    violations: list[str] = field(default_factory=list)
    left: int = 0  # requests whose client did not wait for the answer
    longest_s: float = 0.0  # of a request, with all its tries

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._tokens = 0
        self._asking = 0
        self._may_ask = True
        self._over = False
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True)
                         for number in range(self.clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait(self, tokens: int) -> None:
        """Until clients got so many tokens more."""
        with self._changed:
            wanted = self._tokens + tokens
            if not self._changed.wait_for(lambda: self._tokens >= wanted, DEADLINE_S):
                raise Violation(f"no client got a token for {DEADLINE_S:g} s")

    def pause(self) -> None:
        """Until all that was asked is answered."""
        with self._changed:
            self._may_ask = False
            if not self._changed.wait_for(lambda: self._asking == 0, DEADLINE_S):
                raise Violation(f"{self._asking} requests are not answered within {DEADLINE_S:g} s")

    def go_on(self) -> None:
        with self._changed:
            self._may_ask = True
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is None:  # the server did not start
                continue
            thread.join(DEADLINE_S)
            if thread.is_alive():
                self.violations.append("a client hangs")

    def ask(self, question: Question, strategy: str, stream: bool) -> float:
        """Return the seconds until the right answer; raises Violation."""
        start = time.monotonic()
        with httpx2.Client(base_url=self.service.url, trust_env=False, timeout=DEADLINE_S) as http:
            while True:
                deaths = self.service.deaths
                try:
                    self._try(http, question, strategy, stream)
                    return time.monotonic() - start
                except _Retry as again:
                    with self._changed:
                        self.refusals[str(again)] += 1
                except httpx2.TimeoutException:
                    raise Violation(f"no answer within {DEADLINE_S:g} s: {strategy}") from None
                except httpx2.TransportError as error:
                    if not self.service.down and self.service.deaths == deaths:
                        raise Violation(f"the connection broke, no server was killed: {error!r}") from None
                    with self._changed:
                        self.refusals["the server was killed"] += 1
                if self._over or time.monotonic() - start > DEADLINE_S:
                    raise Violation(f"{strategy}: no answer after {time.monotonic() - start:.0f} s of tries")
                with self._changed:
                    self._changed.wait_for(lambda: self._over, _PAUSE_S)

    def _run(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        with self.service.network():
            while True:
                question, strategy = chance.choice(self.questions), chance.choice(self.strategies)
                stream = chance.random() < 0.5
                with self._changed:
                    self._changed.wait_for(lambda: self._may_ask or self._over)
                    if self._over:
                        return
                    self._asking += 1
                try:
                    if chance.random() < _LEAVES:
                        self._leave(question, strategy)
                        continue
                    seconds = self.ask(question, strategy, stream)
                    with self._changed:
                        kind = f"{strategy} T={question.sampling.temperature:g}{' stream' if stream else ''}"
                        self.answers[kind] += 1
                        self.longest_s = max(self.longest_s, seconds)
                except Violation as error:
                    if not self._over:
                        self.violations.append(str(error))
                except Exception as error:
                    self.violations.append(f"a client failed: {error!r}")
                finally:
                    with self._changed:
                        self._asking -= 1
                        self._changed.notify_all()

    def _leave(self, question: Question, strategy: str) -> None:
        """Ask, and close the connection when the first words come."""
        with (suppress(httpx2.TransportError),
              httpx2.Client(base_url=self.service.url, trust_env=False, timeout=DEADLINE_S) as http,
              http.stream("POST", "/v1/completions", json=question.body(strategy, True)) as answer):
            next(answer.iter_lines(), None)
        with self._changed:
            self.left += 1

    def _try(self, http: httpx2.Client, question: Question, strategy: str, stream: bool) -> None:
        body = question.body(strategy, stream)
        if not stream:
            answer = http.post("/v1/completions", json=body)
            _check_status(answer)
            choice = answer.json()["choices"][0]
            compare(question, strategy, answer.json()["flowspec"]["tokens"], choice["text"],
                     choice["finish_reason"])
            self._got(len(question.tokens))
            return
        text, last, done = "", None, False
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
            _check_status(answer)
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        _check_error(200, event["error"])
                    text += event["choices"][0]["text"]
                    last = event
                    self._got(1)
        if not done or last is None:
            if self.service.down:
                raise _Retry("the server was killed")
            raise Violation(f"{strategy}: a stream ended without [DONE] and without an error")
        compare(question, strategy, last["flowspec"]["tokens"], text, last["choices"][0]["finish_reason"])

    def _got(self, tokens: int) -> None:
        with self._changed:
            self._tokens += tokens
            self._changed.notify_all()


def _check_status(answer: httpx2.Response) -> None:
    if answer.status_code == 200:
        return
    if answer.status_code not in (429, 503):
        raise Violation(f"status {answer.status_code}: {answer.text[:300]}")
    if "retry-after" not in answer.headers:
        raise Violation(f"status {answer.status_code} without Retry-After: {answer.text[:300]}")
    _check_error(answer.status_code, answer.json()["error"])


def _check_error(status: int, error: dict[str, Any]) -> None:
    if error["code"] not in ("cluster_unavailable", "rate_limit_exceeded"):
        raise Violation(f"status {status}: {error}")
    raise _Retry(f"{status} {error['message']}")


def compare(question: Question, strategy: str, tokens: Sequence[int], text: str, finish: str) -> None:
    got, wanted = (list(tokens), text, finish), (list(question.tokens), question.text, question.finish)
    if got != wanted:
        raise Violation(f"{strategy} {question.sampling}: got {got}, plain decoding gives {wanted}, after "
                        f"{question.prompt[:60]!r}")

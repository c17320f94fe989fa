"""``flowspec serve`` under load: lost answers, memory growth, and throughput by number of clients.

Clients are closed-loop: each sends its next request after an answer, which is compared with the text without
concurrency.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from openai import OpenAI

from flowspec_edge.boards.probe.board import resident_mb
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.sampling.rule import Sampling
from microbench._common import demo_prompts, serving

CLIENTS = (1, 2, 4, 8)
_STAGES = 4
_SERVER = ("--stages", _STAGES, "--at-once", max(CLIENTS))
_MEMORY_AT = (20, 100)  # requests after which memory is read
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer, with the seconds to its first and to its last token."""

    text: str
    tokens: int
    first_s: float
    seconds: float


def prompts_of(count: int) -> list[list[int]]:
    ids = demo_prompts(count)
    return [ids[i % len(ids)] for i in range(count)]


def load_of(clients: int, firsts: Sequence[float], totals: Sequence[float], tokens: int, wall: float) -> str:
    """Return a line of the table: tokens/s of all clients together, percentiles over requests."""
    p50, p95 = np.percentile(totals, (50, 95))
    first_p50, first_p95 = np.percentile(firsts, (50, 95))
    return (f"{clients:>7}  {tokens / wall:>8.2f}  {p50:>8.2f} s  {p95:>5.2f} s  {first_p50:>7.2f} s  "
            f"{first_p95:>5.2f} s")


# ---- over processes --------------------------------------------------------------------------------


def ask(client: OpenAI, prompt: list[int], tokens: int, seed: int) -> TimedAnswer:
    start = time.perf_counter()
    first, pieces, count = 0.0, [], 0
    for chunk in client.completions.create(model="demo", prompt=prompt, max_tokens=tokens, seed=seed,
                                           temperature=seed % 2, stream=True,
                                           stream_options={"include_usage": True}):
        if chunk.usage is not None:
            count = chunk.usage.completion_tokens
        if chunk.choices:
            first = first or time.perf_counter() - start
            pieces.append(chunk.choices[0].text)
    return TimedAnswer("".join(pieces), count, first, time.perf_counter() - start)


def closed_loop(client: OpenAI, prompts: Sequence[list[int]], tokens: int, clients: int) -> list[TimedAnswer]:
    def ask_in_turn(number: int) -> dict[int, TimedAnswer]:
        return {i: ask(client, prompts[i], tokens, i) for i in range(number, len(prompts), clients)}

    with ThreadPoolExecutor(clients) as pool:
        answers = {i: answer for part in pool.map(ask_in_turn, range(clients)) for i, answer in part.items()}
    return [answers[i] for i in range(len(prompts))]


def processes_load(prompts: Sequence[list[int]], tokens: int, emulate: str | None) -> list[str]:
    """Run closed loops of 1, 2, 4 and 8 clients; raise FlowspecError if a text differs from one client's."""
    loads, alone = list[str](), list[TimedAnswer]()
    emulated = ["--emulate", emulate] if emulate else []
    with (serving(*_SERVER, *emulated) as (url, _),
          OpenAI(base_url=url, api_key="none", timeout=_TIMEOUT_S) as client):
        for clients in CLIENTS:
            start = time.perf_counter()
            answers = closed_loop(client, prompts, tokens, clients)
            wall = time.perf_counter() - start
            alone = alone or answers
            check(answers, alone)
            loads.append(load_of(clients, [a.first_s for a in answers], [a.seconds for a in answers],
                                 sum(a.tokens for a in answers), wall))
    return loads


def check(answers: Sequence[TimedAnswer], expected: Sequence[TimedAnswer]) -> None:
    """Raise FlowspecError for an empty answer, or one that differs from the expected text."""
    for i, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        if not answer.tokens or answer.text != other.text:
            raise FlowspecError(f"answer {i} is {answer.text!r}, but was {other.text!r}")


# ---- in virtual time -------------------------------------------------------------------------------


def virtual_load(prompts: Sequence[list[int]], tokens: int, profile: str) -> list[str]:
    cluster, loads = VirtualCluster(resolve_model().path, _STAGES, load_profile(profile)), []
    requests = [Request(prompt, max_new_tokens=tokens, sampling=Sampling(i % 2, seed=i))
                for i, prompt in enumerate(prompts)]
    for clients in CLIENTS:
        before = [i - clients if i >= clients else None for i in range(len(requests))]
        results = cluster.generate_many(requests, follows=before)
        firsts = [result.stats.ttft_s for result in results]
        totals = [result.stats.ttft_s + result.stats.decode_s for result in results]
        loads.append(load_of(clients, firsts, totals, sum(len(result.tokens) for result in results),
                             max(span.end for span in cluster.spans)))
    return loads


# ---- memory ----------------------------------------------------------------------------------------


def process_tree(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()]
    return [pid, *(member for child in children for member in process_tree(child))]


def endurance(tokens: int) -> list[str]:
    """Run 100 requests in sequence, then 8 concurrent, of ten different ones; return a line for each memory reading.

    Raise FlowspecError if an answer is lost or differs from the first one to the same prompt and seed.
    """
    different = prompts_of(10)
    lines, answers = [], list[TimedAnswer]()
    with serving(*_SERVER) as (url, pid), OpenAI(base_url=url, api_key="none", timeout=_TIMEOUT_S) as client:
        members = process_tree(pid)
        for count in range(1, _MEMORY_AT[-1] + 1):
            i = (count - 1) % len(different)
            answers.append(ask(client, different[i], tokens, i))
            if count in _MEMORY_AT:
                sets = ", ".join(f"{resident_mb(member) or 0:.0f}" for member in members)
                lines.append(f"after {count:3} requests: resident {sets} MB (D0, then its children)")
        check(answers, [answers[i % len(different)] for i in range(len(answers))])
        check(closed_loop(client, different[:8], tokens, 8), answers[:8])
        sets = ", ".join(f"{resident_mb(member) or 0:.0f}" for member in members)
        lines.append(f"after 8 at once:     resident {sets} MB; no answer lost, every text as before")
    return lines


def show(title: str, loads: Sequence[str]) -> None:
    print(title, "clients  tokens/s  answer p50      p95  first p50      p95", *loads, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=16, help="for each number of clients")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--profile", default="paper-7b")
    args = parser.parse_args()
    prompts = prompts_of(args.requests)
    tokens, profile = args.tokens, args.profile
    show(f"virtual time, {profile}", virtual_load(prompts, tokens, profile))
    show(f"processes, emulating {profile}", processes_load(prompts, tokens, profile))
    show("processes, at this machine's pace", processes_load(prompts, tokens, None))
    print("\n".join(endurance(args.tokens)), flush=True)


if __name__ == "__main__":
    main()

"""``flowspec serve`` under load: is anything lost, does memory stay flat, what do more clients cost.

OpenAI's own client over HTTP against the command as a process of its own, whose stages are processes
too; the same load in virtual time beside it.  Clients are closed-loop: each asks again when it has
been answered.  Every text is compared with that of the same prompt and seed asked alone.  Needs the
client, which is in the extra ``dev``.  Does not know how requests share the stages.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from openai import OpenAI

from flowspec_edge.bench.prompts import load_prompts
from flowspec_edge.config import load_profile
from flowspec_edge.errors import FlowspecError
from flowspec_edge.modeldir import resolve_model
from flowspec_edge.resources import resource_dir
from flowspec_edge.runtime.request import Request
from flowspec_edge.runtime.virtual import VirtualCluster
from flowspec_edge.sampling import Sampling
from flowspec_edge.text import Tokenizer

CLIENTS = (1, 2, 4, 8)
_STAGES = 4
_AT_ONCE = max(CLIENTS)
_LOOKS = (20, 100)  # requests after which memory is looked at
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer: its text, and seconds to the first token and to the last."""

    text: str
    tokens: int
    first_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Load:
    """What so many clients got; medians and 95th percentiles are over requests."""

    clients: int
    tokens_per_second: float  # of all together
    p50_s: float
    p95_s: float
    first_p50_s: float
    first_p95_s: float


def prompts_of(count: int) -> list[list[int]]:
    """Held-out prompts of the demonstration model, as token ids, over and over if there are fewer."""
    model = resolve_model()
    tokenizer = Tokenizer(model)
    texts = load_prompts(resource_dir("models") / model.name / "prompts.jsonl", count)
    ids = [tokenizer.encode(text.text) for text in texts]
    return [ids[i % len(ids)] for i in range(count)]


def load_of(clients: int, firsts: Sequence[float], totals: Sequence[float], tokens: int, wall: float) -> Load:
    """The figures of a load that took ``wall`` seconds."""
    return Load(clients, tokens / wall, *(float(np.percentile(values, q)) for values in (totals, firsts)
                                          for q in (50, 95)))


# ---- over processes --------------------------------------------------------------------------------


@contextmanager
def serving(emulate: str | None) -> Iterator[tuple[str, int]]:
    """The server's address and process id."""
    command = [sys.executable, "-m", "flowspec_edge.cli.main", "serve", "--port", "0"]
    command += ["--stages", str(_STAGES), "--at-once", str(_AT_ONCE)]
    command += ["--emulate", emulate] if emulate else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            if not found:
                raise FlowspecError("the server did not start; see: flowspec serve")
            yield found[0], process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def ask(client: OpenAI, prompt: list[int], tokens: int, seed: int) -> Asked:
    """Stream one answer."""
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
    return Asked("".join(pieces), count, first, time.perf_counter() - start)


def closed_loop(client: OpenAI, prompts: Sequence[list[int]], tokens: int, clients: int) -> list[Asked]:
    """Every prompt once, shared out among clients that each ask again when they are answered."""
    def one(who: int) -> dict[int, Asked]:
        return {i: ask(client, prompts[i], tokens, i) for i in range(who, len(prompts), clients)}

    with ThreadPoolExecutor(clients) as pool:
        answers = {i: asked for part in pool.map(one, range(clients)) for i, asked in part.items()}
    return [answers[i] for i in range(len(prompts))]


def processes_load(prompts: Sequence[list[int]], tokens: int, emulate: str | None) -> list[Load]:
    """Closed loops of 1, 2, 4 and 8 clients; FlowspecError if a text differs from that of one client."""
    loads, alone = list[Load](), list[Asked]()
    with serving(emulate) as (url, _), OpenAI(base_url=url, api_key="none", timeout=_PATIENCE_S) as client:
        for clients in CLIENTS:
            start = time.perf_counter()
            answers = closed_loop(client, prompts, tokens, clients)
            wall = time.perf_counter() - start
            alone = alone or answers
            check(answers, alone)
            loads.append(load_of(clients, [a.first_s for a in answers], [a.seconds for a in answers],
                                 sum(a.tokens for a in answers), wall))
    return loads


def check(answers: Sequence[Asked], expected: Sequence[Asked]) -> None:
    """FlowspecError if an answer is not complete, or not the text that it was alone."""
    for i, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        if not answer.tokens or answer.text != other.text:
            raise FlowspecError(f"answer {i} is {answer.text!r}, but was {other.text!r}")


# ---- in virtual time -------------------------------------------------------------------------------


def virtual_load(prompts: Sequence[list[int]], tokens: int, profile: str) -> list[Load]:
    """The same clients where time is made up."""
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


def resident_mb(pid: int) -> float:
    """A process' resident set, in 10^6 bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def family(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()]
    return [pid, *(member for child in children for member in family(child))]


def endurance(tokens: int) -> list[str]:
    """100 requests in sequence, then 8 at once, ten different ones over and over; a line for each look.

    FlowspecError if an answer is lost or differs from the first one to the same prompt and seed.
    """
    different = prompts_of(10)
    lines, asked = [], list[Asked]()
    with serving(None) as (url, pid), OpenAI(base_url=url, api_key="none", timeout=_PATIENCE_S) as client:
        members = family(pid)
        for count in range(1, _LOOKS[-1] + 1):
            i = (count - 1) % len(different)
            asked.append(ask(client, different[i], tokens, i))
            if count in _LOOKS:
                sets = ", ".join(f"{resident_mb(member):.0f}" for member in members)
                lines.append(f"after {count:3} requests: resident {sets} MB (D0, then its children)")
        check(asked, [asked[i % len(different)] for i in range(len(asked))])
        check(closed_loop(client, different[:8], tokens, 8), asked[:8])
        sets = ", ".join(f"{resident_mb(member):.0f}" for member in members)
        lines.append(f"after 8 at once:     resident {sets} MB; nothing lost, every text as before")
    return lines


# ---- for people ------------------------------------------------------------------------------------


def table(title: str, loads: Sequence[Load]) -> str:
    """One line for each number of clients."""
    lines = [title, "clients  tokens/s  answer p50      p95  first p50      p95"]
    lines += [f"{load.clients:>7}  {load.tokens_per_second:>8.2f}  {load.p50_s:>8.2f} s  "
              f"{load.p95_s:>5.2f} s  {load.first_p50_s:>7.2f} s  {load.first_p95_s:>5.2f} s"
              for load in loads]
    return "\n".join(lines)


def main() -> None:
    """``python -m flowspec_edge.bench.micro_serve``"""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16, help="for each number of clients")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--profile", default="paper-7b")
    given = parser.parse_args()
    prompts = prompts_of(given.requests)
    tokens, profile = given.tokens, given.profile
    print(table(f"virtual time, {profile}", virtual_load(prompts, tokens, profile)), flush=True)
    print(table(f"processes, emulating {profile}", processes_load(prompts, tokens, profile)), flush=True)
    print(table("processes, at this machine's pace", processes_load(prompts, tokens, None)), flush=True)
    print("\n".join(endurance(given.tokens)), flush=True)


if __name__ == "__main__":
    main()

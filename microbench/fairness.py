"""How long a second client waits for its first token while another one floods ``flowspec serve``.

The flood comes from 127.0.0.1 and asks again at once, also after a refusal; the second client comes from
127.0.0.2, asks for one short answer after the other, and asks again a second after a refusal. With two
callers its share of the pipeline is one half: taking turns, its first token would come after twice the time
that it takes alone. ``ratio`` is the wait over that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx2

from flowspec_edge.errors import FlowspecError
from microbench._common import demo_prompts, serving

_CALLERS = 2
_CONTEXT = 2048  # tokens that the caches hold, and a request of the demonstration's model may have
_ANSWER = 16  # tokens of the second client's answers
_RETRY_S = 1.0
_FLOOD_RETRY_S = 0.05
_SATURATED_S = 4.0  # of flood before the second client comes


@dataclass(frozen=True)
class Flood:
    """What the first client asks; ``fields``: of each request's body; ``users``: whether each names another user."""

    name: str
    connections: int
    fields: dict[str, Any]
    users: bool = False


@dataclass(frozen=True)
class Waits:
    """The waits of the second client; a wait that the limit cut short counts as the limit.

    refused   answers of 429 or 503
    unserved  requests without a token within the limit
    differ    texts that were not those without a flood
    """

    flood: str
    asked: int
    median_s: float
    worst_s: float
    ratio: float  # median
    worst_ratio: float
    refused: int
    unserved: int
    differ: int


def floods(prompt_tokens: int) -> list[Flood]:
    return [
        Flood("none", 0, {}),
        *(Flood(f"{count} connections, 400 tokens", count, {"max_tokens": 400}) for count in (4, 12, 40)),
        Flood("6 connections, n = 8", 6, {"max_tokens": 100, "n": 8}),
        Flood("12 connections, the highest priority", 12, {"max_tokens": 400, "priority": -10}),
        Flood("12 connections, a user each", 12, {"max_tokens": 400}, users=True),
        Flood("4 connections, max_tokens of the whole cache", 4, {"max_tokens": _CONTEXT - prompt_tokens}),
    ]


def client_at(url: str, address: str) -> httpx2.Client:
    return httpx2.Client(base_url=url, timeout=600.0, trust_env=False,
                        transport=httpx2.HTTPTransport(local_address=address))


def streamed(client: httpx2.Client, body: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of an answer's events; raise httpx2.HTTPStatusError for a refusal."""
    with client.stream("POST", "/completions", json={"model": "demo", "stream": True, **body}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise FlowspecError(event["error"]["message"])
                yield event["choices"][0]["text"]


@contextmanager
def flooding(url: str, flood: Flood, prompts: Sequence[list[int]]) -> Iterator[None]:
    over = threading.Event()

    def send_requests(number: int) -> None:
        sent_count = 0
        while not over.is_set():
            sent_count += 1
            user = {"user": f"user {number} {sent_count}"} if flood.users else {}
            fields = {"prompt": prompts[(number + sent_count) % len(prompts)], **flood.fields, **user}
            try:
                with client_at(url, "127.0.0.1") as client:
                    for _ in streamed(client, fields):
                        if over.is_set():
                            break
            except (httpx2.HTTPError, FlowspecError):
                over.wait(_FLOOD_RETRY_S)

    threads = [threading.Thread(target=send_requests, args=(i,), daemon=True) for i in range(flood.connections)]
    for thread in threads:
        thread.start()
    try:
        over.wait(_SATURATED_S if threads else 0.0)
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30.0)


def first_token(client: httpx2.Client, prompt: list[int], limit_s: float) -> tuple[float | None, int, str]:
    """Return the seconds to the first token (None: not within the limit), the refusals, and the text."""
    start, refused, first = time.monotonic(), 0, None
    while time.monotonic() - start < limit_s:
        try:
            pieces = []
            remaining_s = limit_s - (time.monotonic() - start)
            timer = threading.Timer(remaining_s, client.close)  # keep-alives would outlast any timeout
            timer.start()
            try:
                for piece in streamed(client, {"prompt": prompt, "max_tokens": _ANSWER}):
                    timer.cancel()
                    first = first or time.monotonic() - start
                    pieces.append(piece)
            finally:
                timer.cancel()
            return first, refused, "".join(pieces)
        except httpx2.HTTPStatusError:
            refused += 1
            time.sleep(_RETRY_S)  # as a refused client does
        except (httpx2.HTTPError, RuntimeError):
            break
    return None, refused, ""


def measure(url: str, flood: Flood, prompts: Sequence[list[int]], limit_s: float, alone: Sequence[str],
            alone_s: float | None) -> tuple[Waits, list[str]]:
    waits, refused, unserved, texts = [], 0, 0, []
    over = time.monotonic() + limit_s + _SATURATED_S
    with flooding(url, flood, prompts):
        for prompt in prompts:
            with client_at(url, "127.0.0.2") as client:
                first, times, text = first_token(client, prompt, limit_s)
            waits.append(limit_s if first is None else first)
            refused, unserved = refused + times, unserved + (first is None)
            texts.append(text)
            if time.monotonic() > over:
                break
    median, worst = statistics.median(waits), max(waits)
    share = _CALLERS * (alone_s or median)
    differ = sum(bool(text) and text != other for text, other in zip(texts, alone, strict=False))
    return Waits(flood.name, len(waits), median, worst, median / share, worst / share, refused, unserved,
                 differ), texts


def table(rows: Sequence[Waits]) -> str:
    lines = [f"{'flood':<46} {'asked':>5} {'median':>8} {'worst':>8} {'ratio':>6} {'worst':>6} "
             f"{'refused':>7} {'unserved':>8} {'differ':>6}"]
    lines += [f"{row.flood:<46} {row.asked:>5} {row.median_s:>6.2f} s {row.worst_s:>6.2f} s "
              f"{row.ratio:>6.1f} {row.worst_ratio:>6.1f} {row.refused:>7} {row.unserved:>8} {row.differ:>6}"
              for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10, help="of the second client, for each flood")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a request, and for a flood")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--emulate", default="paper-7b", help="a profile; empty: this machine's pace")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    prompts = [prompt[:48] for prompt in demo_prompts(args.requests)]
    rows: list[Waits] = []
    alone: list[str] = []
    emulate = ["--emulate", args.emulate] if args.emulate else []
    with serving("--stages", args.stages, "--context", _CONTEXT, *emulate) as (url, _):
        for flood in floods(max(map(len, prompts))):
            row, texts = measure(url, flood, prompts, args.limit, alone, rows[0].median_s if rows else None)
            alone = alone or texts
            rows.append(row)
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
            time.sleep(2.0)  # what was cancelled ends within a turn or two, of which no answer tells
    print(json.dumps([asdict(row) for row in rows], indent=1) if args.json else table(rows))


if __name__ == "__main__":
    main()

"""Have a model answer open prompts over an OpenAI-compatible server, as training text for its draft head.

  python models/recipe/write_chats.py --url http://127.0.0.1:8080/v1 --out chats.jsonl --tokens 1000000

Appends a line with "messages" for every finished chat, so an interrupted run goes on where it stopped: the
number of lines tells which prompts are done. A third of the chats each is written at temperatures 0, 0.7
and 1, because a head drafts at all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from open_prompts import prompts
from openai import OpenAI

TEMPERATURES = (0.0, 0.7, 1.0)


def write_chats(url: str, model: str, out: Path, tokens: int, seed: int, parallel: int, longest: int) -> None:
    """Write chats until the answers have ``tokens`` tokens, those of earlier runs included."""
    client = OpenAI(base_url=url, api_key="none", max_retries=1, timeout=600)
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    token_count = sum(json.loads(line)["tokens"] for line in lines)
    numbered = itertools.islice(enumerate(prompts(seed)), len(lines), None)

    def chat(number: int, turns: list[str]) -> dict[str, object]:
        messages: list[dict[str, str]] = []
        count = 0
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            answer = client.chat.completions.create(
                model=model, messages=messages, max_tokens=longest, seed=number,  # type: ignore[arg-type]
                temperature=TEMPERATURES[number % len(TEMPERATURES)])
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            count += answer.usage.completion_tokens if answer.usage else 0
        return {"messages": messages, "tokens": count}

    with out.open("a", encoding="utf-8") as file, ThreadPoolExecutor(parallel) as pool:
        while token_count < tokens:
            batch = list(itertools.islice(numbered, parallel * 4))
            for row in pool.map(lambda pair: chat(*pair), batch):
                file.write(json.dumps(row) + "\n")
                token_count += int(str(row["tokens"]))
            file.flush()
            print(f"{out}: {token_count} of {tokens} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="The server's base URL, which ends in /v1.")
    parser.add_argument("--model", default="default", help="The model's name there.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=8, help="Chats at a time.")
    parser.add_argument("--longest", type=int, default=320, help="Tokens of an answer at most.")
    args = parser.parse_args()
    write_chats(args.url, args.model, args.out, args.tokens, args.seed, args.parallel, args.longest)


if __name__ == "__main__":
    main()

"""Benchmark reports with random figures."""

from __future__ import annotations

import random
import re
from itertools import takewhile
from pathlib import Path

from flowspec_edge.lab.bench.results import BenchReport
from flowspec_edge.lab.bench.samples import Sample

SETTINGS = {"model": "tiny", "stages": 4, "draft": "eagle2", "pipedec_width": 16, "max_new_tokens": 64,
            "dtype": "fp32", "seed": 0}
DOCUMENT = Path(__file__).parents[2] / "docs/reference/json.md"


def report(strategies: list[str], tasks: list[str], temperatures: list[float], prompts: int = 3,
           repeats: int = 1, stages: int = 4, profile: str | None = "paper-7b", seed: int = 0) -> BenchReport:
    """Random samples for every combination."""
    rng = random.Random(seed)
    samples = []
    for temperature in temperatures:
        for task in tasks:
            for strategy in strategies:
                for repeat in range(repeats):
                    for prompt in range(prompts):
                        tokens, decode = rng.randint(2, 64), rng.uniform(1, 9)
                        samples.append(Sample(
                            strategy, task, temperature, repeat, prompt, tokens, turns=decode / 0.08,
                            rounds=rng.randint(1, 9), tokens_per_second=(tokens - 1) / decode,
                            decode_s=decode, ttft_s=rng.random(), itl_p50_s=rng.random(),
                            itl_p95_s=rng.random(), drafted=9, verified=8, accepted=7, bytes=6,
                            identical=True, draft="eagle2", different_tokens=0,
                            answer=f"{task} {prompt}"))
    facts = [{"name": task, "prompts": prompts, "sha256": "0"} for task in tasks]
    settings = {**SETTINGS, "stages": stages, "tasks": facts}
    return BenchReport(profile, "virtual" if profile else "wall", settings, {"cpu": "none"}, "2026-01-02",
                       samples=samples, complete=True)


def documented_fields(heading: str) -> set[str]:
    """The names in the table that follows a line of docs/reference/json.md."""
    lines = DOCUMENT.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2].strip().splitlines()
    table = takewhile(lambda line: line.startswith("|"), lines)
    return {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}

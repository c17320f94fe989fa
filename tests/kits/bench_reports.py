"""Benchmark reports with random figures, and the texts of figures that are drawn of them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree

from flowspec_edge.device_profile import load_profile
from flowspec_edge.lab.bench.axes import AXES
from flowspec_edge.lab.bench.results import BenchReport, Sweep
from flowspec_edge.lab.bench.samples import Sample
from flowspec_edge.lab.reproduce.catalogue import Measurement
from flowspec_edge.lab.reproduce.records import Measured

SVG = "{http://www.w3.org/2000/svg}"
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


def measured(m: Measurement, tasks: Sequence[str], change: Callable[[list[Sample]], list[Sample]]) -> Measured:
    """What an artefact is made of, with random samples after ``change``, other ones at each value of its axis."""
    profile = load_profile(m.profile)

    def random_report(seed: int) -> BenchReport:
        made = report(list(m.strategies), list(tasks), list(m.temperatures), prompts=4, seed=seed,
                      profile=profile.name)
        made.samples = change(made.samples)
        made.settings |= {"profile": profile.model_dump(), "versions": {"flowspec-edge": "1"}}
        return made

    if m.axis is None:
        return Measured(m, random_report(0))
    settings = {**random_report(0).settings, "temperature": 0.0}
    sweep = Sweep(profile.name, "virtual", settings, complete=True, axis=AXES[m.axis])
    for seed, value in enumerate(m.values):
        sweep.point(value).report = random_report(seed)
    return Measured(m, sweep)


def svg_texts(path: Path) -> list[str]:
    """Everything that is written in an SVG, in the order of drawing."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def documented_fields(heading: str) -> set[str]:
    """The names in the table that follows a line of docs/reference/json.md."""
    lines = DOCUMENT.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2].strip().splitlines()
    table = takewhile(lambda line: line.startswith("|"), lines)
    return {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}

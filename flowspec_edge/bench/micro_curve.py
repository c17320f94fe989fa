"""Learning how long segments take by their rows, against being told: FlowSpec+ in virtual time.

Under a profile as it is, and with other stage curves in its place: flat to 32 or 64 rows, and one that
doubles from 1 to 16.  For comparison, segments of 16 rows at most, as without any curve.
"""

from __future__ import annotations

import argparse
import time
from statistics import fmean

from flowspec_edge.bench.prompts import load_prompts
from flowspec_edge.config import Profile, load_profile
from flowspec_edge.modeldir import resolve_model
from flowspec_edge.resources import resource_dir
from flowspec_edge.runtime.request import Request
from flowspec_edge.runtime.slot_curve import SlotCurve
from flowspec_edge.runtime.virtual import VirtualCluster
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.text import Tokenizer

CURVES: dict[str, tuple[list[float], list[float]] | None] = {  # rows and ms, in place of the profile's
    "own": None,
    "flat to 32": ([32, 132], [80.0, 212.5]),
    "flat to 64": ([64, 164], [80.0, 145.0]),
    "steep": ([1, 16], [40.0, 80.0]),
}


def with_curve(profile: Profile, rows: list[float], ms: list[float]) -> Profile:
    """``profile`` with these corners of its stages' curve."""
    stage = profile.stage.model_copy(update={"rows": rows, "ms": ms, "context_ms": []})
    return profile.model_copy(update={"stage": stage})


def main() -> None:
    """Print tokens/s told and learned."""
    parser = argparse.ArgumentParser(description="Learning the stages' curve against being told it.")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--profile", default="paper-7b")
    parser.add_argument("--stages", type=int, default=4)
    given = parser.parse_args()
    model = resolve_model()
    tokenizer, named = Tokenizer(model), load_profile(given.profile)
    texts = load_prompts(resource_dir("models") / model.name / "prompts.jsonl", given.prompts)
    prompts = [tokenizer.encode(text.text) for text in texts]
    for name, corners in CURVES.items():
        profile = with_curve(named, *corners) if corners else named
        for temperature in (0.0, 1.0):
            speeds = {kind: _speed(VirtualCluster(model.path, given.stages, profile, learn=kind == "learned"),
                                   [Request(ids, "flowspec_plus", given.tokens, Sampling(temperature, seed=1),
                                            params=Params(plus_without="curve" if kind == "fixed" else ""))
                                    for ids in prompts])
                      for kind in ("fixed", "told", "learned")}
            print(f"{given.profile}, curve: {name}, {given.stages} stages, T = {temperature:g}, "
                  f"{len(prompts)} prompts, VIRTUAL TIME: {Params().segment} rows {speeds['fixed']:.2f} "
                  f"tokens/s, told {speeds['told']:.2f}, learned {speeds['learned']:.2f} "
                  f"({speeds['learned'] / speeds['told'] - 1:+.1%})", flush=True)
    print(f"D0: {_decision_us():.0f} us for a report of each of {given.stages} stages and a decision")


def _speed(cluster: VirtualCluster, requests: list[Request]) -> float:
    """Tokens/s, the mean of those with an answer, as ``flowspec bench run`` counts."""
    results = [cluster.generate(request).stats for request in requests]
    return fmean(stats.tokens_per_second for stats in results if stats.decode_s > 0)


def _decision_us(stages: int = 4, turns: int = 200) -> float:
    """What D0 takes for all stages' reports of a segment and the 64 answers that a decision wants."""
    curve = SlotCurve()
    for rows in range(1, 65):
        for stage in range(1, stages + 1):
            curve.observe(stage, rows, 0.08 + rows * 1e-4)
    start = time.perf_counter()
    for turn in range(turns):
        for stage in range(1, stages + 1):
            curve.observe(stage, 1 + turn % 64, 0.08)
        for rows in range(1, 65):
            curve.seconds(rows)
    return (time.perf_counter() - start) / turns * 1e6


if __name__ == "__main__":
    main()

"""FlowSpec+ that learns the stages' curve (time by rows), against one that is told the curve; virtual time.

Under a profile's own curve and three others, and with segments of at most 16 rows, as without a curve.
"""

from __future__ import annotations

import time
from statistics import fmean

from flowspec_edge.d0.request import Request
from flowspec_edge.d0.slot_curve import SlotCurve
from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.params import Params
from microbench._common import demo_prompts, options

CURVES: dict[str, tuple[list[float], list[float]] | None] = {  # (rows, ms) instead of the profile's
    "own": None,
    "flat to 32": ([32, 132], [80.0, 212.5]),
    "flat to 64": ([64, 164], [80.0, 145.0]),
    "steep": ([1, 16], [40.0, 80.0]),
}


def with_curve(profile: Profile, rows: list[float], ms: list[float]) -> Profile:
    stage = profile.stage.model_copy(update={"rows": rows, "ms": ms, "context_ms": []})
    return profile.model_copy(update={"stage": stage})


def main() -> None:
    args = options(__doc__, prompts=12, tokens=96, profile="paper-7b", stages=4)
    model, profile_of_name, prompts = resolve_model(), load_profile(args.profile), demo_prompts(args.prompts)
    for name, corners in CURVES.items():
        profile = with_curve(profile_of_name, *corners) if corners else profile_of_name
        for temperature in (0.0, 1.0):
            speeds = {kind: _speed(VirtualCluster(model.path, args.stages, profile, learn=kind == "learned"),
                                   [Request(ids, "flowspec_plus", args.tokens, Sampling(temperature, seed=1),
                                            params=Params(plus_without="curve" if kind == "fixed" else ""))
                                    for ids in prompts])
                      for kind in ("fixed", "told", "learned")}
            print(f"{args.profile}, curve: {name}, {args.stages} stages, T = {temperature:g}, "
                  f"{len(prompts)} prompts, VIRTUAL TIME: {Params().segment} rows {speeds['fixed']:.2f} "
                  f"tokens/s, told {speeds['told']:.2f}, learned {speeds['learned']:.2f} "
                  f"({speeds['learned'] / speeds['told'] - 1:+.1%})", flush=True)
    print(f"D0: {_decision_us(args.stages):.0f} us for a report of each of {args.stages} stages and a "
          "decision")


def _speed(cluster: VirtualCluster, requests: list[Request]) -> float:
    """Return the mean tokens/s of the requests with more than one token, as ``flowspec bench run`` counts."""
    speeds = [cluster.generate(request).stats.tokens_per_second for request in requests]
    return fmean(speed for speed in speeds if speed is not None)


def _decision_us(stages: int, turns: int = 200) -> float:
    """Measure D0's time for all stages' reports of one segment and the 64 look-ups of a decision."""
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

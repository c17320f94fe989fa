"""What reality adds to virtual time: emulating processes against it, prompt by prompt.

FlowSpec and Chunk-PP over real processes and sockets that take a profile's time, and in virtual time
under the same profile.  What is lost between the two is what Python, ZeroMQ and the operating system
add; the FlowSpec paper's own code loses a quarter of its gain in tokens per turn that way (1.85 ×
in tokens per turn, 1.43 × in tokens/s).  Does not know how either clock works.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from statistics import fmean

from flowspec_edge.bench.prompts import load_prompts
from flowspec_edge.config import load_profile
from flowspec_edge.modeldir import resolve_model
from flowspec_edge.resources import resource_dir
from flowspec_edge.runtime.clusters import LocalClusters
from flowspec_edge.runtime.devices import Devices
from flowspec_edge.runtime.emulation import Emulation
from flowspec_edge.runtime.request import Cluster, Request, Stats
from flowspec_edge.runtime.virtual import VirtualCluster
from flowspec_edge.text import Tokenizer

STRATEGIES = ("chunk_pp", "flowspec", "flowspec_plus")


def measure(prompts: int, tokens: int, profile: str, stages: int) -> dict[str, dict[str, list[Stats]]]:
    """Clock → strategy → the requests' figures, on the demonstration model's held-out prompts."""
    model = resolve_model()
    devices, tokenizer = Devices.even(load_profile(profile), stages), Tokenizer(model)
    texts = load_prompts(resource_dir("models") / model.name / "prompts.jsonl", prompts)
    requests = [tokenizer.encode(text.text) for text in texts]

    def run(cluster: Cluster) -> dict[str, list[Stats]]:
        with closing(cluster):
            return {name: [cluster.generate(Request(ids, name, tokens)).stats for ids in requests]
                    for name in STRATEGIES}

    return {"emulated": run(LocalClusters(model.path, stages, emulation=Emulation(devices))),
            "virtual": run(VirtualCluster(model.path, stages, devices))}


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description="Emulating processes against virtual time.")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--profile", default="paper-7b")
    parser.add_argument("--stages", type=int, default=4)
    given = parser.parse_args()
    found = measure(given.prompts, given.tokens, given.profile, given.stages)
    speed = {clock: {name: fmean(s.tokens_per_second for s in stats) for name, stats in rows.items()}
             for clock, rows in found.items()}
    for name in STRATEGIES:
        pairs = zip(found["emulated"][name], found["virtual"][name], strict=True)
        each = ", ".join(f"{a.tokens_per_second / b.tokens_per_second:.3f}" for a, b in pairs)
        emulated, virtual = speed["emulated"][name], speed["virtual"][name]
        print(f"{name}, {given.stages} stages, {given.profile}: EMULATED {emulated:.2f} tokens/s, "
              f"VIRTUAL TIME {virtual:.2f}, ratio {emulated / virtual:.3f} (each prompt: {each})")
    gain = speed["emulated"]["flowspec"] / speed["emulated"]["chunk_pp"]
    alt = {name: _alt(found["virtual"][name]) for name in STRATEGIES}
    turns = alt["flowspec"] / alt["chunk_pp"]
    print(f"flowspec over chunk_pp: {gain:.3f} x in EMULATED wall clock, {turns:.3f} x in tokens per turn "
          f"(VIRTUAL TIME): {gain / turns:.3f} of it is kept")


def _alt(stats: list[Stats]) -> float:
    """Tokens per turn over several requests: sums divided by sums."""
    return sum(s.alt * s.turns for s in stats) / sum(s.turns for s in stats)


if __name__ == "__main__":
    main()

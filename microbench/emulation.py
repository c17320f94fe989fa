"""Emulating processes against virtual time under the same profile, prompt by prompt.

The difference is the overhead of Python, ZeroMQ and the operating system.  Such overhead costs the FlowSpec
paper's code a quarter of its gain (1.85 × in tokens per turn, 1.43 × in tokens/s).
"""

from __future__ import annotations

from contextlib import closing
from statistics import fmean

from flowspec_edge.d0.request import ClusterBackend, Request, Result, Stats
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.lab.emulation.emulator import emulated
from flowspec_edge.model.opened import resolve_model
from microbench._common import demo_prompts, options

STRATEGIES = ("chunk_pp", "flowspec", "flowspec_plus")


def measure(prompts: int, tokens: int, profile: str, stages: int, clients: int = 1
            ) -> dict[str, dict[str, list[list[Result]]]]:
    """Run the strategies under both clocks; return clock → strategy → groups of results.

    A group has ``clients`` results that arrived together.
    """
    model, devices = resolve_model(), Devices.from_profile(load_profile(profile), stages)
    requests = demo_prompts(prompts)
    groups = [requests[i : i + clients] for i in range(0, len(requests), clients)]

    def run(cluster: ClusterBackend) -> dict[str, list[list[Result]]]:
        with closing(cluster):
            return {name: [cluster.generate_many([Request(ids, name, tokens) for ids in group])
                           for group in groups] for name in STRATEGIES}

    return {"emulated": run(open_cluster(ClusterSpec(model.path, stages, at_once=clients),
                                         emulated(devices))),
            "virtual": run(VirtualCluster(model.path, stages, devices))}


def main() -> None:
    args = options(__doc__, prompts=4, tokens=64, profile="paper-7b", stages=4, clients=1)
    rows_by_clock = measure(args.prompts, args.tokens, args.profile, args.stages, args.clients)
    speed = {clock: {name: fmean(map(_speed, groups)) for name, groups in rows.items()}
             for clock, rows in rows_by_clock.items()}
    for name in STRATEGIES:
        pairs = zip(rows_by_clock["emulated"][name], rows_by_clock["virtual"][name], strict=True)
        ratios = ", ".join(f"{_speed(a) / _speed(b):.3f}" for a, b in pairs)
        emulated, virtual = speed["emulated"][name], speed["virtual"][name]
        print(f"{name}, {args.stages} stages, {args.profile}, {args.clients} at once: "
              f"EMULATED {emulated:.2f} tokens/s, VIRTUAL TIME {virtual:.2f}, "
              f"ratio {emulated / virtual:.3f} (each: {ratios})")
    if args.clients > 1:
        return
    gain = speed["emulated"]["flowspec"] / speed["emulated"]["chunk_pp"]
    alt = {name: _alt([group[0].stats for group in rows_by_clock["virtual"][name]]) for name in STRATEGIES}
    turns = alt["flowspec"] / alt["chunk_pp"]
    print(f"flowspec over chunk_pp: {gain:.3f} x in EMULATED wall clock, {turns:.3f} x in tokens per turn "
          f"(VIRTUAL TIME): {gain / turns:.3f} of it is kept")


def _speed(group: list[Result]) -> float:
    """Return tokens/s: of one request while it decodes, of several together from their arrival on."""
    if len(group) == 1:
        return group[0].stats.tokens_per_second or 0.0
    return sum(len(result.tokens) for result in group) / max(result.token_at[-1] for result in group)


def _alt(stats: list[Stats]) -> float:
    """Return the tokens per turn over several requests: sums divided by sums."""
    decoded = [(s.alt, s.turns) for s in stats if s.alt is not None]
    return sum(alt * turns for alt, turns in decoded) / sum(turns for _, turns in decoded)


if __name__ == "__main__":
    main()

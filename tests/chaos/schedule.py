"""What strikes when: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

# Kinds of faults, with the share of each in a long run.
LOCAL = {
    "none": 3,  # nothing happens: what a probe takes under load
    "kill": 20,
    "kill_two": 8,
    "kill_all": 8,
    "kill_again": 8,  # another stage, while the cluster recovers from the first
    "stop_continue": 12,
    "stop": 4,  # until it is replaced
    "fork_server_kill": 5,
    "fork_server_stop": 3,  # and a stage is killed, which has to be forked anew
    "draft_stop_continue": 4,
    "draft_kill": 3,  # the whole server; clients try again at the one in its place
    "disk_full": 5,  # and a stage is killed
    "clock_back": 5,  # and a stage is killed, so that sessions are opened anew
    "memory_limit": 5,
}
LINKS = {"none": 1, "link_cut": 6, "link_slow": 4, "stop_continue": 2, "kill": 1, "draft_stop_continue": 1,
         "draft_kill": 1, "clock_back": 1}


@dataclass(frozen=True)
class Setup:
    """A server: ``strategy`` decides which draft models it loads; ``kinds``: of faults, with their shares."""

    where: str  # "local", or "links": services in network namespaces
    strategy: str
    stages: int
    share: int
    kinds: tuple[tuple[str, int], ...]


SETUPS = (
    Setup("local", "flowspec_plus", 4, 50, tuple(LOCAL.items())),
    Setup("local", "pipeinfer", 3, 30, tuple(LOCAL.items())),
    Setup("local", "spd", 2, 10, tuple(LOCAL.items())),
    Setup("links", "flowspec_plus", 2, 10, tuple(LINKS.items())),
)


@dataclass(frozen=True)
class Fault:
    kind: str
    stages: tuple[int, ...]  # all, in the order in which they are struck
    tokens: int  # that clients get before it strikes
    hold_s: float  # how long a stop, a cut or a slow link lasts


# Silence counts as a loss after 5 s, a broken link after 8, a missing draft device after 15.
_HOLDS_S = ((0.1, 1.0), (0.1, 1.0), (1.0, 4.0), (4.0, 8.0), (8.0, 18.0))


@dataclass(frozen=True)
class Episode:
    """The faults of one server."""

    setup: Setup
    faults: tuple[Fault, ...]


def schedule(seed: int, faults: int, able: Collection[str], setups: Sequence[Setup] = SETUPS,
             longest_s: float = 18.0) -> list[Episode]:
    """Every setup gets its share, and at least one fault; every kind in ``able`` comes before any repeats.
    ``longest_s``: limit of ``hold_s``."""
    chance, episodes = random.Random(seed), []
    shares = sum(setup.share for setup in setups)
    for i, setup in enumerate(setups):
        left = faults - sum(len(episode.faults) for episode in episodes)
        count = left if i == len(setups) - 1 else max(1, round(faults * setup.share / shares))
        kinds = [*_kinds(chance, {kind: n for kind, n in setup.kinds if kind in able}, count)]
        # Leaks show in a draft device that lives long.
        kinds.sort(key=lambda kind: kind != "draft_kill")
        places = range(1, setup.stages + 1)
        episodes.append(Episode(setup, tuple(
            Fault(kind, tuple(chance.sample(places, setup.stages)), chance.choice((1, 10, 40)),
                  round(min(longest_s, chance.uniform(*chance.choice(_HOLDS_S))), 1)) for kind in kinds)))
    return episodes


def _kinds(chance: random.Random, shares: dict[str, int], count: int) -> Iterator[str]:
    once = chance.sample([*shares], len(shares))[:count]
    more = chance.choices([*shares], [*shares.values()], k=count - len(once))
    mixed = once + more
    chance.shuffle(mixed)
    yield from mixed

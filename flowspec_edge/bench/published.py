"""The FlowSpec paper's own figures, to be shown beside ours; the data are in ``published.toml``."""

from __future__ import annotations

from pathlib import Path

from flowspec_edge.config import Strict, load_toml

_PATH = Path(__file__).with_name("published.toml")
STAGES = 4  # of the paper's testbed


class Speed(Strict):
    """Tokens/s by strategy, mean over the paper's six tasks."""

    model: str
    profile: str
    temperature: float
    means: dict[str, float]


class Accepted(Strict):
    """Tokens per turn and per round by strategy, mean over four data sets."""

    model: str
    profile: str
    alt: dict[str, float]
    alr: dict[str, float]


class Published(Strict):
    """All of them, and where they were printed."""

    source: str
    speed: list[Speed]
    accepted: list[Accepted]

    def speeds(self, profile: str | None, stages: int, temperature: float) -> list[Speed]:
        """What the paper measured on the testbed that a profile describes; nothing for any other."""
        return [s for s in self.speed
                if (s.profile, STAGES, s.temperature) == (profile, stages, temperature)]

    def acceptances(self, profile: str | None, stages: int) -> list[Accepted]:
        """The same for table II."""
        return [a for a in self.accepted if (a.profile, STAGES) == (profile, stages)]


def load_published() -> Published:
    """The figures that come with the package."""
    return load_toml(_PATH, Published)

"""The FlowSpec paper's own figures, to be shown beside ours; the data are in ``published.toml``."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

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


class BandwidthCurves(Strict):
    """Tokens/s by strategy, a figure for each of ``mbps``."""

    source: str
    model: str
    profile: str
    temperature: float
    mbps: list[float]
    tokens_per_second: dict[str, list[float]]

    @model_validator(mode="after")
    def _is_whole(self) -> BandwidthCurves:
        if any(len(speeds) != len(self.mbps) for speeds in self.tokens_per_second.values()):
            raise ValueError("every strategy needs a figure for each of mbps")
        return self

    def curve(self, strategy: str) -> dict[float, float]:
        """Mbps to tokens/s; empty for a strategy that the paper did not measure."""
        return dict(zip(self.mbps, self.tokens_per_second.get(strategy, ()), strict=False))


class DepthCell(Strict):
    """Tokens/s at one pair of tree depths."""

    depth: int
    expand_depth: int
    tokens_per_second: float


class DepthCells(Strict):
    """The best and the worst pair of tree depths of a grid."""

    source: str
    model: str
    profile: str
    strategy: str
    best: DepthCell
    worst: DepthCell


class Published(Strict):
    """All of them, and where they were printed; ``source`` is that of ``speed`` and ``accepted``."""

    source: str
    speed: list[Speed]
    accepted: list[Accepted]
    bandwidth: list[BandwidthCurves]
    depth: list[DepthCells]

    def speeds(self, profile: str | None, stages: int, temperature: float) -> list[Speed]:
        """What the paper measured on the testbed that a profile describes; nothing for any other."""
        return [s for s in self.speed
                if (s.profile, STAGES, s.temperature) == (profile, stages, temperature)]

    def acceptances(self, profile: str | None, stages: int) -> list[Accepted]:
        """The same for table II."""
        return [a for a in self.accepted if (a.profile, STAGES) == (profile, stages)]

    def bandwidths(self, profile: str | None, stages: int, temperature: float) -> BandwidthCurves | None:
        """Figure 5, for the testbed that it was measured on."""
        return next((b for b in self.bandwidth
                     if (b.profile, STAGES, b.temperature) == (profile, stages, temperature)), None)

    def depths(self, profile: str | None, stages: int) -> DepthCells | None:
        """Figure 6, for the testbed that it was measured on."""
        return next((d for d in self.depth if (d.profile, STAGES) == (profile, stages)), None)


def load_published() -> Published:
    """The figures that come with the package."""
    return load_toml(_PATH, Published)

"""The papers' own figures, from ``paper_results.toml``."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from flowspec_edge.util.tomlfile import StrictModel, load_toml

_PATH = Path(__file__).with_name("paper_results.toml")
STAGES = 4  # of the paper's testbed


class PaperSpeed(StrictModel):
    """Tokens/s by strategy, mean over the paper's six tasks (table I)."""

    model: str
    profile: str
    temperature: float
    means: dict[str, float]


class PaperAcceptance(StrictModel):
    """Tokens per turn and per round by strategy, mean over four data sets (table II)."""

    model: str
    profile: str
    alt: dict[str, float]
    alr: dict[str, float]


class BandwidthCurves(StrictModel):
    """Tokens/s by strategy, a figure for each of ``mbps`` (figure 5)."""

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


class DepthCell(StrictModel):
    """Tokens/s at one pair of tree depths."""

    depth: int
    expand_depth: int
    tokens_per_second: float


class DepthCells(StrictModel):
    """The best and the worst pair of tree depths of a grid (figure 6)."""

    source: str
    model: str
    profile: str
    strategy: str
    best: DepthCell
    worst: DepthCell


class PaperRatio(StrictModel):
    """The range over tasks of a method's speed over another's (PipeDec)."""

    source: str
    profile: str
    strategy: str
    over: str
    stages: int
    lowest: float
    highest: float


class AcceptanceLengths(StrictModel):
    """n N / K by stages (SPD)."""

    source: str
    model: str
    stages: list[int]
    lengths: list[float]


class PaperResults(StrictModel):
    """A paper's figures; ``source`` is that of ``speed`` and ``accepted``."""

    source: str
    speed: list[PaperSpeed]
    accepted: list[PaperAcceptance]
    bandwidth: list[BandwidthCurves]
    depth: list[DepthCells]
    ratio: list[PaperRatio]
    acceptance_length: list[AcceptanceLengths]

    def speeds(self, profile: str | None, stages: int, temperature: float) -> list[PaperSpeed]:
        """Return the paper's figures for the testbed that ``profile`` describes; empty for any other."""
        return [s for s in self.speed
                if (s.profile, STAGES, s.temperature) == (profile, stages, temperature)]

    def acceptances(self, profile: str | None, stages: int) -> list[PaperAcceptance]:
        return [a for a in self.accepted if (a.profile, STAGES) == (profile, stages)]

    def bandwidths(self, profile: str | None, stages: int, temperature: float) -> BandwidthCurves | None:
        return next((b for b in self.bandwidth
                     if (b.profile, STAGES, b.temperature) == (profile, stages, temperature)), None)

    def depths(self, profile: str | None, stages: int) -> DepthCells | None:
        return next((d for d in self.depth if (d.profile, STAGES) == (profile, stages)), None)


def load_paper_results() -> PaperResults:
    return load_toml(_PATH, PaperResults)

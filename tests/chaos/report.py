"""What a chaos run found."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Report:
    """
    recovery    seconds between a fault and the whole answer to a short request that was asked then, by kind
    answers     that were compared, by strategy, temperature and transport
    refusals    errors that told a client to try again
    violations  what must not happen
    held        what a server at rest holds at its end, by server
    growth      the same, minus what it held after its first faults
    """

    seed: int
    recovery: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    growth: dict[str, dict[str, float]] = field(default_factory=dict)
    held: dict[str, dict[str, float]] = field(default_factory=dict)
    longest_s: float = 0.0

    def recovered(self, kind: str, seconds: float) -> None:
        self.recovery[kind].append(seconds)

    @property
    def faults(self) -> int:
        return sum(map(len, self.recovery.values()))

    def table(self) -> dict[str, dict[str, float]]:
        return {kind: {"count": len(seconds), "p50_s": _quantile(seconds, 0.5),
                       "p95_s": _quantile(seconds, 0.95), "max_s": round(max(seconds), 2)}
                for kind, seconds in sorted(self.recovery.items())}

    def to_json(self) -> dict[str, Any]:
        return {"seed": self.seed, "faults": self.faults, "answers": sum(self.answers.values()),
                "recovery": self.table(), "longest_request_s": round(self.longest_s, 2),
                "answers_by_kind": dict(sorted(self.answers.items())),
                "refusals": dict(self.refusals.most_common()), "held": self.held, "growth": self.growth,
                "violations": self.violations}

    def text(self) -> str:
        lines = [f"{'fault':20} {'count':>5} {'p50':>7} {'p95':>7} {'max':>7}  seconds"]
        lines += [f"{kind:20} {row['count']:5} {row['p50_s']:7.2f} {row['p95_s']:7.2f} {row['max_s']:7.2f}"
                  for kind, row in self.table().items()]
        lines += [f"{self.faults} faults, {sum(self.answers.values())} answers compared, longest request "
                  f"{self.longest_s:.1f} s, {sum(self.refusals.values())} tries repeated, "
                  f"{len(self.violations)} violations"]
        for server, grown in self.growth.items():
            held = ", ".join(f"{name} {self.held[server][name]:.4g} ({more:+g})"
                             for name, more in grown.items())
            lines.append(f"{server} at its end, and more than after its first faults: {held}")
        return "\n".join([*lines, *self.violations])

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def _quantile(seconds: list[float], share: float) -> float:
    return round(float(np.quantile(seconds, share)), 2)

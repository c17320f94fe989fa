"""Models for the runtime's tests, tiny random ones and the demonstration model; and a stage's loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from flowspec_edge.device_profile import DraftCost, LinkCost, LmHeadCost, Profile, StageCurve, load_profile
from flowspec_edge.drivers.stage.parts import Charge
from flowspec_edge.drivers.stage.sd_notify import Notifier
from flowspec_edge.messages import Cancel, Shutdown
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard
from kits.memory_links import MemoryTransport
from kits.tiny_model_dir import tiny_head, tiny_spd
from kits.tiny_models import tiny_llama
from kits.worker_thread import HeldEngine, Stage, Start

__all__ = ["demo_model", "demo_prompts", "eight_layers", "ideal_profile", "oracle_draft_model", "real",
           "small_vocabulary_model", "start", "tiny_head", "tiny_model", "untrained_draft_model", "worker_model"]


def _tiny(path: Path, layers: int) -> Path:
    tiny_llama(path / "target", layers=layers, vocab=97)
    tiny_head(path / "eagle2", vocab=97)
    tiny_llama(path / "draft-lm", layers=1, hidden=32, vocab=97, seed=2)
    tiny_spd(path)
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, 97 tokens, a random head that is right now and then."""
    return _tiny(tmp_path_factory.mktemp("tiny"), 4)


@pytest.fixture(scope="session")
def eight_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a layer for each of up to eight stages."""
    return _tiny(tmp_path_factory.mktemp("eight"), 8)


@pytest.fixture(scope="session")
def small_vocabulary_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers and 8 tokens: small enough to count how often each text comes."""
    path = tmp_path_factory.mktemp("small")
    tiny_llama(path / "target", layers=2, hidden=32, vocab=8)
    tiny_head(path / "eagle2", vocab=8, hidden=32)
    tiny_llama(path / "draft-lm", layers=1, hidden=32, vocab=8, seed=2)
    tiny_spd(path, layers=1)
    return path


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return resolve_model("demo").path


@pytest.fixture(scope="session")
def oracle_draft_model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """The demonstration target drafting for itself: every draft is right."""
    path = tmp_path_factory.mktemp("oracle")
    for part in ("target", "draft-lm"):
        (path / part).symlink_to(demo_model / "target")
    return path


@pytest.fixture(scope="session")
def untrained_draft_model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """The demonstration target with a random draft model: hardly a draft is right."""
    path = tmp_path_factory.mktemp("untrained")
    (path / "target").symlink_to(demo_model / "target")
    tiny_llama(path / "draft-lm", layers=1, hidden=32, vocab=4096, seed=3)
    return path


@pytest.fixture(scope="session")
def demo_prompts(demo_model: Path) -> list[list[int]]:
    """The demonstration model's held-out prompts."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model / "target")
    lines = (demo_model / "prompts.jsonl").read_text().splitlines()
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


@pytest.fixture(scope="session")
def worker_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of two layers, for a stage of its own."""
    return tiny_llama(tmp_path_factory.mktemp("worker"), layers=2, hidden=32)


@pytest.fixture
def real(worker_model: Path) -> StageEngine:
    """The engine of the first of two stages."""
    return StageEngine(load_shard(worker_model, 0, 1, "fp32"))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a stage's loop over in-memory links; those that go on are ended."""
    stages: list[Stage] = []

    def make(engine: StageEngine | HeldEngine, data_queue: int = 8, notifier: Notifier | None = None,
             charge: Charge | None = None, **changes: object) -> Stage:
        stages.append(Stage(engine, MemoryTransport(data_queue=data_queue), changes, notifier, charge))
        return stages[-1]

    yield make
    for stage in stages:
        if stage.thread.is_alive():
            stage.tell(Cancel(1, 0, tuple(range(100))))
            stage.tell(Shutdown("the test is over"))
            stage.ended()


@pytest.fixture(scope="session")
def ideal_profile() -> Profile:
    """Four layers a second whatever the rows, and nothing but the stages takes time."""
    p = load_profile("paper-7b")
    return p.model_copy(update={
        "name": "ideal",
        "stage": StageCurve(layers=4, rows=[1], ms=[1000]),
        "draft": DraftCost(pass_ms=0, lm_pass_ms=0, spd_pass_ms=0),
        "lm_head": LmHeadCost(ms=0),
        "link": LinkCost(mbps=1e12, latency_ms=0),
    })

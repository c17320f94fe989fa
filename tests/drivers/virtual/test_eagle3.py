"""EAGLE-3 in whole runs: the tokens of plain decoding, and states that are the target's own.

Eight layers, so the states are those after 2, 4 and 5: over 1 to 5 stages these are states inside a
stage, at the end of one and at the start of the next, and two of one stage.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from kits.cases import DISTINCT
from kits.draft_heads import VARIANTS, published_eagle3
from kits.requests import text
from kits.tiny_model_dir import tiny_eagle3
from kits.tiny_models import tiny_llama
from kits.transformers_generate import captured_states
from kits.virtual_clusters import PROFILE, cluster

from flowspec_edge.d0.request import Request, Stats
from flowspec_edge.drafting.checkpoint import HeadFiles
from flowspec_edge.drafting.eagle.eagle3 import Eagle3Drafter
from flowspec_edge.drafting.eagle.eagle3_formats import head3_config, head3_layers
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.links import wire_bytes
from flowspec_edge.drivers.virtual.run import VirtualRun
from flowspec_edge.messages import Close, Payload
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES

CAPTURED = (2, 4, 5)
GREEDY, SAMPLED = Sampling(), Sampling(1.0, seed=11)
DRAFTING = [name for name, chosen in STRATEGIES.items()
            if chosen.drafts_with(Params(draft="eagle3")) == "eagle3" and chosen.parallelism == "pipeline"]
PROMPT = [(11 * i + 5) % 97 for i in range(21)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and an EAGLE-3 head that can name two thirds of its tokens; nothing else."""
    path = tmp_path_factory.mktemp("eagle3")
    tiny_llama(path / "target", layers=8, hidden=32, vocab=97)
    tiny_eagle3(path, drafted=64)
    return path


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What drafters in this process take their text rows from, in order."""
    seen: list[torch.Tensor] = []
    original = Eagle3Drafter._text_states

    def record(self: Eagle3Drafter, features: Payload, rows: list[int]) -> torch.Tensor:
        seen.append(original(self, features, rows))
        return seen[-1]

    monkeypatch.setattr(Eagle3Drafter, "_text_states", record)
    return seen


def same_tokens_and_states(path: Path, stages: int, request: Request, known: list[torch.Tensor],
                           captured: tuple[int, ...] = CAPTURED) -> Stats:
    """Returns what the run was like."""
    known.clear()
    expected = text(path, tuple(request.prompt), request.max_new_tokens, request.sampling)
    result = cluster(path, stages).generate(request)
    assert result.tokens == expected, f"{request.strategy}, {stages} stages"
    whole = (*request.prompt, *expected)
    taken = torch.cat(known)[: len(whole) - 1]  # what is accepted past the limit is taken, too
    assert len(taken) >= len(whole) - 1 - 1
    torch.testing.assert_close(taken, captured_states(path, whole, captured)[: len(taken)], atol=1e-4, rtol=1e-4)
    return result.stats


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_published_variant_drafts_losslessly(model: Path, tmp_path: Path, known: list[torch.Tensor],
                                                   variant: str) -> None:
    shutil.copytree(model / "target", tmp_path / "target")
    published_eagle3(tmp_path / "eagle3", 3, 32, 97, **{**VARIANTS[variant], "max_position_embeddings": 256})
    head = head3_config(HeadFiles(tmp_path / "eagle3"))
    at = list(VARIANTS).index(variant)
    odd, name = at % 2, ("flowspec", "flowspec_plus")[at // 2 % 2]
    request = Request(PROMPT, name, 10, SAMPLED if odd else GREEDY,
                      Params(draft="eagle3", segment=4, width=4, tree_size=12, depth=3, prefill_chunk=8))
    stats = same_tokens_and_states(tmp_path, 2 + odd, request, known,
                                   head3_layers(tmp_path / "eagle3", head, 8))
    assert stats.drafted > 0


@pytest.mark.parametrize(("name", "stages"), [
    (name, stages) for i, name in enumerate(DRAFTING) for stages in range(1, 6)
    if stages == i % 5 + 1 or (name in DISTINCT and stages == (i + 2) % 5 + 1)])
def test_tokens_of_plain_decoding_and_states_of_the_target(model: Path, known: list[torch.Tensor], name: str,
                                                           stages: int) -> None:
    params = Params(draft="eagle3", segment=(1, 3, 16)[stages % 3], width=4, tree_size=12, depth=3,
                    prefill_chunk=(1, 8, 64)[stages % 3], pipedec_width=5, pearl_gamma=2,
                    stpp_branching="1,3,1")
    sampling = (GREEDY, SAMPLED)[(stages // 2 + DRAFTING.index(name)) % 2]
    stats = same_tokens_and_states(model, stages, Request(PROMPT, name, 8, sampling, params), known)
    assert stats.accepted > 0 or sampling is GREEDY or name not in ("flowspec", "chunk_pp", "pruned_pp")


@pytest.mark.parametrize("name", ["flowspec", "pipeinfer"])
def test_stages_without_tapped_layers_are_not_waited_for(model: Path, known: list[torch.Tensor],
                                                         name: str) -> None:
    request = Request(PROMPT, name, 8, SAMPLED, Params(draft="eagle3", tree_size=12, width=4))
    same_tokens_and_states(model, 11, request, known)


def test_cancelled_runs_come_out_without_their_taps(model: Path, known: list[torch.Tensor]) -> None:
    params = Params(draft="eagle3", pipeinfer_accept=0.0, pipeinfer_recovery=0.0)
    stats = same_tokens_and_states(model, 4, Request(PROMPT, "pipeinfer", 8, GREEDY, params), known)
    assert sum(stage["cancelled"] for stage in stats.stages) > 0


def test_the_head_stands_in_for_one_of_eagle_2(model: Path, known: list[torch.Tensor]) -> None:
    stats = same_tokens_and_states(model, 3, Request(PROMPT, "flowspec", 8, SAMPLED), known)
    assert stats.accepted > 0


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_texts_past_a_heads_limit_go_on(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    """32 rows are all that the head sees; the prompt alone has more."""
    shutil.copytree(tiny_model, tmp_path / "model")
    path = tmp_path / "model"
    if kind == "eagle3":
        tiny_eagle3(path, drafted=64, max_positions=32)
    else:
        file = path / kind / "config.json"
        file.write_text(file.read_text().replace('"max_position_embeddings": 2048',
                                                 '"max_position_embeddings": 32'))
    prompt = PROMPT * 2
    request = Request(prompt, "flowspec", 12, SAMPLED, Params(draft=kind, tree_size=12, width=4))  # type: ignore[arg-type]
    drafting = VirtualCluster(path, 2, PROFILE)
    result = drafting.generate(request)
    assert result.tokens == text(path, tuple(prompt), 12, SAMPLED)
    assert result.stats.accepted > 0
    drafter = drafting._model.sessions._drafter(kind, request.params)
    assert drafter._cache.shape.kind.window == 32  # type: ignore[attr-defined]


def test_taps_are_weighed_on_their_stages_link(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the width of the profile's model, 4096 values of 2 bytes, straight to D0."""
    runs: list[VirtualRun] = []
    original = VirtualRun.run
    monkeypatch.setattr(VirtualRun, "run", lambda self: (runs.append(self), original(self))[1])
    request = Request(PROMPT, "speculative", 6, GREEDY, Params(draft="eagle3"))
    result = cluster(model, 4).generate(request)
    rows, segments = result.stats.stages[0]["rows"], result.stats.stages[0]["segments"]
    for link, holds in zip(runs[0]._taps, (1, 1, 1, 0), strict=True):  # after 2, 4, 5 of 8 layers
        assert holds * rows * 8192 <= link.bytes <= holds * (rows * 8192 + segments * 400 + rows * 8)
    every = (*runs[0]._data, *runs[0]._control, *runs[0]._taps, runs[0]._back)
    closing = 4 * wire_bytes(Close(1), PROFILE)  # after the text was complete
    assert result.stats.bytes == sum(link.bytes for link in every) - closing


def test_processes_give_the_same_tokens(model: Path) -> None:
    with open_cluster(ClusterSpec(model, 2, threads=1)) as clusters:
        for name, sampling in (("flowspec", SAMPLED), ("pipeinfer", GREEDY)):
            result = clusters.generate(Request(PROMPT, name, 12, sampling, Params(draft="eagle3")))
            assert result.tokens == text(model, tuple(PROMPT), 12, sampling)

"""Candidate heads against float64 formulas, and what they may and may not change."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kits.draft_heads import rescored
from kits.sharded_models import cut
from kits.torch_devices import needs_cuda

from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drafting.candidates import CandidateHead, principal, sample_states
from flowspec_edge.drafting.load import load_drafters
from flowspec_edge.drafting.tree_cache import CacheShape
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import UsageError
from flowspec_edge.model.candidates import Candidates, candidates_for, default_count
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.model.output_head import MatrixRows, OutputHead, as_output_head
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.sharding.plan import recipe_for
from flowspec_edge.sharding.source import open_source
from flowspec_edge.stage.layers.kinds import KeysValues
from flowspec_edge.stage.quant.schemes import scheme
from flowspec_edge.stage.shard import find_embedding, load_lm_head
from flowspec_edge.strategies.params import Params
from flowspec_edge.util.resources import resource_dir

H, V, N = 32, 400, 5


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks(weight: torch.Tensor, *sizes: int) -> OutputHead:
    return OutputHead([MatrixRows(part) for part in weight.split(sizes)], weight.shape[1], weight.dtype, weight.device)


def test_the_best_tokens_are_candidates_with_exact_logits() -> None:
    """Against numpy in float64, over an lm_head in three pieces."""
    weight, states = drawn(V, H), drawn(N, H, seed=1)
    down, up = drawn(8, H, seed=2) / H**0.5, drawn(V, 8, seed=3)
    head = CandidateHead(blocks(weight.double(), 100, 250, 50), MatrixRows(down.double()), MatrixRows(up.double()), 24)
    got = head(states.double()).numpy()
    for row, state in zip(got, states.double().numpy(), strict=True):
        exact, low = weight.double().numpy() @ state, up.double().numpy() @ (down.double().numpy() @ state)
        np.testing.assert_allclose(row, rescored(low, exact, 24), rtol=1e-10, atol=1e-10)
        candidates = np.argsort(-low)[:24]
        best = np.argsort(-row)[:24]
        assert set(best[:20]) <= set(candidates)
        np.testing.assert_allclose(row[best[0]], exact[candidates].max())


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_quantised_matrix_are_those_of_its_product(kind: str, dtype: torch.dtype) -> None:
    how = scheme(kind)  # type: ignore[arg-type]
    linear = how.linear(256, 64, False, dtype)
    linear.fill(how.quantise(drawn(256, 64)))
    x, ids = drawn(N, 64, seed=1).to(dtype), torch.randint(256, (N, 16), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(linear.logits_at(x, ids), linear(x).gather(1, ids))
    assert linear.looks_up_rows == (dtype == torch.float32)  # the CPU's kernel has a layout of its own


@needs_cuda
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("columns", [64, 512, 5120])
def test_rows_of_a_gpus_layout_are_those_of_its_product(kind: str, columns: int) -> None:
    how = scheme(kind)  # type: ignore[arg-type]
    linear = how.linear(1024, columns, False, torch.bfloat16, "cuda")
    linear.fill(how.quantise(drawn(1024, columns)))
    x = drawn(N, columns, seed=1).to("cuda", torch.bfloat16)
    ids = torch.randint(1024, (N, 64), generator=torch.Generator().manual_seed(2)).cuda()
    torch.testing.assert_close(linear.logits_at(x, ids), linear(x).gather(1, ids), rtol=0.02, atol=0.02)


def demo_drafter(candidates: Candidates | None) -> tuple[object, torch.Tensor]:
    model = resolve_model()
    weight = load_lm_head(model, "fp32")
    embedding = find_embedding(model, "fp32", torch.device("cpu"))
    return load_drafters("eagle2", model, weight, embedding, "fp32", model.layers, candidates=candidates)(), weight


def test_a_head_makes_its_own_factor() -> None:
    """down's rows are orthonormal, up is lm_head on them, and with all of its states' directions nothing is lost."""
    drafter, weight = demo_drafter(Candidates(64, 32))
    made = drafter._logits  # type: ignore[attr-defined]
    down = made.down.weight.double()
    torch.testing.assert_close(down @ down.T, torch.eye(32, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(made.up.weight, weight @ made.down.weight.T, rtol=1e-4, atol=1e-4)
    again, _ = demo_drafter(Candidates(64, 32))
    assert torch.equal(again._logits.up.weight, made.up.weight)  # type: ignore[attr-defined]
    width = weight.shape[1]
    whole, _ = demo_drafter(Candidates(64, width))
    states = drawn(20, width)
    with torch.no_grad():
        torch.testing.assert_close(whole._logits(states), as_output_head(weight)(states),  # type: ignore[attr-defined]
                                   rtol=1e-3, atol=1e-3)


def test_the_factor_loses_as_little_of_the_states_as_can_be() -> None:
    """By Eckart and Young: what numpy's singular values leave over."""
    states = drawn(40, 64, seed=4) * torch.linspace(3, 0.1, 64)
    base = principal(states, 8).double()
    left = torch.linalg.norm(states.double() - states.double() @ base.T @ base)
    values = np.linalg.svd(states.double().numpy(), compute_uv=False)
    assert float(left) == pytest.approx(float(np.linalg.norm(values[8:])), rel=1e-5)


class Chained(torch.nn.Module):
    """A head whose output is the sum of all that it is given."""

    def __init__(self, embeddings: torch.Tensor) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding.from_pretrained(embeddings)
        self.config = SimpleNamespace(hidden_size=embeddings.shape[1])
        self.tokens: list[torch.Tensor] = []

    def cache_shape(self) -> CacheShape:
        return CacheShape(KeysValues(1, 1, 8), 1, torch.float32, torch.device("cpu"))

    def forward(self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, *_: object) -> torch.Tensor:
        self.tokens.append(tokens)
        return states + self.embed_tokens(tokens) + positions[..., None]


def test_a_head_goes_on_from_its_own_states_tokens_and_positions() -> None:
    head, lm_head = Chained(drawn(V, H, seed=5)), blocks(drawn(V, H), V)
    found = sample_states(head, lambda states, ranked: ranked(states), lm_head).view(-1, 32, H)
    steps = torch.stack([head.embed_tokens(tokens) + step for step, tokens in enumerate(head.tokens)])
    torch.testing.assert_close(found, steps.double().cumsum(0)[-len(found):].float(), rtol=1e-4, atol=1e-3)
    assert len({tuple(row) for row in torch.stack(head.tokens, 1).tolist()}) == 32  # each sequence is another text


def test_a_matrix_without_rows_is_read_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = resolve_model()
    weight = load_lm_head(model, "fp32")
    how = scheme("int8")
    packed = how.linear(*weight.shape, False, torch.bfloat16)
    packed.fill(how.quantise(weight))
    head = OutputHead([packed], weight.shape[1], torch.bfloat16, torch.device("cpu"))
    embedding = find_embedding(model, "bf16", torch.device("cpu"))
    drafter = load_drafters("eagle2", model, head, embedding, "bf16", model.layers, candidates=Candidates(64, 32))()
    assert drafter._logits is head  # type: ignore[attr-defined]
    assert "no row of it can be looked up" in caplog.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_without_candidates(tmp_path: Path, temperature: float) -> None:
    """The option of sharding reaches D0, the drafts are its candidates', and the text is plain decoding's."""
    model = resolve_model()
    cut(model.path, tmp_path / "out", 2, "fp32", candidates=64)
    models = DraftModels(tmp_path / "out")
    assert models.drafter("eagle2")._logits.count == 64  # type: ignore[attr-defined]
    cluster = VirtualCluster(tmp_path / "out", 2, load_profile("paper-7b"))
    prompt = [7, 300, 41, 9, 1200]
    answers = {name: cluster.generate(Request(prompt, name, 24, Sampling(temperature, seed=3),
                                              Params(draft="eagle2", ngram=False))) for name in
               ("autoregressive", "flowspec", "flowspec_plus")}
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 1
    assert answers["flowspec"].stats.alr > 1


def test_the_manifest_counts_the_factor(tmp_path: Path) -> None:
    model = resolve_model()
    parts = [cut(model.path, tmp_path / f"{count}", 2, "fp16", candidates=count).parts["draft"] for count in (0, 64)]
    made = DraftModels(tmp_path / "64", "fp16").drafter("eagle2")._logits  # type: ignore[attr-defined]
    held = [made.up.weight, made.down.weight]
    # The demonstration has two heads of this kind, each with a factor of its own.
    assert parts[1].weight_bytes - parts[0].weight_bytes == 2 * sum(t.nbytes for t in held)
    assert [file.size for file in parts[0].files] == [file.size for file in parts[1].files]  # made on D0


def test_how_many_there_are() -> None:
    assert (default_count(32_000), default_count(248_320)) == (0, 128)
    assert candidates_for(0, 248_320, 5120) is None
    assert candidates_for(8, 248_320, 5120) is None
    assert candidates_for(100, 248_320, 5120) == Candidates(104, 256)  # whole tiles of a GPU's layout
    assert candidates_for(64, 4096, 100) == Candidates(64, 32)
    assert candidates_for(64, 255, 5120) is None


def test_options_that_do_not_go_together() -> None:
    source = open_source(str(resource_dir("models") / "demo"), [])
    assert recipe_for(source).candidates == 0  # a small vocabulary
    assert recipe_for(source, candidates=64).candidates == 64
    for wrong in (8, 4000):
        with pytest.raises(UsageError, match=f"--candidates {wrong} does not go with an lm_head of 4096 x"):
            recipe_for(source, candidates=wrong)

"""The report on a GPU: run on every device that is there, on wrong results, and its judgement of tokens."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.int4_matrices import DEVICES
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.boards.doctor.gpu_report import check_gpu
from flowspec_edge.boards.gpu_check import operation_check
from flowspec_edge.boards.gpu_check.computations import Computation, ComputationResult, attempt
from flowspec_edge.boards.probe import checks as table
from flowspec_edge.boards.probe.checks import CHECKS
from flowspec_edge.boards.probe.compute_rules import ComputeDevice, computed
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.d0.request import Request, Result
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import UsageError
from flowspec_edge.lab import token_check
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.lab.token_check import PROMPTS, judge, token_checks, token_kinds
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.sampling import sampler
from flowspec_edge.sampling.rule import Sampling, gumbel, log_probs


def operation(name: str, device: str = "cpu") -> Finding:
    """Computed in this process."""
    [check] = [check for check in CHECKS if check.name == name and "operations" in check.scopes]
    it = ComputeDevice(device)
    return next(iter(check.rule(replace(it, results={one.name: attempt(one) for one in check.computes(it)}))))


def compared(kind: str, model: Path, device: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> Finding:
    return computed(attempt(Computation(kind, f"{token_check.__name__}:compare", {
        "kind": kind, "model": str(model), "device": device, "prompts": prompts, "new_tokens": new_tokens})))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=4, hidden=32)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_all_is_right_here(model: Path, device: str) -> None:
    """In real processes; fp32 alone, since a random model's logits nearly tie all the time."""
    found = check_gpu(token_checks(resolve_model(model), 6, ["fp32"]), device)
    assert {check.check: check.found for checks in found.checks.values() for check in checks
            if check.state == "failed"} == {}
    assert found.ok
    assert {"sdpa fp16", "noise", "embedding"} < {check.check for check in found.checks["operations"]}
    assert ("graph" in {check.check for check in found.checks["operations"]}) == (device == "cuda")
    assert {check.found for check in found.checks["tokens"]} == {"12 tokens, the same"}
    told = found.as_json()
    assert told["ok"] is True
    assert [check["name"] for check in told["checks"] if check["group"] == "tokens"] == list(
        token_kinds(["fp32"]))


@pytest.mark.soak
@pytest.mark.parametrize("device", DEVICES)
def test_the_demonstration_model_in_every_type(device: str) -> None:
    """What the command runs."""
    assert check_gpu(token_checks(resolve_model("demo")), device).ok


@pytest.mark.parametrize(("name", "function", "wrong"), [
    ("rms_norm fp16", "rms_norm", lambda x, *rest: x),
    ("rms_norm fp32", "rms_norm", lambda x, *rest: 1.001 * torch.rms_norm(x, *rest)),
    ("sdpa fp32", "scaled_dot_product_attention", lambda q, k, v, attn_mask: v[:, :, :1].expand_as(q)),
    ("embedding", "embedding", lambda tokens, table: table[tokens.flip(0)])])
def test_a_wrong_result_is_found(name: str, function: str, wrong: object, monkeypatch: pytest.MonkeyPatch
                                 ) -> None:
    assert operation(name).ok
    monkeypatch.setattr(operation_check.F, function, wrong)
    found = operation(name)
    assert not found.ok
    assert "wrong" in found.found


@pytest.mark.parametrize(("name", "function"), [("noise", "device_words"), ("sampling", "choose")])
def test_noise_and_tokens_of_another_seed_are_found(name: str, function: str, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    module, ordinary = sampler, getattr(sampler, function)
    assert operation(name) == Finding(name, "ok", error=0.0)

    def other(first: object, positions: object, last: object, *device: object) -> object:
        if name == "noise":
            return ordinary(8, positions, last, *device)
        assert isinstance(last, Sampling)
        return ordinary(first, positions, replace(last, seed=8))

    monkeypatch.setattr(module, function, other)
    found = operation(name)
    assert not found.ok
    assert "values are wrong" in found.found


def plain(model: Path, prompt: list[int], sampling: Sampling) -> list[int]:
    return PlainDecoder(model).generate(prompt, 12, sampling)[0]


@pytest.mark.parametrize("name", token_check.SAMPLINGS)
def test_a_wrong_token_is_found(model: Path, name: str) -> None:
    """Against transformers' own decoding, to the token."""
    sampling, prompt = token_check.SAMPLINGS[name], [5, 17, 42]
    tokens = plain(model, prompt, sampling)

    def judged(text: list[int]) -> tuple[list[int], int | None]:
        logits = token_check._logits(model, "fp32", [*prompt, *text])[len(prompt) - 1 : -1]
        return judge(logits, len(prompt) - 1, text, sampling, 1e-4)

    assert judged(tokens) == (tokens, None)
    changed = [*tokens[:7], (tokens[7] + 1) % 61, *tokens[8:]]
    assert judged(changed)[1] == 7


@pytest.mark.parametrize("dtype", token_check.DTYPES)
def test_a_cluster_that_writes_one_other_token_fails(model: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
                                                     ) -> None:
    ordinary = token_check._cluster

    class Altering:
        def __init__(self, cluster: VirtualCluster) -> None:
            self.cluster = cluster

        def generate(self, request: Request) -> Result:
            found = self.cluster.generate(request)
            logits = token_check._logits(model, dtype, [*request.prompt, *found.tokens])
            behind = (logits[-2].max() - logits[-2]) / logits.std()
            other = int(np.where(behind > 0.1, behind, np.inf).argmin())  # the next that is no near tie
            return replace(found, tokens=[*found.tokens[:-1], other])

    kind, prompts = f"{dtype} autoregressive greedy", [[5, 17, 42]]
    assert compared(kind, model, "cpu", prompts, 4).ok
    monkeypatch.setattr(token_check, "_cluster", lambda *arguments: Altering(ordinary(*arguments)))
    found = compared(kind, model, "cpu", prompts, 4)
    assert not found.ok
    assert found.found.startswith("token 4 after a prompt of 3 is ")
    assert found.found.endswith(", which is no near tie")


def test_a_check_computes_on_its_device(model: Path) -> None:
    assert not compared("fp32 autoregressive greedy", model, "cuda:99", [[5]], 2).ok


@examples(60, quick=24)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.sampled_from(
    [Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=4, seed=4)]))
def test_near_ties(seed: int, near: float, sampling: Sampling) -> None:
    """Every token of a row, by the definition: how far its score is behind the best, within the kept ones."""
    logits = np.random.default_rng(seed).standard_normal((1, 9)).astype(np.float32)
    slack, position = near * float(logits.std()), 11
    for token in range(9):
        raised = logits.astype(np.float64).copy()
        raised[0, token] += slack
        if sampling.greedy:
            behind = float(np.delete(logits, token).max() - raised[0, token])
        else:
            scores = log_probs(raised, sampling)[0] + gumbel(sampling.seed, position + 1, 9)
            behind = float(np.delete(scores, token).max() - scores[token])
        if abs(behind) < 1e-5:
            continue
        firsts, wrong = judge(logits, position, [token], sampling, near)
        assert (wrong is None) == (behind < 0 or firsts == [token])


def test_nf4_on_an_orin_is_not_advised() -> None:
    """Results as on a board: the products work, and still models should not be sharded so for it."""
    orin = ComputeDevice("cuda", (8, 7), bitsandbytes=True)
    products = [check for check in CHECKS if "products" in check.scopes]
    done = {one.name: ComputationResult(one.name, 1e-3, "fp16") for check in products for one in check.computes(orin)}
    found = {finding.check: finding for check in products for finding in check.rule(replace(orin, results=done))}
    assert {finding.state for finding in found.values()} == {"ok"}
    assert "shard in int4" in found["nf4, fp16 activations"].found
    assert found["int4, bf16 activations"].found == ""
    without = [finding for check in products for finding in check.rule(replace(orin, bitsandbytes=False))]
    assert [(finding.check, finding.state) for finding in without] == [("nf4", "skipped"), ("fp4", "skipped")]


def test_every_check_runs_on_the_given_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """"cpu:0" is any machine's CPU, but not the name that a forgotten device would have."""
    asked: list[Computation] = []

    def told(computed: Sequence[Computation]) -> dict[str, ComputationResult]:
        asked.extend(computed)
        return {one.name: ComputationResult(one.name) for one in computed}

    monkeypatch.setattr(table, "compute", told)
    checks = token_checks(resolve_model(model), 5, ["fp16"])
    assert check_gpu(checks, "cpu:0").device == "cpu:0"
    assert {one.arguments["device"] for one in asked} == {"cpu:0"}
    assert {one.arguments["dtype"] for one in asked if one.name.startswith("int4")} == {"fp16", "bf16"}
    last = asked[-len(checks):]
    assert tuple(one.name for one in last) == token_kinds(["fp16"])
    assert {(one.arguments["new_tokens"], one.arguments["model"], len(one.arguments["prompts"])) for one in last} == {
        (5, str(model), len(PROMPTS))}


def test_a_computation_of_every_check_exists() -> None:
    """By name: a function is looked up in a child process."""
    device = ComputeDevice("cuda", (8, 7), bitsandbytes=True, available=10**9)
    for check in CHECKS:
        for one in check.computes(device) if check.asks is ComputeDevice else ():
            assert callable(getattr(importlib.import_module(one.module), one.function.partition(":")[2])), one


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="no cuda:99 here: "):
        check_gpu((), "cuda:99")

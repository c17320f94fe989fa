"""The parts of a measurement, with real workers and requests; no figure is expected to be fast."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tiny_dir import tiny_model_dir

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.measure_d0 import MadeUpTarget, MeasuredDevice0, WholeTarget, measure_device0
from flowspec_edge.fleet.measure_profile import QUICK, Wish, measure_profile
from flowspec_edge.fleet.measure_stage import ROWS, Case, StageProcess, choose_cuts, sample
from flowspec_edge.fleet.memory import model_bytes
from flowspec_edge.modeldir import resolve_model
from flowspec_edge.runtime.plain import PlainDecoder
from flowspec_edge.sampling import Sampling
from flowspec_edge.transport.zmq_links import ZmqTransport


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("measured"))


def test_a_request_is_the_one_that_a_cluster_would_run(model: Path) -> None:
    kinds = ["eagle2", "lm", "spd"]
    target = WholeTarget(model / "target", "fp32", "cpu")
    device0 = MeasuredDevice0(model, "fp32", "cpu", kinds, target)
    prompt = [5, 17, 44, 3, 80, 200]
    for kind in (*kinds, None):
        device0.run(kind, prompt, 12)
        plain, _ = PlainDecoder(model, "fp32").generate(prompt, 12, Sampling(), frozenset())
        assert device0.tokens == plain
    times = measure_device0(device0, kinds, prompt, 12, 2, True, lambda share: None)
    assert set(times.passes) == set(kinds)
    assert min(*times.passes.values(), times.lm_head, times.bookkeeping) > 0


def test_processor_time_of_a_request_is_what_the_system_counted(model: Path) -> None:
    device0 = MeasuredDevice0(model, "fp32", "cpu", [], WholeTarget(model / "target", "fp32", "cpu"))
    prompt = list(range(40))
    device0.run(None, prompt, 40)
    before = time.thread_time()
    tally = device0.run(None, prompt, 40, time.thread_time)
    spent = time.thread_time() - before
    assert len(tally.books) == len(tally.own_head) == len(tally.head) == 39
    assert 0 < sum(tally.books) + sum(tally.own_head) + sum(tally.head) < spent


def test_a_target_that_does_not_fit_is_made_up(model: Path) -> None:
    device0 = MeasuredDevice0(model, "fp32", "cpu", ["eagle2"], MadeUpTarget(64, torch.float32))
    times = measure_device0(device0, ["eagle2"], [5, 6, 7], 6, 1, False, lambda share: None)
    assert times.passes["eagle2"] > 0


def test_a_stage_that_fails_says_why(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "target"
    broken.mkdir()
    for file in (model / "target").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with ExitStack() as undo:
        transport = ZmqTransport()
        undo.callback(transport.close)
        stage = StageProcess(transport, undo, broken, 2, "fp32", "cpu", 1)
        with pytest.raises(FlowspecError, match="started to be measured"):
            stage.ready()


def test_longer_segments_and_texts_reach_the_stage(model: Path) -> None:
    with ExitStack() as undo:
        transport = ZmqTransport()
        undo.callback(transport.close)
        stage = StageProcess(transport, undo, model / "target", 4, "fp32", "cpu", 1)
        stage.ready()
        assert stage.layers == 1
        shares: list[float] = []
        times = sample([stage], [3, 130], 0.05, shares.append)
        assert set(times) == {Case(1, rows, context) for rows in ROWS for context in (3, 130)}
        assert shares[-1] == 1.0
        assert (stage.resident_mb() or 0) > 50


@pytest.mark.parametrize(("layers", "usable_mb", "cuts"), [
    (8, 1e6, [2, 8]),  # V1 of 4 layers, and of 1
    (1, 1e6, [1]),
    (2, 1e6, [1, 2]),
    (32, 1e6, [2, 8]),
    (32, 5500, [11, 32]),  # three layers of 405 MB and one, beside embeddings
    (32, 1400, [32]),
])
def test_what_is_measured_fits_into_memory(layers: int, usable_mb: float, cuts: list[int],
                                           tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers,
        "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 4096}))
    size = model_bytes(str(tmp_path), "fp16")
    assert choose_cuts(size, usable_mb) == cuts


def test_not_even_a_layer_fits(model: Path) -> None:
    with pytest.raises(FlowspecError, match=r"a layer and the embeddings take .* MB, and only 0 MB"):
        choose_cuts(model_bytes(str(model), "fp32"), 0.01)


def test_no_gpu_here(model: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    asked = Wish("mine", resolve_model(model), "fp16", "cuda", 0, None, "")
    with pytest.raises(UsageError, match="finds no GPU; use --device cpu"):
        measure_profile(asked, QUICK, lambda what, share: None)

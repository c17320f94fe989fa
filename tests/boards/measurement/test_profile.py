"""The parts of a measurement, with real workers and requests; no figure is expected to be fast."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.boards.measurement.draft_device import (
    PLAIN,
    MeasuredDraftDevice,
    RequestTimes,
    WorkItem,
    measure_draft_device,
    summary,
)
from flowspec_edge.boards.measurement.fit import SegmentCase
from flowspec_edge.boards.measurement.stage import (
    ROWS,
    MeasuredStage,
    MeasuredWorker,
    choose_stage_counts,
    sample,
)
from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.draft_kinds import DRAFT_KINDS
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.transport.zmq_links import ZmqTransport


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("measured"))


@contextmanager
def worker(target: Path, stages: int) -> Iterator[MeasuredWorker]:
    with ExitStack() as cleanup:
        transport = ZmqTransport()
        cleanup.callback(transport.close)
        yield MeasuredWorker(transport, cleanup, target, stages, "fp32", "cpu", 1)


def test_measured_requests_decode_as_in_a_cluster(model: Path) -> None:
    kinds = ["eagle2", "lm", "spd"]
    prompt = [5, 17, 44, 3, 80, 200]
    plain, _ = PlainDecoder(model, "fp32").generate(prompt, 12, Sampling(1.0), frozenset())
    with worker(model / "target", 1) as target:
        target.ready()
        device0 = MeasuredDraftDevice(model, "fp32", "cpu", target)
        for kind in kinds:
            for strategy in DRAFT_KINDS[kind].measured_by:
                times = device0.run(strategy, prompt, 12)
                assert device0.tokens == plain
                assert {item.kind for item in times.items} == {"draft", "verify"}
        start = time.perf_counter()
        times = device0.run(PLAIN, prompt, 12)
        passed = time.perf_counter() - start
        assert device0.tokens == plain
        assert [(item.kind, item.size) for item in times.items] == [("verify", 1)] * 11
        assert 0 < sum(item.head_s for item in times.items) < times.seconds < passed
        times = measure_draft_device(device0, kinds, prompt, 12, 1, True, lambda share: None)
    assert set(times.passes) == set(kinds)
    # A fit to noisy times may find that one of a cost's two parts, the fixed one or a node's or row's, is 0.
    assert min(*(ms + times.node for ms in times.passes.values()), times.lm_head + times.row,
               times.bookkeeping) > 0
    assert min(*times.passes.values(), times.lm_head, times.row) >= 0


def test_the_summary_recovers_known_costs() -> None:
    """Passes of 2 and 3 ms and 0.1 a node; outputs of 0.5 ms, lm_head 0.7 and 0.01 a row, 0.02 in the books;
    0.3 ms an output for all else."""
    def request(draft_ms: float, nodes: list[int], rows: list[int]) -> RequestTimes:
        pieces = [WorkItem("draft", n, (draft_ms + 0.1 * n) / 1e3) for n in nodes]
        for r in rows:
            head = (0.7 + 0.01 * r) / 1e3 if r else 0.0
            pieces.append(WorkItem("verify", r, head + (0.5 + 0.02 * r) / 1e3, head))
        return RequestTimes(pieces, 0.3e-3 * len(rows))

    made = summary({"eagle2": [request(2, [1, 10, 10], [0, 5, 16, 41])],
                    "lm": [request(3, [1, 1], [1, 1, 5])], None: [request(0, [], [1] * 9)]}, True)
    assert made.passes == pytest.approx({"eagle2": 2, "lm": 3})
    assert (made.node, made.lm_head, made.row, made.bookkeeping) == pytest.approx((0.1, 0.7, 0.03, 0.8))


def test_first_layers_stand_in_for_a_large_target(model: Path) -> None:
    with worker(model / "target", 2) as first_layers:
        first_layers.ready()
        device0 = MeasuredDraftDevice(model, "fp32", "cpu", first_layers)
        times = measure_draft_device(device0, ["eagle2", "spd"], [5, 6, 7], 6, 1, False, lambda share: None)
    assert min(ms + times.node for ms in times.passes.values()) > 0  # as above
    assert min(times.passes.values()) >= 0
    assert set(times.passes) == {"eagle2", "spd"}


def test_a_failed_stage_reports_its_cause(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "target"
    broken.mkdir()
    for file in (model / "target").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with worker(broken, 2) as stage, pytest.raises(FlowspecError, match="stage under measurement"):
        stage.ready()


@pytest.mark.soak
def test_longer_segments_and_texts_reach_the_stage(model: Path) -> None:
    with ExitStack() as cleanup:
        transport = ZmqTransport()
        cleanup.callback(transport.close)
        stage = MeasuredStage(transport, cleanup, model / "target", 4, "fp32", "cpu", 1)
        stage.worker.ready()
        assert stage.layers == 1
        shares: list[float] = []
        times = sample([stage], [3, 130], 0.05, shares.append)
        assert set(times) == {SegmentCase(1, rows, context) for rows in ROWS for context in (3, 130)}
        assert shares[-1] == 1.0
        assert (stage.worker.resident_mb() or 0) > 50


@pytest.mark.parametrize(("layers", "usable_mb", "cuts"), [
    (8, 1e6, [2, 8]),  # V1 of 4 layers, and of 1
    (1, 1e6, [1]),
    (2, 1e6, [1, 2]),
    (32, 1e6, [2, 8]),
    (32, 5500, [8, 32]),  # four layers of 405 MB and one
    (32, 1400, [32]),
])
def test_measured_stages_fit_into_memory(layers: int, usable_mb: float, cuts: list[int],
                                         tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers,
        "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 4096}))
    size = model_bytes(str(tmp_path), "fp16")
    assert choose_stage_counts(size, usable_mb) == cuts


def test_error_if_not_even_a_layer_fits(model: Path) -> None:
    with pytest.raises(FlowspecError, match=r"a layer takes .* MB, and only 0 MB"):
        choose_stage_counts(model_bytes(str(model), "fp32"), 0.01)

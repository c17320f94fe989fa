"""From how many rows on a stage expands int4 weights, and for how many rows of a prompt it is ready."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kits.int4_matrices import random_matrix
from kits.tiny_model_dir import tiny_model_dir
from torch import Tensor

from flowspec_edge.d0.prompt_chunks import MOST, USUAL
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.preparation import EXPANDED, choose_expanded, expanding_pays, try_prompt_rows
from flowspec_edge.stage.quant.grouped import CpuLinear, CudaLinear
from flowspec_edge.stage.quant.schemes import scheme
from flowspec_edge.stage.shard import load_shard


class Timed(CpuLinear):
    """A product whose time is set: ``kernel_ms`` a row, or ``expanded_ms``."""

    now = kernel_ms = expanded_ms = 0.0

    def product(self, x: Tensor) -> Tensor:
        self.now += 1e-3 * self.kernel_ms * len(x)
        return x.new_zeros(len(x), self.out_features)

    def expanded_product(self, x: Tensor) -> Tensor:
        self.now += 1e-3 * self.expanded_ms
        return x.new_zeros(len(x), self.out_features)


@pytest.mark.parametrize(("expanded_ms", "first"), [(50.0, 128), (150.0, 256), (260.0, 512), (500.0, None),
                                                    (117.0, 256)])
def test_expanding_has_to_be_clearly_faster(expanded_ms: float, first: int | None) -> None:
    """At that number of rows, and at all larger ones; 117 ms beside 128 are not."""
    linear = Timed(scheme("int4"), 64, 64, False, torch.bfloat16, torch.device("cpu"))  # type: ignore[arg-type]
    linear.kernel_ms, linear.expanded_ms = 1.0, expanded_ms
    found, times = expanding_pays(linear, lambda: linear.now)
    assert found == first
    assert times == {rows: pytest.approx((float(rows), expanded_ms)) for rows in EXPANDED}


def test_stages_that_read_the_weights_for_every_row_take_the_usual_rows(tmp_path: Path) -> None:
    """On a CPU in fp32 more rows take as much longer."""
    model = tiny_model_dir(tmp_path / "model", layers=2, hidden=32)
    engine = StageEngine(load_shard(OpenModel(model / "target"), 0, 1, "fp32", "cpu"))
    assert try_prompt_rows(engine, MOST) == USUAL


@pytest.mark.cuda
def test_a_gpus_own_layout() -> None:
    """Where its kernel is compiled and its layout known, both ways give one product; elsewhere the kernel stays."""
    weight = random_matrix(1024, 512)
    stored = scheme("int4").quantise(weight)
    linear = scheme("int4").linear(1024, 512, False, torch.bfloat16, "cuda")
    assert isinstance(linear, CudaLinear)
    linear.fill(stored)
    said = choose_expanded([linear])
    x = torch.randn(600, 512, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).cuda()
    if "they cannot be expanded" in said or "not the one that is known" in said:
        assert linear.expands_from is None
        return
    kernel, expanded = linear.product(x).float(), linear.expanded_product(x).float()
    assert float((kernel - expanded).abs().max()) <= 2**-7 * float(kernel.abs().max())

"""Batches, checkpoints and the optimiser, against what they promise."""


import pytest
import torch
from torch import nn

from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.training import loop
from flowspec_edge.lab.training.loop import (
    Optimiser,
    Run,
    backpropagate,
    compiled,
    orthogonalise,
    train,
    windows,
)


def test_an_epoch_shows_every_window_once():
    tokens = torch.arange(1001)
    per_epoch = 100 // 7
    for epoch in range(2):
        rows = torch.cat([windows(tokens, 10, epoch * per_epoch + s, 7, seed=3) for s in range(per_epoch)])
        assert rows.shape == (per_epoch * 7, 11)
        assert len(set(rows[:, 0].tolist())) == len(rows)
        assert torch.equal(rows, rows[:, :1] + torch.arange(11))  # neighbours in the text
    assert not torch.equal(windows(tokens, 10, 0, 7, seed=3), windows(tokens, 10, per_epoch, 7, seed=3))


def test_a_text_of_less_than_a_batch_is_one_batch():
    tokens = torch.arange(31)
    for step in range(3):
        rows = windows(tokens, 10, step, 7, seed=3)
        assert sorted(rows[:, 0].tolist()) == [0, 10, 20]


def test_micro_batches_add_up_to_the_whole_batch():
    weight = torch.ones(2, requires_grad=True)
    a, b = torch.arange(10.0), torch.arange(20.0).reshape(10, 2)

    def loss(a, b):
        return (a * (b @ weight)).mean()

    expected = loss(a, b)
    [gradient] = torch.autograd.grad(expected, weight)
    assert backpropagate(loss, torch.device("cpu"), 4, a, b) == pytest.approx(expected.item())
    torch.testing.assert_close(weight.grad, gradient)


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 16, 40), (2, 40, 16)])
def test_orthogonalise_levels_the_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y = orthogonalise(x)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ y @ vh.mT  # diagonal where y has x's singular vectors
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert (inner - torch.diag_embed(values)).abs().max() < 1e-3
    # Five steps of the quintic bring all but vanishing values into this band.
    assert values[s > 0.05 * s.max()].min() > 0.6
    assert values.max() < 1.3


def make_run(path, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimiser = Optimiser(model, muon_lr=0.02, adam_lr=1e-2, decay_from=0.5, warmup=3)

    def loss(step, total):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 6, generator=generator)
        value = (model(x) - x[:, :2]).square().mean()
        value.backward()
        return value.item()

    return Run("toy", model, optimiser, steps, path, loss, lambda: "", checkpoint_every_s=0.0)


def test_a_run_that_broke_off_ends_with_the_same_weights(tmp_path):
    whole = make_run(tmp_path / "whole.pt", 12)
    train(whole)
    broken = make_run(tmp_path / "broken.pt", 12)
    inner = broken.loss

    def fails_once(step, total):
        if step == 7:
            raise KeyboardInterrupt
        return inner(step, total)

    broken.loss = fails_once
    with pytest.raises(KeyboardInterrupt):
        train(broken)
    again = make_run(tmp_path / "broken.pt", 12)
    train(again)
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_lowers_the_loss_and_the_rate_ends_at_zero(tmp_path):
    run = make_run(tmp_path / "run.pt", 60)
    first = run.loss(0, 60)
    train(run)
    assert run.loss(0, 60) < 0.2 * first
    before = [p.clone() for p in run.model.parameters()]
    run.optimiser.step(60, 60)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_a_short_run_warms_up_in_a_tenth_of_its_steps():
    optimiser = Optimiser(nn.Linear(4, 4), muon_lr=0.02, adam_lr=1e-2, decay_from=0.5)
    assert [optimiser.step(step, 40) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [optimiser.step(step, 4000) for step in (0, 19, 39, 40)] == [1 / 40, 0.5, 1.0, 1.0]


def test_a_checkpoint_holds_what_changes_alone(tmp_path):
    run = make_run(tmp_path / "run.pt", 2)
    run.model[2].requires_grad_(False)
    train(run)
    assert torch.load(run.checkpoint, weights_only=True)["model"].keys() == {"0.weight", "0.bias"}


def test_a_foreign_checkpoint_is_named(tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(b"junk")
    with pytest.raises(FlowspecError, match=r"run\.pt is not a checkpoint of this recipe; delete it"):
        train(make_run(path, 3))


@pytest.mark.parametrize(("kind", "compiler", "triton", "compiles"), [
    ("cpu", True, False, True), ("cpu", False, True, False), ("cuda", True, False, False),
    ("cuda", False, True, True)])
def test_only_what_can_be_built_is_compiled(monkeypatch, kind, compiler, triton, compiles):
    """A GPU's kernels are built by Triton, a CPU's by g++."""
    monkeypatch.setattr(loop, "device", lambda: torch.device(kind))
    monkeypatch.setattr(loop.shutil, "which", lambda name: "/usr/bin/g++" if compiler else None)
    monkeypatch.setattr(loop.importlib.util, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(torch, "compile", lambda function: "compiled")
    assert (compiled(len, True) == "compiled") == compiles
    assert compiled(len, False) is len

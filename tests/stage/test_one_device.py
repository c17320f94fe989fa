"""No operation of a stage mixes devices, shown without a GPU; and the copies between host and device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kits.family_checkpoints import FAMILIES, VOCAB, family_model
from kits.meta_device import MetaDevice
from kits.stages import Book, engines, random_tokens, through
from torch import Tensor

from flowspec_edge.messages import Close, Open, Output
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.layers.stage_cache import reusable
from flowspec_edge.stage.shard import load_shard

ROWS = 17


def run(path: Path, dtype: str) -> tuple[MetaDevice, list[Output]]:
    """A text, two levels of a tree, a commit and its prunes, and another session: on the meta device."""
    book = Book()
    outputs = []
    with MetaDevice() as device:
        chain = engines(path, 2, dtype, device="meta")
        device.downloads.clear()
        device.uploads.clear()
        outputs.append(through(chain, book.text(random_tokens(ROWS, VOCAB, 0)))[1])
        root = book.committed[-1]
        children = [book.add(token, root) for token in (3, 4, 5)]
        outputs.append(through(chain, book.builder.seal())[1])
        for token in (6, 7):
            book.add(token, children[1])
        outputs.append(through(chain, book.builder.seal())[1])
        for engine in chain:
            assert engine.cache_of(1) is not None
            engine.cache_of(1).keep(engine.cache_of(1).numbers != children[0])
            engine.close(Close(session=1, retain=tuple(range(5))))
            rows = reusable(engine.model.kinds, ROWS, 5)  # recurrent layers have no snapshot there
            engine.open(Open(session=2, epoch=0, capacity=64, parent_session=1 if rows else -1, rows=rows))
    return device, outputs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = [name for name in FAMILIES if "tied" not in name]
    return {name: family_model(name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", pytest.param("fp32", marks=pytest.mark.soak)])
def test_no_family_mixes_devices(models: dict[str, Path], dtype: str) -> None:
    for path in models.values():
        _, outputs = run(path, dtype)
        assert [len(output.numbers) for output in outputs] == [ROWS, 3, 2]


def test_all_that_comes_down_are_the_hidden_states_that_are_sent(models: dict[str, Path]) -> None:
    """Once for each segment, from each of two stages."""
    device, outputs = run(models["llama"], "fp16")
    hidden = outputs[0].hidden.array.shape[1]
    assert device.downloads == [(rows, hidden) for rows in (ROWS, 3, 2) for _ in range(2)]


class _Forgetful(torch.nn.Module):
    """A layer that makes a tensor without naming a device."""

    def __init__(self, make: str) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor, *_: object) -> None:
        match self.make:
            case "sum":
                x += torch.zeros(x.shape[-1])
            case "matrix":
                x @ torch.eye(x.shape[-1])
            case "index":
                x[torch.arange(len(x))]
            case "look-up":
                x += torch.nn.functional.embedding(torch.zeros(1, dtype=torch.long), x)


@pytest.mark.parametrize("make", ["sum", "matrix", "index", "look-up", "nothing"])
def test_a_forgotten_device_is_found(models: dict[str, Path], make: str) -> None:
    """The mistakes that the tests above must find: each runs on the CPU, and some on meta alone."""
    book = Book()
    with MetaDevice():
        shard = load_shard(models["llama"], 0, 1, "fp32", "meta")
        object.__setattr__(shard, "modules", (_Forgetful(make),))
        engine = StageEngine(shard)
        engine.open(Open(session=1, epoch=0, capacity=32))
        if make == "nothing":
            through([engine], book.text([1, 2, 3]))
            return
        with pytest.raises(AssertionError, match=r"mixes devices: .*cpu"):
            through([engine], book.text([1, 2, 3]))


def test_waiting_for_a_number_is_written_down() -> None:
    with MetaDevice() as device:
        x = torch.ones(3, device="meta")
        assert not bool(x.sum())
        assert x.tolist() == [0.0, 0.0, 0.0]
        torch.zeros(3).copy_(x)
        x.copy_(torch.zeros(3))
        (x * 2 + x.view(3, 1)).to(torch.float16)
    assert device.downloads[0] == ()
    assert device.downloads[-1] == (3,)
    assert device.uploads == [(3,)]
    assert {name: device.launches[name] for name in ("mul", "add", "_to_copy")} == {
        "mul": 1, "add": 1, "_to_copy": 1}
    assert "view" not in device.launches

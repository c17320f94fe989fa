"""What boards are to run: the files load and make a ring, the same input the same id, another another."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.settled_boards import diff, settled

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy import release as rendering
from flowspec_edge.boards.deploy.release import Files, render
from flowspec_edge.boards.deploy.resolve import Deployment
from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry, Inventory
from flowspec_edge.d0.config import DraftConfig
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.manifest import DRAFT, Manifest, stage_part
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.transport.keys import parse_public
from flowspec_edge.util.resources import resource_dir
from flowspec_edge.util.tomlfile import M, load_toml

KEYS = [zmq.curve_keypair()[0].decode() for _ in range(6)]


@dataclass(frozen=True)
class Given:
    """All that a rendering follows from."""

    lengths: tuple[int, ...]  # of the stages
    cluster: dict[str, Any]
    first: int  # of the boards' addresses
    devices: tuple[str, ...]  # torch's, "" for the cluster's
    keys: tuple[str, ...]
    digests: tuple[str, ...]
    request: str
    dtype: str
    environment: str

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
        return tuple((end - n, end) for end, n in zip(ends, self.lengths, strict=True))

    @property
    def manifest(self) -> Manifest:
        parts = [*(stage_part(i) for i in range(len(self.lengths))), DRAFT]
        return Manifest.model_validate({
            "format": 1, "source": {"name": "demo", "config_sha256": "0" * 64}, "model_type": "llama",
            "layers": sum(self.lengths), "hidden_width": 8, "vocabulary": 9, "ranges": self.ranges,
            "dtype": self.dtype, "compute_dtype": self.dtype, "quantisation": None, "request": self.request,
            "parts": {part: {"files": (), "parameters": 1, "weight_bytes": 1, "row_bytes": 1}
                      for part in parts}})

    @property
    def deployment(self) -> Deployment:
        boards = [DeviceEntry(name=f"board-{i}", address=f"10.0.0.{self.first + i}",
                              role="verify" if i else "draft", torch_device=device or None)
                  for i, device in enumerate(self.devices)]
        inventory = Inventory(cluster=ClusterSettings(name="lab", **self.cluster), device=boards)
        return Deployment(inventory, Path("/lab/cluster.toml"), OpenModel(Path("/lab/model")), None, None,
                          boards[0], tuple(zip(boards[1:], self.ranges, strict=True)))

    def render(self) -> tuple[str, dict[str, Files]]:
        publics = {device.name: key for device, key in zip(self.deployment.boards, self.keys, strict=True)}
        environments = {device.name: self.environment for device in self.deployment.boards}
        return render(self.deployment, self.manifest, publics, self.digests, environments)


@st.composite
def inputs(draw: st.DrawFn) -> Given:
    stages = draw(st.integers(1, 5))
    ports = draw(st.lists(st.integers(1024, 65535), min_size=4, max_size=4, unique=True))
    names = ("control_port", "data_port", "peer_port", "serve_port")
    sha256 = st.text("0123456789abcdef", min_size=64, max_size=64)
    cluster = {**dict(zip(names, ports, strict=True)), "context": draw(st.integers(1, 9999)),
               "at_once": draw(st.integers(0, 3)),
               "scheduling_policy": draw(st.sampled_from(["fair", "fcfs"])),
               "serve_host": draw(st.sampled_from(["127.0.0.1", "0.0.0.0"])),
               "draft": draw(st.sampled_from(["", "head", "ngram"]))}
    return Given(
        lengths=tuple(draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))), cluster=cluster,
        first=draw(st.integers(1, 200)),
        devices=tuple(draw(st.sampled_from(["", "cuda"])) for _ in range(stages + 1)),
        keys=tuple(draw(st.permutations(KEYS))[: stages + 1]),
        digests=tuple(draw(sha256) for _ in range(stages)) if draw(st.booleans()) else (),
        request=draw(sha256), dtype=draw(st.sampled_from(["fp16", "bf16"])), environment=draw(sha256))


@examples(30, quick=12)
@given(inputs())
def test_the_files_load_and_make_a_ring(given: Given) -> None:
    release, files = given.render()
    assert list(files) == [device.name for device in given.deployment.boards]
    boards = list(files.values())
    with TemporaryDirectory() as directory:
        path = Path(directory, "config.toml")

        def load(text: str, kind: type[M]) -> M:
            path.write_text(text, encoding="utf-8")
            return load_toml(path, kind)

        d0 = load(boards[0]["etc/draft.toml"], DraftConfig)
        stages = [load(board[f"etc/verify-{i}.toml"], WorkerConfig)
                  for i, board in enumerate(boards) if i]
    assert [stage.instance for stage in stages] == d0.instances
    assert d0.instances == [f"v{i + 1}-{release[:8]}" for i in range(len(stages))]
    assert [stage.stage for stage in stages] == list(range(1, len(stages) + 1))
    assert {stage.stages for stage in stages} == {len(stages)}
    assert [stage.control for stage in stages] == [d0.control] * len(stages)
    assert [d0.first, *(stage.next for stage in stages)] == [*(stage.listen for stage in stages), d0.output]
    listening = [d0.control, d0.output, *(stage.listen for stage in stages)]
    assert len(set(listening)) == len(listening)
    own = list(given.keys)
    assert d0.worker_keys == own[1:]
    ring = [*own, own[0]]
    for i, stage in enumerate(stages, start=1):
        assert (stage.previous_key, stage.next_key, stage.control_key) == (ring[i - 1], ring[i + 1], own[0])
        assert len(parse_public(stage.next_key)) == 40
        assert f":{given.cluster['data_port']}" in stage.listen
        assert stage.device == (given.devices[i] or "cpu")
    assert d0.device == (given.devices[0] or "cpu")
    assert d0.draft == ("ngram" if given.cluster["draft"] == "ngram" else "own")
    assert {config.model for config in (d0, *stages)} == {paths.model_dir(given.request)}
    assert {config.key_file for config in (d0, *stages)} == {paths.KEY}
    assert {config.dtype for config in (d0, *stages)} == {given.dtype}
    assert bool(d0.api_key_file) == (given.cluster["serve_host"] == "0.0.0.0")
    assert d0.scheduling_policy == given.cluster["scheduling_policy"]
    assert d0.at_once == (given.cluster["at_once"] or max(2, len(stages)))


@settings(max_examples=20)
@given(inputs())
def test_each_board_says_what_it_has(given: Given) -> None:
    release, files = given.render()
    told = [json.loads(board["release.json"]) for board in files.values()]
    assert {t["id"] for t in told} == {release}
    assert {t["model"] for t in told} == {given.request}
    assert [(t["role"], t["stage"], t["layers"]) for t in told] == [
        ("draft", 0, None), *(("verify", i, [*layers]) for i, layers in enumerate(given.ranges, start=1))]
    units = {f"units/{name}": (resource_dir("deploy") / "units" / name).read_text()
             for name in (paths.DRAFT_UNIT, paths.VERIFY_UNIT)}
    for board in files.values():
        assert {path: text for path, text in board.items() if path.startswith("units/")} == units
        assert "etc/power-mode.sh" not in board


def test_a_board_with_a_power_mode_has_the_unit_that_sets_it() -> None:
    """The stage's own is another than the cluster's."""
    names = {f"units/{paths.POWER_UNIT}", "etc/power-mode.sh"}
    for mode, scripts in ((None, ["", "MAXN"]), ("MODE 15W'", ["MODE 15W'", "MAXN"])):
        settings = {"power_mode": mode} if mode else {}
        for board, script in zip(diff(settled(), **settings).boards, scripts, strict=True):
            files = board.state.files
            assert names & files.keys() == (names if script else set())
            if script:
                shown = f"{files['etc/power-mode.sh'].splitlines()[0]}; echo \"$mode\""
                assert subprocess.check_output(["sh", "-ec", shown], text=True) == f"{script}\n"


def other(text: str) -> str:
    return ("1" if text[0] == "0" else "0") + text[1:]


CHANGES: dict[str, Callable[[Given], Given]] = {
    "a port": lambda g: replace(g, cluster={**g.cluster, "data_port": 80}),
    "the context": lambda g: replace(g, cluster={**g.cluster, "context": g.cluster["context"] + 1}),
    "the strategy": lambda g: replace(g, cluster={**g.cluster, "strategy": "pruned_pp"}),
    "an address": lambda g: replace(g, first=g.first + 1),
    "torch's device": lambda g: replace(g, devices=(g.devices[0], "cuda:1", *g.devices[2:])),
    "the draft device's torch device": lambda g: replace(g, devices=("cuda:1", *g.devices[1:])),
    "a key": lambda g: replace(g, keys=(*g.keys[:-1], "0" * 40)),
    "a layer": lambda g: replace(g, lengths=(g.lengths[0] + 1, *g.lengths[1:])),
    "a board": lambda g: replace(g, lengths=(*g.lengths, 1), devices=(*g.devices, ""),
                                 keys=(*g.keys, "0" * 40), digests=()),
    "a digest": lambda g: replace(g, digests=tuple(map(other, g.digests or ["0" * 64] * len(g.lengths)))),
    "the model": lambda g: replace(g, request=other(g.request)),
    "the dtype": lambda g: replace(g, dtype="fp32"),
    "the environment": lambda g: replace(g, environment=other(g.environment)),
}


@examples(40, quick=16)
@given(inputs(), st.sampled_from(sorted(CHANGES)))
def test_the_same_has_the_same_id_and_any_change_another(given: Given, change: str) -> None:
    release, files = given.render()
    assert given.render() == (release, files)
    assert CHANGES[change](given).render()[0] != release


def test_other_units_are_another_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given((1,), {}, 1, ("", ""), tuple(KEYS[:2]), (), "0" * 64, "fp16", "0" * 64)
    (tmp_path / "units").mkdir()
    unit = tmp_path / "units/flowspec-draft.service"
    (tmp_path / "units/README").write_text("not a unit")
    monkeypatch.setattr(rendering, "resource_dir", lambda kind: tmp_path)
    unit.write_text("[Service]\n")
    before, files = given.render()
    assert files["board-1"]["units/flowspec-draft.service"] == "[Service]\n"
    assert "units/README" not in files["board-1"]
    unit.write_text("[Service]\nNice=5\n")
    assert given.render()[0] != before


def test_what_cannot_be_rendered() -> None:
    given = Given((1, 2), {}, 1, ("", "", ""), tuple(KEYS[:3]), (), "0" * 64, "fp16", "0" * 64)
    with pytest.raises(FlowspecError, match=r"board-2: its public key is missing in /lab/keys"):
        render(given.deployment, given.manifest, {"board-0": KEYS[0], "board-1": KEYS[1]}, (), {})
    with pytest.raises(FlowspecError, match=r"is cut into \[\(0, 2\), \(2, 3\)\], and .* cut it again"):
        render(given.deployment, replace(given, lengths=(2, 1)).manifest, {}, (), {})

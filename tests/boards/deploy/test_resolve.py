"""What a cluster file comes to: its own word first, then how the model was cut, then the planner's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kits.planned_boards import D0_MB, MB, profile
from kits.sharded_models import cut
from kits.tiny_model_dir import tiny_eagle3, tiny_model_dir

from flowspec_edge.boards.deploy.resolve import Deployment, d0_bytes, drafting, process_bytes, resolve_deployment
from flowspec_edge.boards.doctor.model import needed_bytes, parts_of
from flowspec_edge.boards.inventory import load_inventory
from flowspec_edge.boards.planning.layer_split import problem_for
from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.boards.planning.planned_draft import StoredDraft
from flowspec_edge.boards.planning.planner import CandidateBoard, DoesNotFit, plan
from flowspec_edge.boards.planning.scaling import scaled
from flowspec_edge.boards.planning.throughput import Throughput
from flowspec_edge.boards.probe.checks import judge
from flowspec_edge.device_profile import Conditions, load_profile, render
from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import DRAFT_KINDS
from flowspec_edge.model.manifest import Manifest


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of six layers, also cut in three, and boards that were measured with it."""
    path = tmp_path_factory.mktemp("home")
    model = tiny_model_dir(path / "model", layers=6, hidden=32)
    cut(model, path / "cut", split=[1, 2, 3])
    tiny_eagle3(model)
    shape = {"layers": 6, "hidden_width": 32, "layer_mb": model_bytes(str(model), "fp16").layer / 1e6}
    kinds = {"slow": {"layer_ms": 6.0}, "fast": {"layer_ms": 2.0}, "full": {"usable_mb": 500.1},
             "mute": {}}
    for name, figures in kinds.items():
        made = profile(name=name, **{**shape, **figures})
        (path / f"{name}.toml").write_text(render(
            made.model_copy(update={"memory": None} if name == "mute" else {})))
    (path / "agx.toml").write_text(render(load_profile("agx-orin-64gb")))
    return path


def decide(home: Path, cluster: str, *boards: str) -> Deployment:
    """Boards are "name [role] [profile] [lo-hi]", in any order after the name."""
    text = f'[cluster]\nname = "lab"\n{cluster}\n'
    for number, board in enumerate(boards):
        name, *rest = board.split()
        text += f'[[device]]\nname = "{name}"\naddress = "10.0.0.{number + 1}"\n'
        for word in rest:
            if word in ("draft", "verify"):
                text += f'role = "{word}"\n'
            elif "-" in word:
                text += f"layers = [{word.replace('-', ', ')}]\n"
            else:
                text += f'profile = "{word}.toml"\n'
    file = home / "cluster.toml"
    file.write_text(text)
    return resolve_deployment(load_inventory(file), file)


def shown(found: Deployment) -> tuple[str, list[tuple[str, int, int]], list[str]]:
    return (found.draft.name, [(device.name, *layers) for device, layers in found.stages],
            [device.name for device, _ in found.unused_boards])


MODEL, CUT = 'model = "model"', 'model = "cut"'


def test_a_file_that_says_everything(home: Path) -> None:
    found = decide(home, f'{MODEL}\ndraft = "model/eagle2"\ndtype = "int4"', "a verify 0-4", "b draft",
                   "c verify 4-6")
    assert shown(found) == ("b", [("a", 0, 4), ("c", 4, 6)], [])
    assert [device.name for device in found.boards] == ["b", "a", "c"]
    assert (found.head, found.dtype, found.at_once) == (home / "model/eagle2", "int4", 2)
    assert found.shards == home / ".flowspec/lab/model"
    assert (found.keys, found.wheelhouse) == (home / "keys", home / "wheelhouse")
    decided = found.decided
    assert [(d.name, d.role) for d in decided.device] == [("b", "draft"), ("a", "verify"), ("c", "verify")]
    assert decided.draft.address == "10.0.0.2"


def test_roles_alone_keep_the_order_and_split_evenly(home: Path) -> None:
    assert shown(decide(home, MODEL, "a verify", "b draft", "c verify", "d verify", "e verify")) == (
        "b", [("a", 0, 2), ("c", 2, 4), ("d", 4, 5), ("e", 5, 6)], [])


def test_roles_keep_the_order_and_the_slowest_stage_fast(home: Path) -> None:
    assert shown(decide(home, MODEL, "a draft fast", "b verify slow", "c verify fast", "d verify fast")) == (
        "a", [("b", 0, 1), ("c", 1, 4), ("d", 4, 6)], [])


def test_nothing_said_and_nothing_known(home: Path) -> None:
    found = decide(home, MODEL, "a", "b", "c")
    assert shown(found) == ("a", [("b", 0, 3), ("c", 3, 6)], [])
    assert found.notes[0].startswith("no profile with [memory] for a, b, c: whether the model fits there is")
    assert "boards count as alike" in found.notes[0]
    assert not any("no profile" in note for note in decide(home, MODEL, "a fast", "b fast", "c slow").notes)
    assert "for b, c: ESTIMATED" in decide(home, MODEL, "a fast", "b", "c mute").notes[0]


def test_one_known_board_is_not_made_equal_to_unknown_ones(home: Path) -> None:
    """Three laptops beside an AGX Orin: it gets the layers, and which boards are estimated is told."""
    for boards in (("a agx", "b", "c", "d"), ("a verify agx", "b verify", "c verify", "d draft")):
        found = decide(home, MODEL, *boards)
        layers = {device.name: hi - lo for device, (lo, hi) in found.stages}
        assert layers["a"] == max(layers.values())
        assert layers["a"] > sum(layers.values()) / len(boards)
        assert found.notes[0].startswith("no profile with [memory] for b, c, d: ESTIMATED, b from unk")
        assert "flowspec device profile --cluster" in found.notes[0]


def test_an_unknown_memory_refuses_nothing_that_the_file_decides(home: Path) -> None:
    found = decide(home, f"{MODEL}\ncontext = 100000000", "a draft agx", "b verify", "c verify")
    assert [hi - lo for _, (lo, hi) in found.stages] == [3, 3]


def test_more_boards_than_layers(home: Path) -> None:
    found = decide(home, MODEL, *(f"b{i}" for i in range(8)), "v verify")
    assert shown(found) == ("b0", [*((f"b{i}", i - 1, i) for i in range(1, 6)), ("v", 5, 6)], ["b6", "b7"])
    assert found.unused_boards[0][1] == "model has no more than 6 layers"


@pytest.mark.parametrize("boards", [
    ("a fast", "b slow", "c fast", "d slow"), ("a slow", "b slow", "c verify slow", "d full"),
    ("a slow", "b draft fast", "c fast")])
def test_open_roles_and_profiles_are_the_planners(home: Path, boards: tuple[str, ...]) -> None:
    found = decide(home, f"{MODEL}\ncontext = 500\nat_once = 1", *boards)
    size = model_bytes(str(home / "model"), "fp16")
    problem = problem_for(size, 500, 1, len(boards))
    made = plan([CandidateBoard(device.name, scaled(load_profile(f"{home}/{device.profile}"), size)[0],
                                device.role) for device in found.inventory.device],
                problem, Throughput(problem))
    assert shown(found) == (made.d0.name, [(s.board.name, *s.layers) for s in made.stages],
                            [b.name for b, _ in made.unused_boards])


def test_a_sharded_model_fixes_the_layers(home: Path) -> None:
    found = decide(home, CUT, "a verify", "b draft", "c verify", "d verify")
    assert shown(found) == ("b", [("a", 0, 1), ("c", 1, 3), ("d", 3, 6)], [])
    assert found.shards == home / "cut"
    found = decide(home, CUT, "a", "b", "c", "d verify", "e")
    assert shown(found) == ("a", [("b", 0, 1), ("c", 1, 3), ("d", 3, 6)], ["e"])
    assert found.unused_boards[0][1].endswith("was cut into 3 stages")


@pytest.mark.parametrize(("cluster", "boards", "fault"), [
    ("", ("a", "b"), r"\[cluster\] has no model"),
    ('model = "nowhere"', ("a", "b"), "no model '.*nowhere'"),
    (f'{MODEL}\ndraft = "model"', ("a", "b"), "cluster.draft: .* has no config.json"),
    (MODEL, ("a draft", "b verify 0-3", "c verify 3-5"), "device c: its layers end with 5, and model has 6"),
    (MODEL, ("a draft", *(f"v{i} verify" for i in range(7))), "7 verify devices are more than the 6"),
    (CUT, ("a", "b", "c"), "cut into 3 stages, and beside a the file lists 2 boards .* --stages 2"),
    (CUT, ("a draft", "b verify"), "beside a the file lists 1 board for them: list 3"),
    (CUT, ("a draft", *(f"v{i} verify" for i in range(4))), "the file lists 4 boards"),
    (CUT, ("a draft", "b verify 0-2", "c verify 2-4", "d verify 4-6"), r"device b: .* has layers \[0, 1\]"),
    (f'{CUT}\ndtype = "int4"', ("a", "b", "c", "d"), "cluster.dtype: .* was made with fp16, not int4"),
    (f'{CUT}\nlm_head = "int8"', ("a", "b", "c", "d"), "cluster.lm_head: .* was made with 16bit, not int8"),
    (f'{CUT}\nkv_cache = "int8"', ("a", "b", "c", "d"), "cluster.kv_cache: .* was made with 16bit, not int8"),
    (f'{CUT}\ndraft = "model/eagle2"', ("a", "b", "c", "d"), "cluster.draft: .* has its draft models"),
])
def test_what_does_not_go_together(home: Path, cluster: str, boards: tuple[str, ...], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        decide(home, cluster, *boards)


def test_a_strategy_needs_its_draft_model(home: Path) -> None:
    target, boards = 'model = "model/target"', ("a", "b", "c")
    cut(home / "model/target", home / "cut-alone", split=[3, 3])
    (home / "head-alone").mkdir()
    for part in ("target", "eagle2"):
        (home / "head-alone" / part).symlink_to(home / "model" / part)
    with pytest.raises(UsageError, match=r"pipedec drafts with draft-lm/.*: put one into draft-lm/, look up "
                       'in the text: draft = "ngram", or do not'):  # draft = "eagle2" would be a directory
        decide(home, 'model = "head-alone"\nstrategy = "pipedec"', *boards)
    with pytest.raises(UsageError, match=r"spd .* does not have: shard it again with --draft DIR"):
        decide(home, 'model = "cut-alone"\ndraft = "ngram"\nstrategy = "spd"', *boards)
    for without in (target, 'model = "cut-alone"'):  # as generate and serve do
        found = decide(home, without, *boards)
        assert found.cluster.draft_kind == "ngram"
        assert any("no draft model, so flowspec_plus looks up in the text" in note for note in found.notes)
    with pytest.raises(UsageError, match=r"and .*/draft-lm is a small language model \(kind lm\): add one"
                       r'.*, look up in the text: draft = "ngram", or .*: strategy = "autoregressive"'):
        decide(home, f'{target}\ndraft = "model/draft-lm"', *boards)
    with pytest.raises(UsageError, match=r"spd drafts with spd/, .* make it with: .*: strategy = "):
        decide(home, f'{target}\ndraft = "ngram"\nstrategy = "spd"', *boards)
    with pytest.raises(UsageError, match="draft mtp: 'llama' models have no MTP layer that can be run"):
        decide(home, f'{target}\ndraft = "mtp"', *boards)
    for runs in ('draft = "ngram"', 'strategy = "autoregressive"', 'draft = "model/eagle2"',
                 'draft = "model/eagle3"', 'draft = "model/draft-lm"\nstrategy = "pipedec"'):
        decide(home, f"{target}\n{runs}", *boards)
    decide(home, 'model = "cut-alone"\ndraft = "ngram"', *boards)


@pytest.mark.parametrize(("cluster", "boards", "fault"), [
    (MODEL, ("a draft", "b verify full 0-5", "c verify 5-6"), "b has too little memory for layers 0 to 4: "),
    (MODEL, ("a draft full", "b verify", "c verify"), "a has too little memory for drafting"),
    (MODEL, ("a draft slow", "b verify full"), "model in fp16 with 4096 tokens of context needs"),
    (MODEL, ("a slow", "b full"), r"needs .* What would help: .*1 more like a"),
    (CUT, ("a", "b", "c", "d full"), "d has too little memory for layers 3 to 5: .* shard --split"),
])
def test_what_does_not_fit(home: Path, cluster: str, boards: tuple[str, ...], fault: str) -> None:
    with pytest.raises(DoesNotFit, match=fault):
        decide(home, cluster, *boards)


def test_a_draft_device_that_stages_would_wait_for(home: Path) -> None:
    """Profiles: a pass 10 ms, lm_head 4 ms, a layer 6 ms; so 14 ms a turn against 12 or 18 ms."""
    keeps_up = decide(home, MODEL, "a draft slow", "b verify slow", "c verify slow")
    assert keeps_up.turn is not None
    assert keeps_up.turn.seconds == pytest.approx(0.014)
    assert keeps_up.turn.slot == pytest.approx(0.018)
    assert keeps_up.notes == ()
    parts = parts_of(keeps_up, {})
    assert [name for name, part in parts.items() if part.turn] == ["a"]
    _, finding = judge("bare", parts["a"])
    assert (finding.check, finding.state) == ("draft device", "ok")
    assert re.findall(r"\d+ ms", finding.found) == ["14 ms", "18 ms"]
    late = decide(home, MODEL, "a draft slow", "b verify slow", "c verify slow", "d verify slow")
    [note] = late.notes
    assert note.startswith("the draft device a is the bottleneck: ")
    assert re.findall(r"\d+ ms", note) == ["4 ms", "10 ms", "14 ms", "12 ms"]
    assert "torch_device" in note
    _, finding = judge("bare", parts_of(late, {})["a"])
    assert (finding.state, "torch_device" in finding.advice) == ("warning", True)
    assert decide(home, MODEL, "a draft", "b verify slow").turn is None
    assert decide(home, 'model = "cut"', "a slow", "b slow", "c slow", "d slow").turn is None


def test_a_profile_of_another_device_is_noted(home: Path) -> None:
    gpu = profile(name="gpu", layers=6, hidden_width=32).model_copy(
        update={"conditions": Conditions(device="cuda: Orin")})
    (home / "gpu.toml").write_text(render(gpu))
    told = [note for note in decide(home, MODEL, "a gpu", "b gpu").notes if "torch_device is 'cpu'" in note]
    assert [note.partition(":")[0] for note in told] == ["a", "b"]
    on_gpu = decide(home, f'{MODEL}\ntorch_device = "cuda:1"', "a gpu", "b gpu")
    assert not any("torch_device is" in note for note in on_gpu.notes)


@pytest.mark.parametrize(("torch_device", "measured", "process_mb"), [
    ("cpu", "", 240), ("cuda", "", 740), ("cuda:1", "", 740),
    ("cuda", "cuda", 1234), ("cpu", "cpu", 1234), ("cpu", "cuda", 240)])
def test_a_service_takes_more_with_cuda_and_a_profile_knows_best(home: Path, torch_device: str, measured: str,
                                                                 process_mb: int) -> None:
    """``measured``: the device of a profile whose process takes 1234 MB."""
    own = profile(name="own", process_mb=1234, layers=6, hidden_width=32)
    (home / "own.toml").write_text(render(own.model_copy(update={"conditions": Conditions(device=measured)})))
    found = decide(home, f'{MODEL}\ntorch_device = "{torch_device}"', f"a draft {'own' if measured else ''}",
                   "b verify")
    assert process_bytes(found, found.draft) == (process_mb + D0_MB) * MB


@pytest.mark.parametrize(("cluster", "kind"), [
    ("", "eagle2"), ('draft = "ngram"', None), ('strategy = "autoregressive"', None),
    ('draft = "other/eagle3"', "eagle2"), ('draft = "other/eagle2"', "eagle2"), ('strategy = "speculative"', "lm")])
def test_the_draft_device_holds_what_drafts(home: Path, tmp_path: Path, cluster: str, kind: str | None) -> None:
    """The sizes before sharding are those of a model that was sharded with this draft model alone."""
    model = tiny_model_dir(tmp_path / "model", layers=6, hidden=32)
    tiny_eagle3(model)
    (tmp_path / "other").mkdir()
    other = tiny_model_dir(tmp_path / "second", layers=6, hidden=32, seed=1)
    tiny_eagle3(other)
    for name in ("eagle2", "eagle3"):
        (other / name).rename(tmp_path / "other" / name)
    boards = ("a draft", "b verify")
    plain = decide(tmp_path, f"{MODEL}\ndtype = \"fp16\"\n{cluster}", *boards)
    found = drafting(plain.cluster, plain.model, plain.head)
    assert (found.kind.name if found else None) == kind
    if plain.head and kind == plain.head.name:
        assert found == StoredDraft(DRAFT_KINDS[kind], plain.head)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "target").symlink_to(model / "target")
    if found:
        (alone / found.kind.directory).symlink_to(found.directory)
    cut(alone, tmp_path / "cut-alone", 1, "fp16")
    cut(model, tmp_path / "cut", 1, "fp16")
    part = Manifest.read(tmp_path / "cut-alone").part("draft")
    needs = part.weight_bytes + part.cache_bytes(*plain.caches)
    assert needed_bytes(plain)["a"] - process_bytes(plain, plain.draft) == needs
    if not plain.head:
        whole = Manifest.read(tmp_path / "cut")
        assert d0_bytes(plain, whole) == needs
        assert whole.part("draft").weight_bytes > part.weight_bytes

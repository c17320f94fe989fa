"""Decisions before anything is written: ranges, dtypes, D0's files, and requests that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.draft_heads import VARIANTS, published_eagle3
from kits.sharded_models import as_bin, edit
from kits.tiny_model_dir import tiny_eagle3, tiny_head, tiny_model_dir
from kits.tiny_models import tiny_llama, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.drafting.format import TargetFacts
from flowspec_edge.drafting.load import load_drafters
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.sharding.drafts import check_fit, open_draft
from flowspec_edge.sharding.plan import CopiedFile, TensorsFile, make_plan, ranges_for, recipe_for
from flowspec_edge.sharding.source import open_source


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """flowspec's own directory, with every kind of draft model."""
    path = tiny_model_dir(tmp_path_factory.mktemp("full"))
    tiny_eagle3(path, drafted=50)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("plain"), layers=3)


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "copy"))


@given(split=st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_a_split_is_what_was_asked_for(split: list[int]) -> None:
    ranges = ranges_for(sum(split), None, split)
    assert [hi - lo for lo, hi in ranges] == split
    assert [i for lo, hi in ranges for i in range(lo, hi)] == list(range(sum(split)))
    for layers in (sum(split) - 1, sum(split) + 1):
        with pytest.raises(UsageError, match=f"{sum(split)} layers.* {layers}"):
            ranges_for(layers, None, split)
    with pytest.raises(UsageError, match="every stage needs at least one layer"):
        ranges_for(sum(split), None, [*split, 0])


def test_stages_share_the_layers_evenly() -> None:
    assert ranges_for(5, 2, None) == ((0, 3), (3, 5))


@pytest.mark.parametrize(("stored", "asked", "plain_dtype", "compute"), [
    (torch.float32, None, torch.float16, "fp16"),
    (torch.float16, None, torch.float16, "fp16"),
    (torch.bfloat16, None, torch.bfloat16, "bf16"),
    (torch.bfloat16, "fp16", torch.float16, "fp16"),
    (torch.float32, "fp32", torch.float32, "fp32"),
    (torch.float16, "int4", torch.float16, "bf16"),
    (torch.bfloat16, "nf4", torch.bfloat16, "bf16"),
    (torch.float32, "int4", torch.bfloat16, "bf16"),
])
def test_defaults_follow_the_checkpoint(tmp_path: Path, stored: torch.dtype, asked: str | None,
                                        plain_dtype: torch.dtype, compute: str) -> None:
    path = tiny_llama(tmp_path, layers=1)
    AutoModelForCausalLM.from_pretrained(path, dtype=stored).save_pretrained(path)
    recipe = recipe_for(open_source(str(path)), asked)  # type: ignore[arg-type]
    assert (recipe.plain, recipe.compute) == (plain_dtype, compute)
    assert recipe.group == {"int4": 128, "nf4": 64}.get(asked or "", 0)


def test_options_that_do_not_go_together(plain: Path) -> None:
    source = open_source(str(plain))
    with pytest.raises(UsageError, match=r"--group.*int4.*fp16"):
        recipe_for(source, "fp16", 64)
    with pytest.raises(UsageError, match=r"--group.*int4.*nf4"):
        recipe_for(source, "nf4", 64)
    with pytest.raises(UsageError, match=r"int4.*100"):
        recipe_for(source, "int4", 100)


def test_kinds_of_drafts_are_recognised(full: Path, plain: Path, tmp_path: Path) -> None:
    kinds = {name: open_draft(full / name) for name in ("eagle2", "eagle3", "draft-lm", "spd")}
    assert {name: d.kind.name for name, d in kinds.items()} == {
        "eagle2": "eagle2", "eagle3": "eagle3", "draft-lm": "lm", "spd": "spd"}
    assert {name: d.embeddings for name, d in kinds.items()} == {
        "eagle2": False, "eagle3": True, "draft-lm": False, "spd": True}
    # A full draft vocabulary has no d2t, a head from a training framework has prefixes.
    bare = Path(shutil.copytree(full / "eagle3", tmp_path / "bare"))
    tensors = {f"module.{n}": t for n, t in load_file(bare / "model.safetensors").items()
               if n not in ("d2t", "t2d")}
    save_file(tensors, bare / "model.safetensors")
    assert open_draft(bare).kind.name == "eagle3"
    head = Path(shutil.copytree(full / "eagle2", tmp_path / "head"))
    edit(head, embed_tokens__weight=None)
    as_bin(head)
    assert (open_draft(head).kind.name, open_draft(head).embeddings) == ("eagle2", True)
    edit(bare, **dict.fromkeys(tensors), x=torch.ones(1))
    with pytest.raises(UsageError, match="holds no known draft model"):
        open_draft(bare)
    with pytest.raises(UsageError, match=r"has no config\.json; give one of the directories in it"):
        open_draft(tmp_path)


@pytest.mark.parametrize(("name", "other"), [("eagle2", "eagle3"), ("eagle3", "eagle2"), ("eagle3", "draft-lm")])
def test_a_head_by_another_kinds_name_is_refused_everywhere(full: Path, tmp_path: Path, name: str, other: str) -> None:
    model = tmp_path / "mine"
    model.mkdir()
    (model / "target").symlink_to(full / "target")
    (model / other).symlink_to(full / name)
    kind = {"draft-lm": "lm"}.get(other, other)
    lm_head = load_file(full / "target" / "model.safetensors")["lm_head.weight"]
    for use in (lambda: open_source(str(model)), lambda: model_bytes(str(model), "fp16"),
                lambda: load_drafters(kind, model, lm_head, lm_head, "fp32", 4)):
        with pytest.raises(UsageError, match=rf"mine/{other} holds .* of the kind {name} .*: name it .*mine/{name}$"):
            use()


def test_a_head_of_another_model_is_refused_by_all_that_count_on_it(full: Path, tmp_path: Path) -> None:
    model = tmp_path / "mine"
    model.mkdir()
    (model / "target").symlink_to(full / "target")
    tiny_head(model / "eagle2", 300, hidden=32)
    for use in (lambda: open_source(str(model)), lambda: model_bytes(str(model), "fp16")):
        with pytest.raises(FlowspecError, match="the head's width is 32, the target's 64"):
            use()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_published_eagle3_head_goes_along(tmp_path: Path, variant: str) -> None:
    published_eagle3(tmp_path, 0, 32, 97, kv_heads=2, **VARIANTS[variant])
    draft = open_draft(tmp_path)
    own = VARIANTS[variant].get("embedding", False)
    assert (draft.kind.name, draft.embeddings, draft.kv_row) == ("eagle3", not own, 2 * 2 * 8)
    check_fit(draft, TargetFacts(tmp_path, 32, 97, 8))
    with pytest.raises(FlowspecError, match="width is 32, the target's 33"):
        check_fit(draft, TargetFacts(tmp_path, 33, 97, 8))


@pytest.mark.parametrize(("drafts", "embeddings"), [
    ([], False), (["eagle2"], False), (["draft-lm"], False), (["eagle3"], True), (["spd", "eagle2"], True)])
def test_d0_gets_what_its_drafts_need(full: Path, drafts: list[str], embeddings: bool) -> None:
    source = open_source(str(full / "target"), [full / name for name in drafts])
    plan = make_plan(source, recipe_for(source), ranges_for(4, 2, None))
    part = plan.parts[-1]
    assert part.name == "draft"
    weights = next(f for f in part.files if isinstance(f, TensorsFile))
    assert set(weights.plain) == {"lm_head.weight", *(["model.embed_tokens.weight"] if embeddings else [])}
    homes = {f.path.parts[1] for f in part.files}
    assert homes == {"target", *drafts}


def test_a_models_own_drafts_go_along(full: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(full / "eagle2", tmp_path / "other"))
    source = open_source(str(full), [other])
    assert {d.kind.name: d.directory for d in source.drafts} == {
        "eagle2": other, "eagle3": full / "eagle3", "lm": full / "draft-lm", "spd": full / "spd"}
    with pytest.raises(UsageError, match=r"both.*'eagle2'"):
        open_source(str(full), [other, full / "eagle2"])


@pytest.mark.parametrize(("kind", "change", "numbers"), [
    ("eagle2", {"hidden_size": 32}, (32, 64)), ("eagle2", {"vocab_size": 299}, (299, 300)),
    ("eagle3", {"target_hidden_size": 80}, (80, 64)), ("eagle3", {"vocab_size": 301}, (301, 300)),
    ("spd", {"hidden_size": 32}, (32, 64)), ("spd", {"vocab_size": 299}, (299, 300)),
    ("draft-lm", {"vocab_size": 299}, (299, 300)), ("eagle2", {"hidden_size": 63}, ())])
def test_a_draft_model_of_another_target_is_refused(full: Path, tmp_path: Path, kind: str,
                                                    change: dict[str, int], numbers: tuple[int, ...]) -> None:
    """By its config.json; the last case is one that transformers rejects."""
    other = Path(shutil.copytree(full / kind, tmp_path / kind))
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(FlowspecError) as refused:
        open_source(str(full / "target"), [other])
    assert str(other) in str(refused.value)
    assert all(str(number) in str(refused.value) for number in numbers)


def test_tensors_of_another_width_are_refused(full: Path, tmp_path: Path) -> None:
    """A published EAGLE-3 head may not name its target's width, so only fc tells it."""
    published_eagle3(tmp_path / "head", 0, 80, 300, width=64)
    with pytest.raises(FlowspecError, match=r"80.* 64"):
        open_source(str(full / "target"), [tmp_path / "head"])
    published_eagle3(tmp_path / "head", 0, 64, 300)
    (fitting,) = open_source(str(full / "target"), [tmp_path / "head"]).drafts
    assert fitting.kind.name == "eagle3"
    short = Path(shutil.copytree(full / "eagle2", tmp_path / "short"))
    edit(short, embed_tokens__weight=torch.zeros(299, 64))
    with pytest.raises(FlowspecError, match=r"299.* 300"):
        open_source(str(full / "target"), [short])


def test_a_second_head_keeps_its_place(tmp_path: Path) -> None:
    """Its files are those of any EAGLE-2 head: only its directory distinguishes the two."""
    model = tiny_model_dir(tmp_path / "model")
    second = Path(shutil.copytree(model / "eagle2", model / "eagle2-deep"))
    edit(second, embed_tokens__weight=None)
    source = open_source(str(model))
    assert [(d.kind.name, d.directory.name, d.embeddings) for d in source.drafts[:2]] == [
        ("eagle2", "eagle2", False), ("eagle2-deep", "eagle2-deep", True)]
    plan = make_plan(source, recipe_for(source), ranges_for(4, 2, None))
    copied = {f.path: f.source for f in plan.parts[-1].files if isinstance(f, CopiedFile)}
    for name in ("eagle2", "eagle2-deep"):
        assert copied[Path("draft", name, "model.safetensors")] == model / name / "model.safetensors"
    # Given by hand, it is an EAGLE-2 head like any other.
    assert [d.kind.name for d in open_source(str(model / "target"), [second]).drafts] == ["eagle2"]


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    path = tiny_model("qwen2", tmp_path, layers=2, tie_word_embeddings=True)
    source = open_source(str(path))
    plan = make_plan(source, recipe_for(source), ranges_for(2, 2, None))
    names = [f.plain for p in plan.parts for f in p.files if isinstance(f, TensorsFile)]
    assert [n for n in names if "model.embed_tokens.weight" in n] == [("model.embed_tokens.weight",)] * 2
    assert not [n for n in names if "lm_head.weight" in n]


def test_checkpoints_that_are_refused(copy: Path, tmp_path: Path) -> None:
    edit(copy, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(FlowspecError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        open_source(str(copy))
    edit(copy, model__layers__1__mlp__up_proj__weight=torch.ones(3, 3))
    with pytest.raises(FlowspecError, match=r"up_proj\.weight .*\[3, 3\]"):
        open_source(str(copy))
    edit(copy, model__layers__1__mlp__up_proj__weight=torch.ones(128, 64, dtype=torch.int8))
    with pytest.raises(FlowspecError, match=r"up_proj\.weight .*int8"):
        open_source(str(copy))
    edit(copy, model__layers__1__mlp__up_proj__weight=torch.ones(128, 64), model__strange=torch.ones(1))
    with pytest.raises(FlowspecError, match=r"tensor model\.strange"):
        open_source(str(copy))
    edit(copy, model__strange=None, lm_head__weight=None)
    with pytest.raises(FlowspecError, match=r"has no tensor lm_head\.weight"):
        open_source(str(copy))
    with pytest.raises(UsageError, match="'nowhere'"):
        open_source("nowhere")


def test_matrices_that_no_group_divides_are_kept(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, layers=1, hidden=48)  # 48 = 32 + 16: no group of 32 divides it
    source = open_source(str(path))
    plan = make_plan(source, recipe_for(source, "int4"), ranges_for(1, 1, None))
    assert plan.unquantised == tuple(f"model.layers.0.{name}.weight" for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
        "mlp.up_proj"))


def test_the_request_knows_weights_and_options(copy: Path) -> None:
    def request(dtype: str | None = None, stages: int = 2) -> str:
        source = open_source(str(copy))
        return make_plan(source, recipe_for(source, dtype), ranges_for(3, stages, None)).request  # type: ignore[arg-type]

    first = request()
    assert request() == first
    assert len({first, request("bf16"), request(stages=3), request("int4")}) == 4
    edit(copy, model__norm__weight=torch.full((64,), 2.0))
    assert request() != first
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config))
    assert request() != first

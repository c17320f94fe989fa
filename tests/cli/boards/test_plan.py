"""``flowspec plan`` from the command line."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kits.command_options import refusal
from kits.family_checkpoints import family_model
from kits.mtp_layers import with_mtp
from kits.planned_boards import D0_MB, profile
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.boards.deploy.resolve import resolve_deployment
from flowspec_edge.boards.inventory import load_inventory
from flowspec_edge.boards.planning.draft_heads import head_costs
from flowspec_edge.boards.planning.model_size import model_bytes, ranking_bytes, usual_heads_of
from flowspec_edge.boards.planning.one_board import rate_text
from flowspec_edge.boards.planning.planned_draft import PlannedDraft, charged_as, level_seconds
from flowspec_edge.boards.planning.planner import DoesNotFit
from flowspec_edge.boards.planning.scaling import scaled
from flowspec_edge.cli.boards import plan
from flowspec_edge.cli.boards.plan_cases import Cases
from flowspec_edge.cli.common.workload import shipped_recording
from flowspec_edge.cli.main import main
from flowspec_edge.d0.capacity import cache_rows
from flowspec_edge.device_profile import load_profile, render
from flowspec_edge.model.draft_kinds import DRAFT_KINDS
from flowspec_edge.strategies.params import Params


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, boards that were measured with it, a cluster, and a bare config.json."""
    path = tmp_path_factory.mktemp("home")
    model = tiny_model_dir(path / "model", layers=4, hidden=32)
    size = model_bytes(str(model), "fp16")
    shape = {"layers": 4, "hidden_width": 32, "layer_mb": size.layer / 1e6}
    kinds = {"nano": {"layer_ms": 6.0}, "agx": {"layer_ms": 2.0}, "full": {"usable_mb": 500.1}}
    for name, figures in kinds.items():
        made = profile(name=name, **{**shape, **figures})
        (path / f"{name}.toml").write_text(render(made.model_copy(update={"provenance": "measured"})))
    (path / "bare").mkdir()
    shutil.copy(model / "target" / "config.json", path / "bare")
    (path / "cluster.toml").write_text(
        '[cluster]\nname = "desk"\n'
        + "".join(f'[[device]]\nname = "{n}"\naddress = "10.0.0.{i}"\nrole = "{r}"\nprofile = "{p}.toml"\n'
                  for i, (n, r, p) in enumerate([("one", "verify", "nano"), ("two", "draft", "agx"),
                                                 ("three", "verify", "nano")], start=1)))
    return path


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions of a few tokens after one prompt: these tests are not about their value."""
    monkeypatch.setattr(plan, "_PROMPTS", 1)
    monkeypatch.setattr(plan, "_TOKENS", 6)
    monkeypatch.setattr(plan, "_RECORDED_TOKENS", 6)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_demo_speeds_also_at_the_papers_acceptance(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--devices", f"{home}/nano.toml:3", "--strategies", "flowspec,autoregressive")
    head, plain = planned(capsys, "--model", "demo", *given)["predictions"]
    assert 0 < head["tokens_per_second_calibrated"] <= head["tokens_per_second"]
    assert plain["tokens_per_second_calibrated"] == plain["tokens_per_second"]
    assert main(["plan", "--model", "demo", *given]) == 0
    assert "at the paper's acceptance" in capsys.readouterr().out
    for other in (("--model", "demo", "--draft", "ngram"), ("--model", str(home / "model"))):
        found = planned(capsys, *other, *given)["predictions"]
        assert {p["tokens_per_second_calibrated"] for p in found} == {None}


def test_a_plan_with_predictions(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", str(home / "model"), "--devices", f"{home}/nano.toml:3",
                    "--context", "500", "--at-once", "2", "--strategies", "flowspec,chunk_pp", "--dtype",
                    "fp16")
    assert (found["model"], found["dtype"], found["context"]) == ("model", "fp16", 500)
    assert [p["draft"] for p in found["predictions"]] == ["eagle2", "eagle2"]
    boards = found["boards"]
    assert [(b["name"], b["role"], b["layers"], b["stage_ms"]) for b in boards] == [
        ("nano-1", "D0", None, None), ("nano-2", "V1", [0, 2], 12.0), ("nano-3", "V2", [2, 4], 12.0)]
    for b in boards:
        assert b["weights_mb"] + b["kv_mb"] + b["process_mb"] + b["headroom_mb"] == pytest.approx(
            b["usable_mb"], abs=0.01)
    assert found["slowest_stage_ms"] == 12.0
    assert [p["strategy"] for p in found["predictions"]] == ["flowspec", "chunk_pp"]
    assert found["predictions"][1]["speedup"] == 1
    assert all(p["tokens_per_second"] > 0 for p in found["predictions"])
    assert found["predictions"][0]["label"] == (
        "virtual time, 500 tokens of context, acceptance of model itself")
    assert found["one_board"]["board"] == "nano-1"
    assert "nano-1 alone makes" in found["one_board"]["text"]
    assert found["one_board"]["enough"] == (
        found["one_board"]["tokens_per_second"] >= max(p["tokens_per_second"] for p in found["predictions"]))
    assert not found["estimated"]
    assert found["alternatives"][0]["tokens_per_second"] == max(
        a["tokens_per_second"] for a in found["alternatives"])
    [chosen] = [a for a in found["alternatives"] if a["chosen"]]
    assert chosen["boards"] == ["nano-1", "nano-2", "nano-3"]
    assert chosen["tokens_per_second"] == max(p["tokens_per_second"] for p in found["predictions"])
    assert {a["dtype"] for a in found["alternatives"]} == {"fp16", "int4"}


def test_a_mixed_cluster_names_the_subset_that_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    """The case of an AGX Orin and four Nanos: the AGX with a Nano that drafts, and what else was compared."""
    mixed = ("--model", "llama-2-7b", "--devices", "agx-orin-64gb", "--devices", "orin-nano-8gb:4")
    found = planned(capsys, *mixed, "--no-predict", "--dtype", "fp16")
    assert [(b["name"], b["role"]) for b in found["boards"] if b["role"]] == [
        ("orin-nano-8gb-1", "D0"), ("agx-orin-64gb", "V1")]
    assert all(b["why"] for b in found["boards"] if not b["role"])
    compared = {(tuple(sorted(a["boards"])), a["dtype"]) for a in found["alternatives"]}
    everything = ("agx-orin-64gb", *(f"orin-nano-8gb-{i}" for i in range(1, 5)))
    assert {(("agx-orin-64gb",), "fp16"), (everything, "fp16"), (("agx-orin-64gb",), "int4")} <= compared
    many = planned(capsys, *mixed, "--no-predict", "--dtype", "fp16", "--at-once", "8")
    assert sum(b["role"] is not None for b in many["boards"]) == 5
    other = planned(capsys, *mixed, "--no-predict")
    assert other["dtype"] == other["recommended"]["dtype"] == "int4"
    assert "int4 is ranked" in other["recommended"]["dtype_why"]


def test_a_profile_that_fits_one_element_type_only_is_planned(home: Path, capsys: pytest.CaptureFixture[str]
                                                              ) -> None:
    """A profile that does not say how large its layers are cannot be scaled to the int4 that is compared."""
    fixed = profile(name="fixed", layers=4, hidden_width=32, layer_mb=None)
    (home / "fixed.toml").write_text(render(fixed))
    found = planned(capsys, "--model", str(home / "model"), "--no-predict", "--devices",
                    f"{home}/fixed.toml:3")
    assert {a["dtype"] for a in found["alternatives"]} == {"fp16"}


def test_contexts_are_charged(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-3.1-8B has 4,096 bytes of cache a row and layer, an Orin NX reads 84 GB a second."""
    given = ("--model", "llama-3.1-8b", "--devices", "orin-nx-16gb:4", "--no-predict", "--dtype", "fp16",
             "--context")
    short, long = planned(capsys, *given, "2048"), planned(capsys, *given, "100000")
    layer = 4096 / 84e9 * 1e3
    for found, context in ((short, 2048), (long, 100_000)):
        most = max(b["layers"][1] - b["layers"][0] for b in found["boards"] if b["layers"])
        assert found["context_ms"] == pytest.approx(most * context * layer, rel=1e-3)
    added = long["slowest_stage_ms"] - short["slowest_stage_ms"]
    assert added == pytest.approx(long["context_ms"] - short["context_ms"], rel=1e-3)
    assert long["draft_device"]["draft_pass_ms"] > short["draft_device"]["draft_pass_ms"]


def test_n_grams_need_no_room_on_d0_but_lm_head(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--model", str(home / "bare" / "config.json"), "--devices", f"{home}/nano.toml:3",
             "--context", "256", "--dtype", "fp16", "--no-predict")
    head, ngram = (planned(capsys, *given, "--draft", draft) for draft in ("head", "ngram"))
    size = model_bytes(str(home / "bare" / "config.json"), "fp16")
    for found, weights in ((head, size.d0_weights), (ngram, size.lm_head)):
        assert found["boards"][0]["weights_mb"] == pytest.approx(weights / 1e6, abs=1e-3)
    assert ngram["boards"][0]["kv_mb"] == 0
    assert ngram["draft_device"]["draft_pass_ms"] == 0
    assert (head["estimated"], ngram["estimated"]) == (True, False)
    [note] = head["notes"]
    assert note.startswith("bare has no EAGLE head: its size is taken to be one layer and fc; ")


def test_what_other_programs_need_is_said_with_one_board(capsys: pytest.CaptureFixture[str]) -> None:
    seven = ("--model", "llama-2-7b", "--dtype", "fp16", "--no-predict", "--devices")
    found = planned(capsys, *seven, "orin-nano-8gb:5")
    others = found["other_programs"]
    assert found["one_board"] is None  # not in fp16
    assert others["boards"] == [f"orin-nano-8gb-{i}" for i in range(1, 6)]
    weights = 6_738_415_616 * 4.5 / 8  # the model's parameters
    assert others["needs_mb"] == pytest.approx((weights + 2048 * 32 * 16_384) / 1e6 + 400, rel=1e-3)
    read = weights + 2048 * 32 * 16_384 - 32_000 * 4096 * 4.5 / 8  # all but the embeddings
    assert others["tokens_per_second"] == pytest.approx(55e9 / read, rel=1e-3)
    assert main(["plan", *seven, "orin-nano-8gb"]) == 2
    assert "other engines hold llama-2-7b in 4 bits on one board" in capsys.readouterr().err


def test_tables_for_people(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(home / "model"), "--devices", f"{home}/nano.toml:3", "--devices",
                 f"{home}/full.toml", "--dtype", "int4", "--strategies", "chunk_pp"]) == 0
    out = capsys.readouterr().out
    for text in ("model, int4 (lm_head int8), 2048 tokens", "D0", "V1", "V2", "headroom MB",
                 "The slowest stage takes", "left out: full: too little memory for one layer: ",
                 "VIRTUAL TIME, 2048 tokens of context, acceptance of model itself", "chunk_pp", "1.00×",
                 "nano-1 alone makes", "estimated: profile nano is scaled from layers of",
                 " ms for a segment of ", "; all stages and links together take "):
        assert text in out, text


def test_several_requests_at_once_take_room_for_their_drafts(home: Path, capsys: pytest.CaptureFixture[str]
                                                             ) -> None:
    """What a cluster that serves so many may hold (``draft_session.cache_rows``), in every layer."""
    given = ("--model", str(home / "model"), "--devices", f"{home}/nano.toml:3", "--context", "500",
             "--no-predict", "--dtype", "fp16")
    one, three = planned(capsys, *given), planned(capsys, *given, "--at-once", "3")
    assert (one["at_once"], three["at_once"]) == (1, 3)
    row = 2 * model_bytes(str(home / "model"), "fp16").kv_row
    for count, found in ((1, one), (3, three)):
        rows = cache_rows(500, count, Params(), 2)
        assert found["boards"][1]["kv_mb"] == pytest.approx(rows * row / 1e6, abs=1e-3)
    assert main(["plan", *given, "--at-once", "3"]) == 0
    assert "500 tokens of context, 3 requests at once" in capsys.readouterr().out


def test_a_config_alone_takes_recorded_texts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demonstration's; and chats of six kinds for the range."""
    given = ("--model", str(home / "bare" / "config.json"), "--devices", f"{home}/nano.toml:3", "--context", "256",
             "--strategies", "flowspec,autoregressive", "--dtype", "fp16", "--draft", "head")
    found = planned(capsys, *given)
    drafted, plain = found["predictions"]
    assert drafted["label"].endswith("acceptance of the demonstration model")
    assert drafted["tokens_per_second_calibrated"] > 0
    assert (plain["draft"], plain["by_kind"]) == ("none", None)
    assert found["kinds_of"] == "chats of smollm2-135m with its head"
    kinds = drafted["by_kind"]
    assert [*kinds] == ["chat", "code", "mathematics", "instructions", "summary", "questions"]
    assert main(["plan", *given]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    span = f"{min(kinds.values()):.1f} to {max(kinds.values()):.1f}"
    assert f"(expect {span} by kind of text, as in chats of" in first
    assert any(line.startswith("flowspec in chats of smollm2-135m with its head: chat ") for line in others)
    over, _ = planned(capsys, *given, "--recording", str(shipped_recording("smollm2-135m")))["predictions"]
    assert over["label"].endswith(f"acceptance of smollm2-135m with its EAGLE-2 head, recorded: {', '.join(kinds)}")
    assert over["tokens_per_second"] == pytest.approx(sum(over["by_kind"].values()) / 6)


def test_a_models_own_mtp_layer_has_to_be_named(home: Path, tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    with_mtp(family_model("qwen3.5", tmp_path / "target"))
    given = ("--model", str(tmp_path), "--devices", "orin-nano-8gb:3", "--context", "64", "--no-predict")
    found = planned(capsys, *given)
    [note] = [note for note in found["notes"] if "MTP" in note]
    assert "used only if named: --draft mtp" in note
    assert not any("MTP" in note for note in planned(capsys, *given, "--draft", "ngram")["notes"])
    assert (found["draft"]["kind"], found["draft"]["origin"]) == ("mtp", "here")
    assert any(" draft=mtp " in command for command in found["recommended"]["next"])
    assert planned(capsys, *given, "--draft", "mtp")["draft_device"] == found["draft_device"]


def test_every_line_of_a_plan_names_one_draft(capsys: pytest.CaptureFixture[str]) -> None:
    """qwen3.6-27b, whose only draft model is its MTP layer: no EAGLE head, and the layer's bytes on D0."""
    given = ("--model", "qwen3.6-27b", "--devices", "orin-nano-8gb-super:5", "--no-predict")
    size = model_bytes("qwen3.6-27b", "int4", draft="mtp")
    d0 = planned(capsys, *given)["boards"][0]
    assert d0["weights_mb"] == pytest.approx(size.d0_weights / 1e6, abs=1e-3)
    assert main(["plan", *given]) == 0
    out = capsys.readouterr().out
    assert "EAGLE" not in out
    assert "Drafts with its own MTP layer (not here yet)." in out
    assert main(["plan", *given, "--draft", "ngram"]) == 0
    out = capsys.readouterr().out
    assert "MTP" not in out
    assert " draft=ngram " in out


def test_a_block_drafter_is_charged_one_pass_for_all_depths() -> None:
    """Its level of a tree is an eighth of the pass that --heads lists; an EAGLE head's is a whole pass."""
    size = model_bytes("qwen3-8b", "fp16")
    nano = load_profile("orin-nano-8gb")
    costs = head_costs("qwen3-8b", nano)
    for kind in map(DRAFT_KINDS.__getitem__, ("eagle2", "dflash", "dspark")):
        head = usual_heads_of("qwen3-8b")[2][kind.name]
        factor, ranked, count = ranking_bytes(kind, head, 151_936, 4_096, 2, "16bit")  # EAGLE has a candidate head
        own = replace(size, planned=PlannedDraft(kind, "here"), draft=head.part.nbytes(2, None) + factor,
                      draft_unread=0, draft_lm_head=ranked, candidates=count)
        [cost] = [c for c in costs if (c.kind, c.bits) == (kind.name, "16bit")]
        d0 = scaled(nano, own)[0]
        level = level_seconds(d0, kind, 0) * 1e3
        assert level == pytest.approx(cost.tree_ms / 8, rel=0.07), kind.name  # looked-up rows are not read
        assert charged_as(d0, kind, "eagle2").draft_seconds("eagle2") * 1e3 == pytest.approx(level)


def test_a_model_without_a_head_drafts_by_ngrams(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = ("--model", str(home / "bare" / "config.json"), "--devices", f"{home}/nano.toml:3", "--context",
            "256", "--no-predict")
    found = planned(capsys, *bare)
    assert (found["draft"]["kind"], found["draft"]["why"]) == ("ngram", "no draft head is known for it")
    assert any(" draft=ngram " in command for command in found["recommended"]["next"])
    assert main(["plan", *bare, "--draft", "mtp"]) == 2
    assert "draft mtp: " in capsys.readouterr().err


def test_the_first_lines_answer_what_to_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--model", str(home / "model"), "--devices", f"{home}/agx.toml:2", "--devices",
             f"{home}/full.toml", "--context", "500", "--strategies", "flowspec_plus")
    found = planned(capsys, *given)
    best = found["recommended"]
    assert best["tokens_per_second"] == max(a["tokens_per_second"] for a in found["alternatives"]
                                            if a["dtype"] == best["dtype"])
    [marked] = [a for a in found["alternatives"] if a["recommended"]]
    assert (marked["boards"], marked["dtype"]) == (best["boards"], best["dtype"])
    assert {*best["boards"], *(left["name"] for left in best["left_out"])} == {"agx-1", "agx-2", "full"}
    assert best["first_token_s"] > 0
    assert best["next"]
    assert main(["plan", *given]) == 0
    first, why, boards, *rest = capsys.readouterr().out.splitlines()[:10]
    assert first.startswith(f"Run model in {best['dtype']} on {len(best['boards'])} of your 3 boards, with ")
    assert "PREDICTED " in first
    assert f" {rate_text(best['tokens_per_second'])} tokens/s" in first
    assert why.startswith(f"{best['dtype']}: ")
    assert boards.startswith(f"Boards: {best['boards'][0]} ")
    assert any(line.startswith("Left out: ") and "full" in line for line in rest)
    assert any(line.startswith("Next: flowspec ") for line in rest)


def test_the_next_commands_make_the_file_what_is_planned(home: Path, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my lab.toml"
    file.write_text('[cluster]\nname = "lab"\n' + "".join(
        f'[[device]]\nname = "{name}"\naddress = "10.0.0.{name}"\nprofile = "orin-nano-8gb"\n'
        for name in "12345"))
    found = planned(capsys, "--model", "qwen3-8b", "--devices", str(file), "--no-predict", "--context", "500",
                    "--draft", "ngram")
    changes = [command for command in found["recommended"]["next"] if " deploy set " in command]
    assert len(changes) == 1
    program, *arguments = shlex.split(changes[0])
    assert (program, main(arguments)) == ("flowspec", 0)
    has = load_inventory(file).cluster
    assert (has.model, has.dtype, has.context, has.at_once, has.draft) == (
        "qwen3-8b", found["dtype"], 500, 1, "ngram")


def test_the_next_commands_of_a_config_are_of_its_directory(home: Path, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    """What shards a model takes its directory, though ``plan`` takes config.json; an untrained head is trained."""
    checkpoint = Path(shutil.copytree(home / "model" / "target", tmp_path / "my-ckpt"))
    given = ("--model", str(checkpoint / "config.json"), "--devices", f"{home}/nano.toml", "--no-predict",
             "--context", "64", "--dtype", "int4")
    found = planned(capsys, *given, "--draft", "ngram")["recommended"]["next"]
    assert found[0] == f"flowspec models shard --model {checkpoint} --stages 1 --dtype int4 --out my-ckpt-int4"
    assert found[1].startswith("flowspec serve --model my-ckpt-int4 --draft ngram ")
    train, shard, _ = planned(capsys, *given, "--draft", "head")["recommended"]["next"]
    assert train.startswith(f"flowspec models train-head --model {checkpoint} --kind eagle2 --data chats.jsonl --out "
                            "my-ckpt-eagle2 ")
    assert " --draft my-ckpt-eagle2 " in shard
    assert not any(refusal(shlex.split(command.partition("   (")[0])[1:]) for command in (train, shard))


def test_figures_have_no_more_digits_than_they_are_worth() -> None:
    rates = (0.346, 73.56, 999.96, 40898.94)
    assert [rate_text(rate) for rate in rates] == ["0.35", "73.6", "1,000", "40,899"]
    assert [rate_text(rate, 2) for rate in rates] == ["0.35", "73.56", "1,000", "40,899"]


def test_16_bits_are_taken_unless_int4_is_faster() -> None:
    """Quality first, within 5 %; what does not fit is not taken."""
    fp16, int4 = (SimpleNamespace(problem=SimpleNamespace(size=SimpleNamespace(dtype=name)))
                  for name in ("fp16", "int4"))
    for full, packed, wanted in ((10.0, 10.4, "fp16"), (10.0, 11.0, "int4"), (12.0, 10.0, "fp16")):
        rates = {"fp16": full, "int4": packed}
        chosen, why = Cases(int4, [fp16], True).choose(  # type: ignore[arg-type, list-item]
            lambda case, rates=rates: rates[case.problem.size.dtype])
        assert chosen.problem.size.dtype == wanted
        assert f"{full:.1f} tokens/s, int4 {packed:.1f}" in why
    alone = Cases(int4, [], True, {"fp16": DoesNotFit("too large")})  # type: ignore[arg-type]
    assert alone.choose(lambda case: 1.0) == (int4, "fp16 does not fit on these boards")


def test_the_smallest_board_is_not_beside_one_that_is_enough(home: Path, capsys: pytest.CaptureFixture[str]
                                                            ) -> None:
    given = ("--model", "llama-2-7b", "--dtype", "int4", "--no-predict", "--devices")
    assert main(["plan", *given, "thor-t5000"]) == 0
    out = capsys.readouterr().out
    assert "thor-t5000 alone holds everything" in out
    assert "smallest" not in out.lower()
    small = planned(capsys, "--model", str(home / "model"), "--devices", f"{home}/agx.toml", "--no-predict",
                    "--dtype", "fp16")
    assert small["smallest_single_board"]["profile"] in ("agx", "orin-nano-8gb", "orin-nano-8gb-super")


def test_boards_without_a_profile_are_estimated(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (home / "cluster.toml").read_text()
    text = "".join(line for line in text.splitlines(keepends=True) if "role" not in line)
    file = home / "laptops.toml"
    file.write_text(text.replace('profile = "nano.toml"\n', "").replace(
        'address = "10.0.0.3"', 'address = "10.0.0.3"\nmemory_mb = 32000\ncores = 8'))
    given = ("--model", "llama-2-7b", "--devices", str(file), "--no-predict")
    agx = home / "agx.toml"
    measured = agx.read_text()
    agx.write_text(render(load_profile("agx-orin-64gb")))
    try:
        found = planned(capsys, *given)
        layers = {b["name"]: b["layers"][1] - b["layers"][0] for b in found["boards"] if b["layers"]}
        assert layers["two"] == max(layers.values())  # the AGX
        assert {b["name"] for b in found["boards"] if b["assumed"]} == {"one", "three"}
        assert main(["plan", *given]) == 0
        assert "ESTIMATED, not measured: " in capsys.readouterr().out
    finally:
        agx.write_text(measured)
    file.write_text("".join(line for line in text.splitlines(keepends=True) if "profile" not in line))
    assert main(["plan", *given]) == 2
    assert "flowspec device profile --cluster" in capsys.readouterr().err


def test_one_board_by_itself(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", str(home / "model"), "--devices", f"{home}/agx.toml")
    [only] = found["boards"]
    assert (only["role"], only["layers"], only["process_mb"]) == ("D0+V1", [0, 4], 500 + D0_MB)
    assert found["one_board"]["enough"]
    assert found["one_board"]["text"].startswith("one board is enough: agx alone makes ")
    assert found["predictions"] == []
    assert found["slowest_stage_ms"] is None


def test_a_full_board_is_said_in_the_first_lines(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--model", "qwen3-8b", "--no-predict", "--devices", "orin-nano-8gb:1"]
    [only] = planned(capsys, *given[1:])["boards"]
    assert 0 <= only["headroom_mb"] < 100
    assert main(given) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines()[:7] if "usable memory" in line]
    assert f"on orin-nano-8gb ({only['headroom_mb']:.0f} MB): run nothing else there" in line
    assert main([*given, "--context", "512"]) == 0
    assert "Hardly any usable memory" not in capsys.readouterr().out


def test_one_board_where_no_pipeline_fits(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", str(home / "model"), "--devices", f"{home}/full.toml", "--devices",
                    f"{home}/agx.toml", "--no-predict")
    assert [(b["name"], b["role"]) for b in found["boards"]] == [("agx", "D0+V1"), ("full", None)]
    assert found["one_board"].pop("plain_tokens_per_second") > 0
    assert found["one_board"] == {"board": "agx", "text": "agx alone holds everything", "strategy": None,
                                  "tokens_per_second": None, "enough": None}


@pytest.mark.parametrize(("changes", "boards"), [
    ({}, [("two", "D0", None), ("one", "V1", [0, 1]), ("three", "V2", [1, 4])]),
    ({'"one"': '"one"\nlayers = [0, 3]', '"three"': '"three"\nlayers = [3, 4]'},
     [("two", "D0", None), ("one", "V1", [0, 3]), ("three", "V2", [3, 4])]),
    ({'role = "verify"': 'role = "auto"'},
     [("two", "D0", None), ("one", "V1", [0, 1]), ("three", "V2", [1, 4])]),
    ({'role = "verify"': "", 'role = "draft"': ""},
     [("one", "D0", None), ("two", "V1", [0, 2]), ("three", "V2", [2, 4])]),
])
def test_a_plan_is_what_a_deployment_would_be(home: Path, capsys: pytest.CaptureFixture[str],
                                              changes: dict[str, str], boards: list[Any]) -> None:
    text = (home / "cluster.toml").read_text().replace("[[dev", 'model = "model"\ncontext = 2000\n[[dev', 1)
    third = text.rindex("nano.toml")
    text = text[:third] + "agx.toml" + text[third + len("nano.toml"):]
    for old, new in changes.items():
        text = text.replace(old, new)
    file = home / "changed.toml"
    file.write_text(text)
    found = planned(capsys, "--model", str(home / "model"), "--devices", str(file), "--no-predict",
                    "--context", "2000", "--at-once", "2", "--dtype", "fp16")
    assert [(b["name"], b["role"], b["layers"]) for b in found["boards"]] == boards
    decided = resolve_deployment(load_inventory(file), file)
    assert [device.name for device in decided.boards] == [name for name, _, _ in boards]
    assert [list(layers) for layers in decided.ranges] == [layers for _, _, layers in boards[1:]]


def test_prompts_by_length(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A longer context leaves less memory for a prompt's segments: its first token comes no sooner."""
    given = ("--model", "qwen3-32b", "--dtype", "int4", "--devices", "orin-nano-8gb-super:5", "--strategies",
             "autoregressive")
    short, long, longest = planned(capsys, *given)["first_tokens"]
    assert [found["prompt_tokens"] for found in (short, long, longest)] == [512, 4096, 32_768]
    assert short["why"] == ""
    assert long["why"] == "with --context 4097 or more, for prompt and answer"
    assert longest["seconds"] is None
    assert "lacks" in longest["why"]
    wider = planned(capsys, *given, "--context", "5000")["first_tokens"]
    assert short["seconds"] <= wider[0]["seconds"]
    assert short["seconds"] < long["seconds"] <= wider[1]["seconds"]
    assert wider[2]["seconds"] is None
    assert wider[1]["why"] == ""
    tiny = planned(capsys, "--model", str(home / "model"), "--devices", f"{home}/nano.toml:3", "--strategies",
                   "autoregressive", "--context", "64")["first_tokens"]
    assert "was made for" in tiny[-1]["why"]
    assert main(["plan", *given]) == 0
    assert "the first token of a prompt alone, by its length:" in capsys.readouterr().out

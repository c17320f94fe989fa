"""``flowspec plan`` from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from familykit import family_model
from mtpkit import with_mtp
from plankit import profile
from tiny_dir import tiny_model_dir

from flowspec_edge.cli.boards import plan
from flowspec_edge.cli.main import main
from flowspec_edge.device_profile import render
from flowspec_edge.fleet.deploy.resolve import resolve_deployment
from flowspec_edge.fleet.inventory import load_inventory
from flowspec_edge.fleet.planning.model_size import model_bytes
from flowspec_edge.runtime.draft_device.capacity import cache_rows
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
                    "--context", "500", "--at-once", "2", "--strategies", "flowspec,chunk_pp")
    assert (found["model"], found["dtype"], found["context"]) == ("model", "fp16", 500)
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
    found = planned(capsys, *mixed, "--no-predict")
    assert [(b["name"], b["role"]) for b in found["boards"] if b["role"]] == [
        ("orin-nano-8gb-1", "D0"), ("agx-orin-64gb", "V1")]
    assert all(b["why"] for b in found["boards"] if not b["role"])
    compared = {(tuple(sorted(a["boards"])), a["dtype"]) for a in found["alternatives"]}
    everything = ("agx-orin-64gb", *(f"orin-nano-8gb-{i}" for i in range(1, 5)))
    assert {(("agx-orin-64gb",), "fp16"), (everything, "fp16"), (("agx-orin-64gb",), "int4")} <= compared
    many = planned(capsys, *mixed, "--no-predict", "--at-once", "8")
    assert sum(b["role"] is not None for b in many["boards"]) == 5
    other = planned(capsys, *mixed, "--no-predict", "--dtype", "auto")
    assert other["dtype"] == "int4"


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
    given = ("--model", "llama-3.1-8b", "--devices", "orin-nx-16gb:4", "--no-predict", "--context")
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
             "--context", "256", "--no-predict")
    head, ngram = planned(capsys, *given), planned(capsys, *given, "--draft", "ngram")
    size = model_bytes(str(home / "bare" / "config.json"), "fp16")
    for found, weights in ((head, size.d0_weights), (ngram, size.lm_head)):
        assert found["boards"][0]["weights_mb"] == pytest.approx(weights / 1e6, abs=1e-3)
    assert ngram["boards"][0]["kv_mb"] == 0
    assert ngram["draft_device"]["draft_pass_ms"] == 0
    assert not ngram["estimated"]  # no head is assumed


def test_what_other_programs_need_is_said_with_one_board(capsys: pytest.CaptureFixture[str]) -> None:
    seven = ("--model", "llama-2-7b", "--no-predict", "--devices")
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
    capsys.readouterr()
    assert main(["plan", "--model", str(home / "model"), "--devices", f"{home}/nano.toml:3", "--devices",
                 f"{home}/full.toml", "--dtype", "int4", "--strategies", "chunk_pp"]) == 0
    out = capsys.readouterr().out
    for text in ("model, int4 (lm_head int4), 2048 tokens", "D0", "V1", "V2", "headroom MB",
                 "The slowest stage takes", "left out: full: too little memory for one layer: needs",
                 "VIRTUAL TIME, 2048 tokens of context, acceptance of model itself", "chunk_pp", "1.00×",
                 "nano-1 alone makes", "estimated: profile nano is scaled from layers of"):
        assert text in out, text


def test_several_requests_at_once_take_room_for_their_drafts(home: Path, capsys: pytest.CaptureFixture[str]
                                                             ) -> None:
    """What a cluster that serves so many may hold (``draft_session.cache_rows``), in every layer."""
    given = ("--model", str(home / "model"), "--devices", f"{home}/nano.toml:3", "--context", "500",
             "--no-predict")
    one, three = planned(capsys, *given), planned(capsys, *given, "--at-once", "3")
    assert (one["at_once"], three["at_once"]) == (1, 3)
    row = 2 * model_bytes(str(home / "model"), "fp16").kv_row
    for count, found in ((1, one), (3, three)):
        rows = cache_rows(500, count, Params(), 2)
        assert found["boards"][1]["kv_mb"] == pytest.approx(rows * row / 1e6, abs=1e-3)
    assert main(["plan", *given, "--at-once", "3"]) == 0
    assert "500 tokens of context, 3 requests at once" in capsys.readouterr().out


def test_a_config_alone_takes_the_demonstration_models_tokens(home: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", str(home / "bare" / "config.json"), "--devices", f"{home}/nano.toml:3",
                    "--context", "256", "--strategies", "autoregressive")
    assert found["predictions"][0]["label"].endswith("acceptance of the demonstration model")
    assert found["estimated"]
    [note] = found["notes"]
    assert note.startswith("bare has no EAGLE head: its size is taken to be one layer and fc; ")


def test_a_models_own_mtp_layer_has_to_be_named(home: Path, tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    with_mtp(family_model("qwen3.5", tmp_path / "target"))
    given = ("--model", str(tmp_path), "--devices", "orin-nano-8gb:3", "--context", "64", "--no-predict")
    [note] = [note for note in planned(capsys, *given)["notes"] if "MTP" in note]
    assert "used only if named: --draft mtp" in note
    assert not any("MTP" in note for note in planned(capsys, *given, "--draft", "ngram")["notes"])


def test_one_board_by_itself(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", str(home / "model"), "--devices", f"{home}/agx.toml")
    [only] = found["boards"]
    assert (only["role"], only["layers"], only["process_mb"]) == ("D0+V1", [0, 4], 500)
    assert found["one_board"]["enough"]
    assert found["one_board"]["text"].startswith("one board is enough: agx alone makes ")
    assert found["predictions"] == []
    assert found["slowest_stage_ms"] is None


def test_one_board_where_no_pipeline_fits(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", str(home / "model"), "--devices", f"{home}/full.toml", "--devices",
                    f"{home}/agx.toml", "--no-predict")
    assert [(b["name"], b["role"]) for b in found["boards"]] == [("agx", "D0+V1"), ("full", None)]
    assert found["one_board"].pop("plain_tokens_per_second") > 0
    assert found["one_board"] == {"board": "agx", "text": "agx alone holds everything", "strategy": None,
                                  "tokens_per_second": None, "enough": None}


def test_a_cluster_keeps_its_draft_device(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", str(home / "model"), "--devices", f"{home}/cluster.toml",
                    "--no-predict")
    assert [(b["name"], b["role"], b["profile"]) for b in found["boards"]] == [
        ("two", "D0", "agx"), ("one", "V1", "nano"), ("three", "V2", "nano")]


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
                    "--context", "2000", "--at-once", "2")
    assert [(b["name"], b["role"], b["layers"]) for b in found["boards"]] == boards
    decided = resolve_deployment(load_inventory(file), file)
    assert [device.name for device in decided.boards] == [name for name, _, _ in boards]
    assert [list(layers) for layers in decided.ranges] == [layers for _, _, layers in boards[1:]]


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "give --devices"),
    (("--devices", "no-such-board"), "no profile 'no-such-board'"),
    (("--devices", "HOME/nano.toml:2", "--context", "99999"), "--context 99999 is more than the 2048 tokens"),
    (("--devices", "HOME/nano.toml:2", "--strategies", "megatron"), "megatron is tensor parallel"),
    (("--devices", "HOME/nano.toml:2", "--strategies", "magic"), "no strategy 'magic'"),
    (("--devices", "HOME/full.toml"), "full alone lacks"),
    (("--devices", "HOME/full.toml:3"), "model in fp16 with 2048 tokens of context needs"),
])
def test_errors_are_one_line(home: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...],
                                   message: str) -> None:
    capsys.readouterr()
    given = [text.replace("HOME", str(home)) for text in arguments]
    assert main(["plan", "--model", str(home / "model"), *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"flowspec: error: {message}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("command", [
    ["plan", "--devices", "orin-nano-8gb:2", "--model"], ["generate", "x", "--model"], ["models", "head"],
    ["models", "shard", "--stages", "2", "--out", "out", "--model"]])
@pytest.mark.parametrize("given", ["files", "files/model-q4.gguf", "files/nothing.gguf"])
def test_gguf_files_are_one_line_in_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str], command: list[str],
                                                  given: str) -> None:
    """Also by a path that reads like OWNER/NAME on the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/model-q4.gguf").touch()
    assert main([*command, given]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "GGUF" in err
    assert given in err
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    assert "flowspec plan --model llama-2-7b --devices orin-nano-8gb:5" in capsys.readouterr().out

"""``models train-head`` from end to end: any family, resumed, refused; and its heads draft losslessly."""

import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from kits.command_options import refusal
from kits.error_lines import error_line
from kits.tiny_model_dir import tiny_model_dir
from kits.tiny_models import tiny_llama, tiny_model, tiny_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowspec_edge.cli.main import main
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drafting.eagle.eagle2 import load_head
from flowspec_edge.drafting.eagle.eagle3_formats import load_head3
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.lab.training.eagle import Eagle2, Eagle3, new_head, new_head3
from flowspec_edge.lab.training.heads import train_head, unroll
from flowspec_edge.lab.training.loop import LoopOptions, window_batch
from flowspec_edge.lab.training.target import load_target
from flowspec_edge.lab.training.train_head import HeadOptions, recipe_for, train_head_part
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.stage.families.rotary import Rotary
from flowspec_edge.strategies.params import Params

VOCAB = 300
DATE = "2026-01-02"
FAMILIES = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}}),
}
KINDS = ("eagle2", "eagle3")


def options(data, **changes):
    return replace(HeadOptions(data=(Path(data),), steps=2, quick=True), **changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(Path(__file__).read_text())
    return path


@pytest.fixture
def model(tmp_path):
    tiny_llama(tmp_path / "model" / "target", layers=3, hidden=32, vocab=VOCAB)
    return tmp_path / "model"


def card(path):
    lines = (line.split(" = ", 1) for line in (path / "card.toml").read_text().splitlines())
    return dict(lines)


@pytest.mark.slow
@pytest.mark.parametrize("family", [  # Mistral's layers are Llama's
    pytest.param(family, marks=[pytest.mark.soak] if family == "mistral" else []) for family in FAMILIES])
def test_a_head_for_every_family_drafts_losslessly(family, tmp_path, data):
    """Text as transformers' own generate makes it, with drafts of a head trained a little."""
    kind, extra = FAMILIES[family]
    target = tiny_model(kind, tmp_path / "model" / "target", hidden=32, vocab=VOCAB, **extra)
    model = resolve_model(tmp_path / "model")
    prompt = AutoTokenizer.from_pretrained(target)("def f(x):")["input_ids"]
    reference = AutoModelForCausalLM.from_pretrained(target)
    want = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt):]
    end = min(model.stop_ids)
    for kind in (*KINDS, "dspark") if family == "llama" else KINDS:
        drafted = 200 if kind == "eagle3" else None
        train_head_part(model, kind, options(data, draft_vocab=drafted), DATE)
        facts = card(model.path / kind)
        assert facts["summary"].endswith(" for one target, trained by flowspec\"")
        assert facts["date"] == f'"{DATE}"'
        assert facts["steps"] == "2"
        assert facts["agreement_greedy"].count(",") == 5
        cluster = VirtualCluster(model.path, 2, load_profile("paper-7b"))
        result = cluster.generate(Request(prompt, "flowspec", 12, params=Params(draft=kind),
                                          stop_ids=model.stop_ids))
        ended = [end] if result.finish_reason == "stop" else []
        assert result.tokens + ended == want.tolist()
    head = load_head(model.path / "eagle2", reference.get_input_embeddings().weight, torch.float32)
    layer = reference.model.layers[0]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        own, targets = getattr(head.layers[0].self_attn, name), getattr(layer.self_attn, name)
        assert own.weight.shape == targets.weight.shape
        assert (own.bias is None) == (targets.bias is None)
    assert turns_of(head.config) == turns_of(model.decoder)
    assert head.layers[0].post_attention_layernorm.eps == reference.config.rms_norm_eps
    head3 = load_head3(model.path / "eagle3", reference.get_input_embeddings().weight, torch.float32)
    assert head3.midlayer.self_attn.o_proj.weight.shape == layer.self_attn.o_proj.weight.shape
    assert turns_of(head3.config) == turns_of(model.decoder)
    assert len(head3.target_ids()) == 200


def turns_of(config: DecoderConfig) -> list[float]:
    return Rotary(config, torch.device("cpu"))(torch.tensor([1, 50]), "", torch.float32).cos.flatten().tolist()


class Stops(Exception):
    """Ends a training between two steps."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_broke_off_ends_with_the_same_weights(kind, model, tmp_path):
    """And the target reads every window once; after a break, only what the last checkpoint did not have."""
    target = load_target(resolve_model(model))
    recipe = recipe_for(kind, HeadOptions(quick=True, steps=8, depth=3))
    text = torch.randint(0, VOCAB, (900,), generator=torch.Generator().manual_seed(1))  # 14 windows
    loop = LoopOptions(checkpoint_every_s=0.0, compile=False)

    def run(work, losses=1000):
        work.mkdir(exist_ok=True)
        torch.manual_seed(0)

        class Counted(Eagle2 if kind == "eagle2" else Eagle3):
            left, windows = losses, 0

            def read(self, rows):
                if rows.shape[1] == recipe.window + 1:
                    Counted.windows += len(rows)
                return super().read(rows)

            def step_loss(self, *batch):
                if not self.left:
                    raise Stops
                self.left -= 1
                return super().step_loss(*batch)

        made = new_head(target) if kind == "eagle2" else new_head3(target, torch.arange(0, VOCAB, 2))
        student = Counted(made, target)
        try:
            train_head(recipe, student, text, text, work, 0, loop)
        except Stops:
            assert losses < 1000
        return student

    whole = run(tmp_path / "whole")
    broken = run(tmp_path / "broken", losses=9)  # two a step
    checkpoint = torch.load(tmp_path / "broken" / f"{kind}.pt", weights_only=True)
    assert checkpoint["step"] == 4
    assert not any("embed_tokens" in name for name in checkpoint["model"])  # the target's, and frozen
    again = run(tmp_path / "broken")
    assert whole.left < again.left  # it went on, and did not begin again
    assert whole.windows == 14
    assert 14 <= broken.windows + again.windows <= 14 + 4  # a step's
    for a, b in zip(whole.head.parameters(), again.head.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {path.name for path in (tmp_path / "broken").iterdir()} == {f"{kind}.pt"}


def test_what_cannot_be_trained_is_refused_before_it_starts(model, tmp_path, data):
    found = resolve_model(model)
    train_head_part(found, "eagle3", options(data), DATE, out=tmp_path / "head", work=tmp_path / "work")
    changed = tmp_path / "text.txt"
    changed.write_text(data.read_text() + "more")
    for other in (options(data, steps=3), options(data, draft_vocab=30), options(changed)):
        with pytest.raises(UsageError, match="work of another model, recipe or data"):
            train_head_part(found, "eagle3", other, DATE, work=tmp_path / "work")
    with pytest.raises(UsageError, match=r"--draft-vocab .*300.*301"):
        train_head_part(found, "eagle3", options(data, draft_vocab=301), DATE)
    with pytest.raises(UsageError, match=r"--draft-vocab .*eagle3"):
        train_head_part(found, "eagle2", options(data, draft_vocab=30), DATE)
    with pytest.raises(UsageError, match=r"--out DIR.*--draft DIR"):
        train_head_part(resolve_model(model / "target"), "eagle2", options(data), DATE)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "file"))):
        train_head_part(found, "eagle2", options(data), DATE, out=tmp_path / "file")
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(UsageError, match=r"short\.txt .*\d+ tokens"):
        train_head_part(found, "eagle2", options(short), DATE, work=tmp_path / "short-work")
    # The work directory is still free for text that will do.
    train_head_part(found, "eagle2", options(data), DATE, tmp_path / "head2", tmp_path / "short-work")
    assert not list(model.glob("*eagle*"))
    tiny_tokenizer(VOCAB + 40).save_pretrained(model / "target")
    with pytest.raises(UsageError, match=r"token 3\d\d .*300 tokens"):
        train_head_part(found, "eagle2", options(data), DATE, work=tmp_path / "foreign-work")
    (model / "manifest.json").write_text("{}")
    (model / "draft").mkdir()
    (model / "target").rename(model / "draft" / "target")
    with pytest.raises(UsageError, match=re.escape(str(model))):
        train_head_part(resolve_model(model), "eagle2", options(data), DATE)


@pytest.mark.slow
def test_a_head_goes_on_from_another_at_another_depth(model, tmp_path, data, monkeypatch):
    orders = set()

    def watched(count, step, batch, seed):
        orders.add(seed)
        return window_batch(count, step, batch, seed)

    monkeypatch.setattr("flowspec_edge.lab.training.heads.window_batch", watched)
    found = resolve_model(model)
    train_head_part(found, "eagle2", options(data), DATE, work=tmp_path / "first-work")
    start = model / "eagle2"

    def go_on(name, start=start, out=None, **changes):
        train_head_part(found, "eagle2", options(data, start=start, **changes), DATE,
                        out or tmp_path / name, tmp_path / f"{name}-work")
        return load_file((out or tmp_path / name) / "model.safetensors")

    deep = model / "eagle2-deep"
    new = go_on("deep", out=deep, depth=8)
    assert (card(deep)["depth"], card(deep)["goes_on_from"]) == ("8", '"eagle2"')
    bound = json.loads((tmp_path / "deep-work" / "eagle2.json").read_text())
    assert bound["recipe"] == json.loads(json.dumps(asdict(replace(
        recipe_for("eagle2", HeadOptions(quick=True, steps=2)), depth=8, plain=0.0, decay_from=0.2))))
    assert "start" not in json.loads((tmp_path / "first-work" / "eagle2.json").read_text())
    # Two steps from where it started, and at another depth somewhere else.
    old = load_file(start / "model.safetensors")
    assert new.keys() == old.keys()
    fresh = new_head(load_target(found)).state_dict()
    moved = sum((new[name] - old[name]).float().square().sum() for name in new)
    assert 0 < moved < 0.5 * sum((new[name].float() - fresh[name]).square().sum() for name in new)
    assert any(not torch.equal(new[name], other) for name, other in go_on("flat", depth=1).items())
    again = go_on("again", depth=8)
    assert all(torch.equal(new[name], again[name]) for name in new)
    # Whatever a head has been shown, it is shown in another order by the next training.
    assert len(orders) == 2
    go_on("further", start=deep, depth=8)
    assert len(orders) == 3
    # The work directory is that of one start and one depth.
    for other in ({"depth": 7}, {"start": deep, "depth": 8}, {"start": None, "depth": 8}):
        with pytest.raises(UsageError, match="work of another model, recipe or data"):
            train_head_part(found, "eagle2", options(data, **{"start": start, **other}), DATE,
                            tmp_path / "other", tmp_path / "deep-work")
    prompt = AutoTokenizer.from_pretrained(found.target)("def f(x):")["input_ids"]
    cluster = VirtualCluster(found.path, 2, load_profile("paper-7b"))
    request = Request(prompt, "flowspec", 12, params=Params(draft="eagle2-deep"), stop_ids=found.stop_ids)
    plain = cluster.generate(replace(request, strategy="autoregressive"))
    assert cluster.generate(request).tokens == plain.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_depth_is_the_number_of_steps_unrolled(kind, model, tmp_path, data, monkeypatch):
    seen = set()

    def watched(head, hidden, tokens, anchors, depth):
        seen.add((depth, int(anchors.max()) + depth <= tokens.shape[1]))
        return unroll(head, hidden, tokens, anchors, depth)

    monkeypatch.setattr("flowspec_edge.lab.training.heads.unroll", watched)
    train_head_part(resolve_model(model), kind, options(data, depth=64), DATE, work=tmp_path / "work")
    assert {depth for depth, _ in seen} == {1, 6, 64}  # not unrolled at first; 6 to measure
    assert all(fits for _, fits in seen)


def test_a_start_and_a_depth_that_cannot_be(model, tmp_path, data):
    found, out = resolve_model(model), tmp_path / "out"
    tiny_model_dir(tmp_path / "wide", hidden=64, vocab=VOCAB)
    tiny_model_dir(tmp_path / "few", layers=1, hidden=32, vocab=VOCAB - 20)
    head = tiny_model_dir(tmp_path / "like", layers=1, hidden=32, vocab=VOCAB) / "eagle2"
    for depth in (0, 65):
        with pytest.raises(UsageError, match=f"--depth .*64.* {depth}"):
            train_head_part(found, "eagle2", options(data, depth=depth), DATE, out)
    for directory, message in (
        (tmp_path / "nothing", "no EAGLE head at .*nothing: config.json is missing"),
        (tmp_path / "like" / "draft-lm", "like.draft-lm is a language model, not an EAGLE head: "),
        (tmp_path / "wide" / "eagle2", "the head's width is 64, the target's 32; a head works"),
        (tmp_path / "few" / "eagle2", "the head's vocabulary is 280 tokens, the target's 300"),
        (out, "is where the new head would go: say where else with --out DIR"),
    ):
        with pytest.raises(FlowspecError, match=message) as caught:
            train_head_part(found, "eagle2", options(data, start=directory), DATE, out)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"--start .*eagle2"):
        train_head_part(found, "eagle3", options(data, start=head), DATE, out)
    assert not out.exists()
    assert not list(tmp_path.glob("*work"))


def test_the_command_trains_for_a_plain_checkpoint_with_out(model, tmp_path, data, capsys):
    out, work = tmp_path / "head", tmp_path / "work"
    command = ["models", "train-head", "--model", str(model / "target"), "--kind", "eagle2", "--data",
               str(data), "--steps", "1", "--quick", "--work", str(work), "--out", str(out)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "how often the head's best token is the target's, by depth" in text
    assert card(out)["kind"] == '"eagle2"'
    [following] = [line for line in text.splitlines() if line.startswith("Next: flowspec ")]
    assert not refusal(shlex.split(following)[2:])
    assert f" --draft {out} " in following
    shards = tmp_path / "shards"
    assert main(["models", "shard", "--model", str(model / "target"), "--draft", str(out), "--stages", "2",
                 "--out", str(shards)]) == 0
    assert (shards / "draft" / "eagle2" / "model.safetensors").read_bytes() == (
        out / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert main(command) == 0
    assert "is there already; delete it to have it made again, or give another directory as --out" in " ".join(
        capsys.readouterr().out.split())
    further = [*command[:-1], str(tmp_path / "further"), "--work", str(tmp_path / "further-work")]
    assert main([*further, "--start", str(out), "--depth", "3"]) == 0
    facts = card(tmp_path / "further")
    assert (facts["depth"], facts["goes_on_from"]) == ("3", '"head"')
    capsys.readouterr()
    assert main([*command[:-1], str(tmp_path / "other"), "--data", str(tmp_path / "nothing.txt")]) == 2
    assert str(tmp_path / "nothing.txt") in error_line(capsys, 2)

"""SPD's training: its mask as appendix A states it, and its forward as the drafter computes it."""

import copy
import json

import numpy as np
import pytest
import torch
from kits.tiny_model_dir import tiny_model_dir
from kits.tiny_models import tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flowspec_edge.errors import UsageError
from flowspec_edge.lab.spd.drafter import SpdDrafter
from flowspec_edge.lab.spd.module import load_module, save_module
from flowspec_edge.lab.spd.training import (
    STAGES,
    SpdRecipe,
    agreement,
    depths,
    new_module,
    simulated_fill,
    speculate,
    train_module,
    train_spd,
    visibility,
)
from flowspec_edge.lab.training.heads import greedy_text
from flowspec_edge.lab.training.loop import LoopOptions
from flowspec_edge.messages import Payload, Tap
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

V, H, LAYERS = 31, 32, 8


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=LAYERS,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def module(target):
    torch.manual_seed(1)
    module = new_module(target, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return module.eval()


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_mask_is_the_appendix_word_for_word(stages):
    """"A query at time t in the g_0 block may attend to depth block g_k at time T only if T <= t and
    k = min(n, t - T)"; with a fill of a, "the last a positions use partial depths g^{a-1} … g^0,
    while all earlier positions are upgraded to g^n"."""
    rows, n = 7, stages
    fills = list(range(1, n + 1))
    mask = visibility(rows, n, torch.tensor(fills))
    assert mask.shape == (n, 1, rows, (n + 1) * rows)
    for fill, shown in zip(fills, mask[:, 0].tolist(), strict=True):
        for t in range(rows):
            want = set()
            for position in range(t + 1):
                trailing = t - position < fill  # one of the last `fill` positions
                k = t - position if trailing else n
                if fill == n:
                    assert k == min(n, t - position)
                want.add((n - k) * rows + position)  # blocks in the order g_n … g_0
            assert {i for i, seen in enumerate(shown[t]) if seen} == want


def test_the_depths_are_the_stages_of_the_split():
    assert depths(8, 1) == (8,)
    assert depths(8, 4) == (2, 4, 6, 8)
    assert depths(8, 8) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert depths(7, 3) == (3, 5, 7)
    assert depths(2, 4) == (1, 1, 1, 2)  # two stages hold no layer, and show what the first did
    assert depths(1, 2) == (0, 1)


def test_the_fill_is_full_half_the_time_and_else_uniform():
    fill = simulated_fill(20_000, 4, 0.5, torch.Generator().manual_seed(0))
    share = torch.bincount(fill, minlength=5) / len(fill)
    assert share.tolist() == pytest.approx([0, 1 / 6, 1 / 6, 1 / 6, 1 / 2], abs=0.015)
    assert set(simulated_fill(50, 1, 0.5, torch.Generator().manual_seed(0)).tolist()) == {1}


def drafted(target, module, text, newest, stages, fill):
    """log q after position ``newest`` from a drafter that knows what a pipeline filled so shows."""
    with torch.no_grad():
        states = target.model(input_ids=text[None], output_hidden_states=True).hidden_states
    states = [s[0].numpy() for s in states]
    drafter = SpdDrafter(module, target.get_input_embeddings().weight.detach())
    tokens = text.tolist()
    finished = max(newest + 1 - fill, 0)  # rows that have left the pipeline
    drafter.commit(tokens[:1], None)
    for layer in range(1, LAYERS):
        drafter.tap(Tap(0, 0, 0, layer, np.arange(finished, dtype=np.int32),
                        Payload("float32", states[layer][:finished])))
    if finished:
        drafter.commit(tokens[1 : finished + 1], torch.from_numpy(states[LAYERS][:finished]),
                       range(finished))
    for row in range(finished, newest):
        reached = depths(LAYERS, stages)[newest - row - 1]
        for layer in range(1, reached + 1):
            drafter.tap(Tap(0, 0, 0, layer, np.array([row], np.int32),
                            Payload("float32", states[layer][row : row + 1])))
    nodes = [DraftNode(row, row - 1 if row > finished else -1, tokens[row], row, row)
             for row in range(finished, newest + 1)]
    for node in nodes:
        got = drafter.expand(DraftRequest(finished, (node,), V))
    scores = np.empty(V)
    scores[got.tokens[0]] = got.scores[0]
    return scores


@pytest.mark.parametrize(("stages", "fill"), [(1, 1), (2, 1), (2, 2), (4, 3), (4, 4), (8, 5), (8, 8)])
def test_training_computes_what_the_drafter_does(target, module, stages, fill):
    text = torch.randint(0, V, (14,), generator=torch.Generator().manual_seed(stages))
    with torch.no_grad():
        states = target.model(input_ids=text[None], output_hidden_states=True).hidden_states
        out = speculate(module, states, depths(LAYERS, stages), torch.tensor([fill]))
        want = module.lm_head(out)[0].log_softmax(-1).numpy()
    for newest in (0, 1, 5, 13):
        got = drafted(target, module, text, newest, stages, fill)
        assert np.allclose(got, want[newest], atol=1e-4)


def test_agreement_is_what_a_drafter_would_have_got_right(target, module):
    held_out = torch.randint(0, V, (200,), generator=torch.Generator().manual_seed(5))
    got = agreement(module, target, held_out, greedy=True, limit=1, prompt=6, length=16)
    text = greedy_text(target, held_out[None, :6], 16)[0]
    with torch.no_grad():
        best = target(input_ids=text[None]).logits[0].argmax(-1)
    for stages in STAGES:
        hits = [drafted(target, module, text, row, stages, stages).argmax() == best[row]
                for row in range(6, 16)]
        assert got[stages] == pytest.approx(np.mean(hits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_target_in_16_bits_trains_a_module_in_32(target, tmp_path, dtype):
    """On a GPU targets stay as they are stored.  To the report and the checkpoint, and as good as beside the
    same weights and states in float32."""
    rounded = copy.deepcopy(target).to(dtype)
    text = torch.randint(0, V, (400,), generator=torch.Generator().manual_seed(6))
    recipe = SpdRecipe(steps=2, layers=1, window=16, tokens_per_step=64, micro_batch=32)
    trained = train_module(recipe, rounded, text, text, tmp_path, 0, LoopOptions(compile=False))
    assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32}
    rows = text[None, :24]
    with torch.no_grad():
        states = rounded.model(input_ids=rows, output_hidden_states=True).hidden_states
        assert states[0].dtype == dtype
        args = depths(LAYERS, 4), torch.tensor([3])
        assert torch.equal(speculate(trained, states, *args),
                           speculate(trained, [state.float() for state in states], *args))


def test_a_new_module_starts_from_the_targets_head(target):
    module = new_module(target, 3)
    assert torch.equal(module.lm_head.weight, target.lm_head.weight)
    assert module.lm_head.weight.data_ptr() != target.lm_head.weight.data_ptr()
    assert len(module.layers) == 3
    assert module.target_layers == LAYERS


@pytest.mark.parametrize(("family", "extra"), [
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                                   "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 64}}),
])
def test_a_module_fits_every_family_and_survives_the_disk(tmp_path, family, extra):
    target = AutoModelForCausalLM.from_pretrained(tiny_model(family, tmp_path / "target", **extra))
    module = new_module(target, 1)
    save_module(module, tmp_path / "spd", torch.float32)
    with torch.no_grad():
        states = target.model(input_ids=torch.arange(40)[None], output_hidden_states=True).hidden_states
        outputs = [speculate(m, states, depths(4, 2), torch.tensor([2]))
                   for m in (module, load_module(tmp_path / "spd", torch.float32))]
    assert torch.equal(*outputs)


def test_a_run_that_broke_off_ends_with_the_same_weights(target, tmp_path, monkeypatch):
    recipe = SpdRecipe(steps=4, layers=1, window=16, tokens_per_step=64, micro_batch=64)
    text = torch.randint(0, V, (400,), generator=torch.Generator().manual_seed(6))

    def run(name):
        (tmp_path / name).mkdir(exist_ok=True)
        return train_module(recipe, target, text, text, tmp_path / name, 0,
                            LoopOptions(checkpoint_every_s=0.0, compile=False)).state_dict()

    whole = run("whole")
    calls = iter(range(3))

    def broken(*args):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return speculate(*args)

    with monkeypatch.context() as patch:
        patch.setattr("flowspec_edge.lab.spd.training.speculate", broken)
        with pytest.raises(KeyboardInterrupt):
            run("broken")
    assert torch.load(tmp_path / "broken" / "spd.pt", weights_only=True)["step"] == 2
    again = run("broken")
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


@pytest.mark.soak
def test_a_module_is_written_with_its_card_and_its_work_is_its_own(tmp_path, capsys):
    model = tiny_model_dir(tmp_path / "model", layers=2, hidden=32, vocab=320)
    out, work = tmp_path / "out", tmp_path / "work"
    train_spd(resolve_model(model), out=out, work=work, quick=True)
    lines = (line.split(" = ", 1) for line in (out / "card.toml").read_text().splitlines())
    card = {key: json.loads(value) for key, value in lines}
    module = load_module(out, torch.float32)
    assert card["parameters"] == sum(p.numel() for p in module.parameters())
    assert len(card["agreement_greedy"]) == len(card["agreement_text"]) == len(card["stages"]) == 4
    train_spd(resolve_model(model), out=out, work=work, quick=True)
    assert "is there already" in capsys.readouterr().out
    with pytest.raises(UsageError, match="work of another model or recipe"):
        train_spd(resolve_model(model), out=tmp_path / "other", work=work)
    other = tiny_model_dir(tmp_path / "other-model", layers=2, hidden=32, vocab=300)
    with pytest.raises(UsageError, match="work of another model or recipe"):
        train_spd(resolve_model(other), out=tmp_path / "other", work=work, quick=True)
    (work / "spd.json").unlink()
    with pytest.raises(UsageError, match="in the tokens of another model"):
        train_spd(resolve_model(other), out=tmp_path / "other", work=work, quick=True)

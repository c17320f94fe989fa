"""The corpus' hold-out rule and tokenizer, and bits per byte against plain counting."""

import json
import math

import numpy as np
import pytest
import torch
from demo_lm import EOS, bits_per_byte, save_lm, tokenized_corpus
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from flowspec_edge.lab.training.python_source import TokenizedCorpus, documents, is_held_out

V = 23
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tokenized_corpus(tmp_path_factory.mktemp("work"), 320, seed=0, limit=300_000)


@pytest.mark.slow
def test_held_out_groups_share_no_file_with_the_training_text(corpus):
    seen, texts, held = {}, set(), set()
    for i, document in enumerate(documents()):
        if i == 120:
            break
        assert document.text not in texts  # exact duplicates are dropped
        texts.add(document.text)
        seen.setdefault(document.group, set()).add(is_held_out(document.group))
        held |= {document.group} if is_held_out(document.group) else set()
    assert all(len(sides) == 1 for sides in seen.values())
    assert held
    assert held < set(seen)


def test_tokens_and_bytes_are_those_of_the_held_out_files(corpus):
    groups = set(corpus.summary["held_out_groups"])
    texts = []
    for document in documents():
        if document.group in groups:
            texts.append(document.text)
        if len(texts) == corpus.summary["held_out_files"]:
            break
    assert corpus.held_out_bytes == sum(len(t.encode()) for t in texts)
    eos = corpus.tokenizer.token_to_id(EOS)
    assert eos == 0
    ids = corpus.held_out.tolist()
    assert ids.count(eos) == len(texts)
    assert corpus.tokenizer.decode(ids[: ids.index(eos)]) == texts[0]


@pytest.mark.parametrize("text", ["naïve 名 \U0001f600\n\ttab  two spaces", "\x00\x7f", ""])
def test_every_text_has_an_encoding(corpus, text):
    assert corpus.tokenizer.decode(corpus.tokenizer.encode(text).ids) == text


def test_what_was_prepared_is_read_back(tmp_path):
    first = tokenized_corpus(tmp_path, 300, seed=0, limit=100_000)
    stamp = (tmp_path / "train.npy").stat().st_mtime_ns
    again = tokenized_corpus(tmp_path, 300, seed=0, limit=100_000)
    assert (tmp_path / "train.npy").stat().st_mtime_ns == stamp
    assert np.array_equal(first.train, again.train)


def toy(length, size=999):
    ids = np.random.default_rng(1).integers(0, V, size=length).astype(np.uint16)
    return TokenizedCorpus(ids, ids, size, Tokenizer(models.BPE()), {})


def model(scale):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, **SMALL, initializer_range=scale))


@pytest.mark.parametrize("length", [17, 32, 33, 34, 48, 49, 100])
def test_an_indifferent_model_costs_log2_of_the_vocabulary(length):
    flat = model(0.3)
    torch.nn.init.zeros_(flat.lm_head.weight)
    got = bits_per_byte(flat, toy(length), context=32)
    assert got == pytest.approx((length - 1) * math.log2(V) / 999, rel=1e-5)


def test_tokens_see_the_context_that_is_promised():
    lm, corpus, half = model(0.5), toy(100), 16
    ids = torch.from_numpy(corpus.held_out.astype(np.int64))
    total = 0.0
    with torch.no_grad():
        for i in range(1, len(ids)):
            # Windows begin at multiples of half a context; a token is counted in the window whose
            # second half it lies in, the first window's tokens all in the first.
            start = 0 if i <= 2 * half else (i - 1) // half * half - half
            logits = lm(input_ids=ids[None, start:i]).logits[0, -1]
            total -= torch.log_softmax(logits, -1)[ids[i]].item()
    assert bits_per_byte(lm, corpus, context=2 * half) == pytest.approx(total / math.log(2) / 999, rel=1e-5)


def test_the_quick_figure_is_near_the_full_one():
    lm, corpus = model(0.02), toy(4000, 9999)
    assert bits_per_byte(lm, corpus, limit=1000, context=64) == pytest.approx(
        bits_per_byte(lm, corpus, context=64), rel=0.02)


def test_saved_models_load_with_auto_classes(corpus, tmp_path):
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=320, **SMALL, eos_token_id=0))
    save_lm(lm, corpus, tmp_path)
    assert lm.lm_head.weight.dtype == torch.float32  # the one in hand is left alone
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float16
    assert torch.equal(loaded.lm_head.weight, lm.lm_head.weight.half())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast")  # which transformers 4 reads, too
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(loaded.state_dict())
    text = "def f(x):\n    return x  # naïve\n"
    assert tokenizer(text)["input_ids"] == corpus.tokenizer.encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 0

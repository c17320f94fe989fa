"""Which tokens count as going on with a loop, by the definition word for word; and what their loss does."""

import math

import pytest
import torch
from demo_unlikelihood import looping, unlikelihood
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from flowspec_edge.lab.bench.samples import repeats_itself


def goes_on(tokens, at, period):
    """The token and more than max(12, period) before it equal those one period earlier."""
    length = max(12, period) + 1
    first = at - length + 1
    return first >= period and tokens[first : at + 1] == tokens[first - period : at + 1 - period]


pieces = st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=34), st.integers(1, 5)),
                  min_size=1, max_size=4)


@given(pieces, st.integers(0, 40))
def test_marks_are_the_definitions(pieces, prompt):
    tokens = [token for piece, times in pieces for token in piece * times]
    marked = looping(torch.tensor([tokens]), min(prompt, len(tokens)))[0].tolist()
    assert marked == [at >= prompt and any(goes_on(tokens, at, p) for p in range(1, 33))
                      for at in range(len(tokens))]


@given(pieces)
def test_a_text_that_repeats_itself_has_marks(pieces):
    tokens = [token for piece, times in pieces for token in piece * times]
    assert looping(torch.tensor([tokens])).any() or not repeats_itself(tokens)


def test_nothing_counts_after_the_end():
    ids = torch.tensor([[5, 6] * 20 + [0] * 30])
    assert looping(ids)[0, 14:40].any()
    assert not looping(ids)[0, 41:].any()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5))


def test_the_loss_is_that_of_the_marked_tokens_alone(model):
    ids = torch.randint(23, (2, 9))
    marked = torch.zeros(2, 9, dtype=torch.bool)
    marked[0, 4] = marked[1, 1] = marked[1, 8] = True
    wanted = 0.0
    for row, at in ((0, 4), (1, 1), (1, 8)):
        p = model(input_ids=ids[row : row + 1, :at]).logits[0, -1].double().softmax(-1)[ids[row, at]].item()
        wanted -= math.log(1 - p)
    assert unlikelihood(model, ids, marked).item() == pytest.approx(wanted, rel=1e-5)


def test_a_step_makes_marked_tokens_less_likely(model):
    ids = torch.randint(23, (2, 40))
    marked = torch.rand(2, 40) < 0.3
    before = unlikelihood(model, ids, marked)
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
    assert unlikelihood(model, ids, marked) < before

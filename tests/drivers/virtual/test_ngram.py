"""Look-up drafting in whole runs: the same text as ever, and fewer turns where a text repeats itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from kits.cases import strategies
from kits.requests import text
from kits.tiny_model_dir import tiny_model_dir
from kits.tiny_models import tiny_llama
from kits.virtual_clusters import PROFILE, cluster

from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.request import Request, Result
from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.parameters import LONGEST_BLOCK
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES

DRAFTING = [name for name, chosen in STRATEGIES.items() if chosen.drafter]
SMALL = {"width": 4, "tree_size": 20, "depth": 3, "pipedec_width": 6, "pipeinfer_split": 0.1, "spd_width": 2,
         "ngram_min": 1}
KINDS = {"alone": Params(draft="ngram", **SMALL), "eagle2": Params(draft="eagle2", ngram=True, **SMALL),
         "lm": Params(draft="lm", ngram=True, **SMALL)}


def prompt() -> list[int]:
    """Random, and then once more: what is looked up is there, and wrong in most cases."""
    half = np.random.default_rng(1).integers(1, 97, 20).tolist()
    return half + half[:15]


# SPD drafts with its own module whatever the kind; the look-up is merged into that.
PAIRS = [(name, kind) for name in DRAFTING for kind in KINDS if name != "spd" or kind == "eagle2"]
IN_TURN = [pair for i, pair in enumerate(PAIRS) if pair[0] == "flowspec_plus" or i % 3 == DRAFTING.index(pair[0]) % 3]
WAYS = list(product((1, 3), (Sampling(), Sampling(1.0, seed=4))))


def same_text(model: Path, name: str, kind: str, stages: int, sampling: Sampling) -> None:
    result = cluster(model, stages).generate(Request(prompt(), name, 8, sampling, KINDS[kind]))
    assert result.tokens == text(model, tuple(prompt()), 8, sampling)


@pytest.mark.parametrize(("name", "kind"), IN_TURN)
def test_every_strategy_gives_the_text_of_plain_decoding(tiny_model: Path, name: str, kind: str) -> None:
    """Kinds, stage counts and samplings take turns."""
    same_text(tiny_model, name, kind, *WAYS[IN_TURN.index((name, kind)) % len(WAYS)])


@pytest.fixture(scope="module")
def no_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint, without any draft part; greedy, it soon says the same again and again."""
    return tiny_llama(tmp_path_factory.mktemp("plain"), layers=2, hidden=32, vocab=97)


def turns(model: Path, name: str, params: Params) -> Result:
    return cluster(model, 2).generate(Request([3, 1, 4], name, 24, params=params))


@pytest.mark.parametrize("name", strategies(*(name for name in DRAFTING if name != "spd")))
def test_a_model_without_a_head_drafts_what_it_repeats(no_head: Path, name: str) -> None:
    plainly = turns(no_head, "autoregressive", Params())
    result = turns(no_head, name, Params(draft="ngram"))
    assert result.tokens == plainly.tokens
    assert result.stats.accepted >= 5
    assert result.stats.rounds < plainly.stats.rounds


@pytest.mark.parametrize("name", ["flowspec", "speculative"])
def test_merged_drafts_have_what_the_head_does_not_know(no_head: Path, tmp_path: Path, name: str) -> None:
    """A random head beside the same target, which repeats itself."""
    model = tiny_model_dir(tmp_path, layers=2, hidden=32, vocab=97)
    own, merged = (turns(model, name, Params(draft="eagle2", ngram=ngram)) for ngram in (False, True))
    assert merged.tokens == own.tokens == turns(no_head, "autoregressive", Params()).tokens
    assert merged.stats.accepted >= own.stats.accepted + 5
    assert merged.stats.rounds < own.stats.rounds


def test_a_look_up_takes_no_time_so_pearls_block_is_long(no_head: Path) -> None:
    device0 = DraftModels(no_head)
    assert 0 < device0.pass_seconds("ngram") < 0.01
    passes = PROFILE.stage_seconds(16, 32) / max(PROFILE.draft_seconds("ngram"), 1e-9)
    request = Request([1, 2, 3], "pearl", 4, params=Params(draft="ngram"))
    draft_session = device0.draft_session(request, 2, lambda: 0.0, 1, lambda kind: passes)
    assert draft_session.strategy.gamma == LONGEST_BLOCK  # type: ignore[attr-defined]


def test_what_is_merged_is_charged_as_the_model_alone(tiny_model: Path) -> None:
    """A text in which nothing comes twice: the very figures of the draft model."""
    request = [Request([5, 6, 7], "flowspec", 6, Sampling(1.0, seed=8), Params(ngram=ngram, ngram_min=4))
               for ngram in (False, True)]
    own, merged = (cluster(tiny_model, 2).generate(r).stats for r in request)
    assert (own.draft, merged.draft) == ("eagle2", "eagle2+ngram")
    assert replace(own, draft="") == replace(merged, draft="")


@pytest.mark.parametrize(("ngram", "itself", "merged"), [(None, True, False), (True, True, False),
                                                          (False, False, False)])
def test_flowspec_plus_looks_up_by_itself_or_not_at_all(ngram: bool | None, itself: bool,
                                                        merged: bool) -> None:
    chosen, params = STRATEGIES["flowspec_plus"], Params(ngram=ngram)
    assert (chosen.looks_up(params), chosen.merges_look_up(params)) == (itself, merged)


@pytest.mark.parametrize(("given", "message"), [
    ({"ngram_min": 5}, "ngram_max must be ngram_min (5) to 32, not 4"),
    ({"ngram_max": 33}, "ngram_max must be ngram_min (2) to 32, not 33"),
    ({"ngram_min": 0}, "ngram_min must be at least 1, not 0"),
])
def test_lengths_that_cannot_be_are_refused(given: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Params(**given)
    assert str(caught.value) == message

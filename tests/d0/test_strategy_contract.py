"""Strategies that break their contract: their own request fails with one line, and the others go on.

Each script replaces one method of a working strategy, from some token on. Hypothesis chooses the script, the
moment, and the order in which links deliver; the requests beside it must be plain decoding's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.core_pipeline import PROMPTS, TOKENS, Draw, Pipeline, plain, request
from kits.hypothesis_examples import examples

from flowspec_edge.d0 import strategy_contract
from flowspec_edge.d0.request import Request, RequestHandle
from flowspec_edge.errors import RequestFailed
from flowspec_edge.messages import Prune, Segment
from flowspec_edge.strategies import registry
from flowspec_edge.strategies.flowspec import FlowSpec
from flowspec_edge.strategies.params import Params
from flowspec_edge.tree.draft_api import Commit, DraftNode, DraftRequest

SMALL = Params(prefill_chunk=16, segment=4, tree_size=8, width=2, depth=2, expand_depth=2, expand_size=4,
               extend_depth=1, extend_size=4)
STEPS = 8  # that a strategy may take without a token, besides what its parameters ask for
NOWHERE = 10_000  # a number, node or token that there is not


class Scripted(FlowSpec):
    """FlowSpec until ``after`` commits, then ``script`` instead of the method ``where``."""

    name = "scripted"
    summary = "a working strategy that breaks its contract at some moment"
    where, after = "", 0
    script: Callable[..., Any] = staticmethod(lambda self, *values: None)

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.commits = 0
        self.sent_before: Segment | None = None

    def _do(self, method: str, *values: Any) -> Any:
        if self.where == method and self.commits >= self.after:
            return type(self).script(self, *values)
        return getattr(FlowSpec, method)(self, *values)

    def next_segment(self, rows: int | None = None) -> Segment | None:
        if type(self).script is forever and self.commits >= self.after:
            return None  # it drafts, and sends nothing
        segment: Segment | None = self._do("next_segment", rows)
        self.sent_before = segment if isinstance(segment, Segment) else self.sent_before
        return segment

    def next_draft(self) -> DraftRequest | None:
        made: DraftRequest | None = self._do("next_draft")
        return made

    def row_probabilities(self, limit: int) -> Sequence[float] | None:
        found: Sequence[float] | None = self._do("row_probabilities", limit)
        return found

    def controls(self) -> list[Any]:
        found: list[Any] = self._do("controls")
        return found

    def on_verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        commits: list[Commit] = self._do("on_verified", run, numbers, successors)
        self.commits += bool(commits)
        return commits


def root(self: Scripted, **changes: int) -> DraftRequest:
    made = self.tree.draft_request([self.tree.root], 2)
    return replace(made, nodes=(replace(made.nodes[0], **changes),))


def forever(self: Scripted) -> DraftRequest:
    return root(self)


def again(self: Scripted, *_: Any) -> Segment:
    """The row of the newest token, over and over, of which nothing becomes text."""
    self.builder.add(self.tree.root.token, self.tree.root.position)
    return self.builder.seal()


def odd(self: Scripted, token: int, position: int = 0) -> Segment:
    self.builder.add(token, position)
    return self.builder.seal()


def wrong_commit(self: Scripted, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
    return [Commit((successors[0] + 1) % 7, numbers[0])] if numbers else []


# method -> {script: what the error says}
SCRIPTS: dict[str, dict[Callable[..., Any], str]] = {
    "next_segment": {
        lambda self, rows: None: "does nothing|makes no progress",
        lambda self, rows: self.builder.seal(): "makes no progress: no new token in",
        again: "makes no progress: no new token in|rows of which none became text",
        lambda self, rows: self.sent_before or self.builder.seal():
            "sent before or did not build|no progress",
        lambda self, rows: replace(self.builder.seal(), numbers=np.array([NOWHERE], np.int32)):
            "sent before or did not build",
        lambda self, rows: [self.builder.seal(), self.builder.seal()][1]: "before segment",
        lambda self, rows: odd(self, NOWHERE): "outside the vocabulary",
        lambda self, rows: odd(self, 1, -4): "at position -4",
        lambda self, rows: "segment": "returned 'segment' from next_segment",
    },
    "next_draft": {
        forever: "makes no progress",
        lambda self: root(self, id=NOWHERE, parent=NOWHERE - 1): "whose parent 9999 no draft pass has",
        lambda self: root(self, token=NOWHERE): "over the token 10000",
        lambda self: DraftRequest(self.tree.root.id, (), 2): "over no nodes",
        lambda self: replace(root(self), children=0): "asked for 0 children",
        lambda self: replace(root(self), nodes=2 * root(self).nodes): "one node twice",
        lambda self: DraftNode(0, -1, 0, 0): "from next_draft, not a DraftRequest",
        lambda self: replace(root(self), children="2"): "with '2' where a whole number belongs",
        lambda self: replace(root(self), nodes=7): "over 7, not a tuple of DraftNode",
        lambda self: root(self, token=[1]): "with [1] where a whole number belongs",
        lambda self: root(self, position=self.tree.root.position + 1): "below position",
    },
    "on_verified": {
        lambda self, *values: []: "does nothing|makes no progress|none became text",
        lambda self, *values: 7: "from on_verified, not a list of Commit",
        lambda self, *values: [Commit(1, NOWHERE)]: "not a verified row",
        wrong_commit: "where the target's is|not a verified row",
        lambda self, *values: [Commit(1, [2])]: "source have to be whole numbers",  # type: ignore[arg-type]
        lambda self, *values: [Commit("1", 2)]: "source have to be whole numbers",  # type: ignore[arg-type]
    },
    "controls": {
        lambda self: [7]: "from controls, not a list",
        lambda self: None: "from controls, not a list",
        lambda self: [Prune(self.builder.session, self.builder.epoch, 0, 0, NOWHERE, np.zeros(0, np.int32))]:
            "Prune from controls that names rows",
    },
    "row_probabilities": {
        lambda self, limit: [float("nan")]: "the probability nan",
        lambda self, limit: [0.1] * (limit + 1): "from row_probabilities, which may have",
        lambda self, limit: 3: "not numbers",
    },
}
CASES = [(where, number) for where, scripts in SCRIPTS.items() for number in range(len(scripts))]


@pytest.fixture(autouse=True)
def _loaded_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_loaded", {"scripted": registry._located(Scripted)})
    monkeypatch.setattr(strategy_contract, "_STEPS", STEPS)


def misbehave(monkeypatch: pytest.MonkeyPatch, where: str, number: int, after: int) -> str:
    """Let the strategy run a script; what its error says."""
    script, says = [*SCRIPTS[where].items()][number]
    for name, value in {"where": where, "after": after, "script": staticmethod(script)}.items():
        monkeypatch.setattr(registry._loaded["scripted"], name, value)
    return says


def check(pipeline: Pipeline, says: str, others: int) -> None:
    """The scripted request fails, and those beside it are plain decoding's."""
    handles = [RequestHandle(Request(PROMPTS[0], "scripted", TOKENS, params=SMALL)),
               *(RequestHandle(request(place, "flowspec", 0.0)) for place in range(1, 1 + others))]
    for handle in handles:
        pipeline.start(handle)
    pipeline.run(lambda: not pipeline.core.busy)
    with pytest.raises(RequestFailed, match=r"^the strategy scripted .*; the last thing before: ") as caught:
        handles[0].result(0)
    assert any(part in str(caught.value) for part in says.split("|")), (says, str(caught.value))
    assert "\n" not in str(caught.value)
    for place in range(1, 1 + others):
        expected = plain(pipeline.models._model.path, tuple(PROMPTS[place]), 0.0)
        assert handles[place].result(0).tokens == expected


@pytest.mark.parametrize(("where", "number"), CASES)
def test_one_line_names_the_strategy_and_what_it_did_last(
        tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str,
        number: int) -> None:
    others = int(where == "row_probabilities")  # rows are divided among several
    check(Pipeline(tiny_model, Draw([])), misbehave(monkeypatch, where, number, 0), others)
    assert not [record for record in caplog.records if record.exc_info]  # no traceback


@given(st.sampled_from([case for case in CASES if case[0] != "row_probabilities"]), st.integers(0, 1),
       st.integers(0, 2), st.lists(st.integers(0, 60), max_size=200))
@examples(60, quick=4)
def test_no_script_reaches_the_other_requests(tiny_model: Path, case: tuple[str, int], after: int,
                                              others: int, order: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_loaded", {"scripted": registry._located(Scripted)})
        patch.setattr(strategy_contract, "_STEPS", STEPS)
        check(Pipeline(tiny_model, Draw(order)), misbehave(patch, *case, after), others)

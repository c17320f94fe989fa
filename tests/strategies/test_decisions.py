"""What the strategies of the other papers decide, event by event, on drafts that are written down here.

No pipeline and no model: every test says what the draft model answers and what comes back, and
looks at the next segment, the next draft pass and the hints.  Tokens stand for nodes, so no token
occurs twice in a tree.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from flowspec_edge.messages import Cancel, Prune, Segment, unpack_bits
from flowspec_edge.strategies.base import Pipeline, Strategy
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.pipeinfer import PipeInfer
from flowspec_edge.strategies.registry import STRATEGIES
from flowspec_edge.tree.ledger import Ledger
from flowspec_edge.tree.requests import Expansion

ROOT, A, B, C, D, E, F, G, H, OTHER = range(100, 110)
Children = list[tuple[int, float]]  # tokens and confidences, best first


class Device0:
    """A strategy after a prompt of one token; the first generated token is ROOT."""

    def __init__(self, name: str, pipeline: int | Pipeline = 4, **params: int | float | str) -> None:
        """``pipeline``: its stages, if nothing else of it matters."""
        self.ledger = Ledger()
        self.ledger.add(1, 0, committed=True)
        self.ledger.returned(self.ledger.seal().run)
        self.ledger.skip_prune()
        self.strategy: Strategy = STRATEGIES[name](
            Params(**params), self.ledger,  # type: ignore[arg-type]
            pipeline if isinstance(pipeline, Pipeline) else Pipeline(pipeline))
        self.strategy.start(ROOT, 1)

    def send(self) -> Segment:
        """The next segment; there must be one."""
        segment = self.strategy.next_segment()
        assert segment is not None
        return segment

    def layer(self) -> list[int]:
        """Tokens of the next segment; none if nothing is to be sent."""
        segment = self.strategy.next_segment()
        return [] if segment is None else tokens(segment)

    def asked(self) -> list[int]:
        """Tokens of the nodes that the next draft pass would expand."""
        request = self.strategy.next_draft()
        return [] if request is None else [node.token for node in request.nodes]

    def draft(self, answers: dict[int, Children]) -> None:
        """One pass: the children of every node asked for; nodes that are left out get unlikely ones."""
        request = self.strategy.next_draft()
        assert request is not None
        assert answers.keys() <= {node.token for node in request.nodes}
        filler = 1000 * (1 + request.nodes[0].id)
        found: list[Children] = []
        for node in request.nodes:
            known = answers.get(node.token, [])
            found.append(known + [(filler + len(found) * 50 + i, 1e-6)
                                  for i in range(request.children - len(known))])
        self.strategy.drafted(request, Expansion(
            np.array([[token for token, _ in row[: request.children]] for row in found], np.int32),
            np.log([[p for _, p in row[: request.children]] for row in found])))

    def chain(self, *path: int, confidence: float = 0.9) -> None:
        """A pass for every step of ``path``."""
        for parent, child in pairwise(path):
            self.draft({parent: [(child, confidence)]})

    def back(self, segment: Segment, *successors: int) -> list[tuple[int, bool]]:
        """``segment`` has come back: the tokens that became text, and whether they were drafted.

        Without ``successors`` it is empty, as a cancelled one.
        """
        numbers, _ = self.ledger.returned(segment.run)
        commits = self.strategy.verified(segment.run, numbers.tolist() if successors else [], successors)
        return [(c.token, c.drafted) for c in commits]


def tokens(segment: Segment) -> list[int]:
    assert segment.tokens is not None
    return [int(token) for token in segment.tokens]


def cancelled(d0: Device0) -> list[int]:
    hints = d0.strategy.controls()
    assert all(isinstance(hint, Cancel) for hint in hints)
    return [run for hint in hints if isinstance(hint, Cancel) for run in hint.runs]


# ---- PipeDec and SPD -----------------------------------------------------------------------------


def two_layers() -> tuple[Device0, Segment, Segment]:
    """Root and A, B are in the pipeline; A and B have been expanded."""
    d0 = Device0("pipedec", 3, pipedec_width=2, pipedec_children=2)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.6), (B, 0.4)]})
    first = d0.send()
    d0.draft({A: [(C, 0.6), (D, 0.4)], B: [(E, 0.5), (F, 0.5)]})
    return d0, root, first


def test_a_layer_is_the_best_by_cumulative_probability() -> None:
    d0, root, first = two_layers()
    assert (tokens(root), tokens(first)) == ([ROOT], [A, B])
    assert d0.layer() == [C, D]  # .36 and .24; E and F have .2, though .5 of their parent's
    assert d0.asked() == [C, D]


def test_only_the_newest_layer_is_drafted_on_and_only_once_it_was_sent() -> None:
    d0 = Device0("pipedec", pipedec_width=2, pipedec_children=2)
    assert d0.asked() == []
    d0.send()
    assert d0.asked() == [ROOT]
    assert d0.layer() == []
    d0.draft({ROOT: [(A, 0.6), (B, 0.4)]})
    assert d0.asked() == []
    d0.send()
    assert d0.asked() == [A, B]


def test_survivors_take_the_places_of_the_dead() -> None:
    """PipeDec, section 3.3.4: one more update after the pruning."""
    d0, root, _ = two_layers()
    assert d0.back(root, B) == [(B, True)]
    assert d0.layer() == [E, F]


def test_dead_nodes_are_not_drafted_on() -> None:
    d0 = Device0("pipedec", pipedec_width=2, pipedec_children=2)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.6), (B, 0.4)]})
    d0.send()
    d0.back(root, B)
    assert d0.asked() == [B]


def test_a_layer_that_died_waits_for_the_miss() -> None:
    d0, root, first = two_layers()
    d0.send()
    d0.back(root, B)
    assert (d0.asked(), d0.layer()) == ([], [])
    assert d0.back(first, C, OTHER) == [(OTHER, False)]
    assert d0.layer() == [OTHER]


def test_a_candidate_that_was_not_sent_is_a_hit() -> None:
    d0 = Device0("pipedec", 1, pipedec_width=2, pipedec_children=2)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.6), (B, 0.4)]})
    assert d0.back(root, B) == [(B, True)]
    assert d0.layer() == [B]
    assert d0.asked() == [B]


def test_a_miss_empties_the_pipeline() -> None:
    d0, root, first = two_layers()
    assert d0.back(root, OTHER) == [(OTHER, False)]
    hint, = d0.strategy.controls()
    assert isinstance(hint, Prune)
    assert not set(first.numbers.tolist()) & set(hint.keep.tolist())
    assert hint.start <= first.numbers[0]
    assert first.numbers[-1] < hint.stop
    assert d0.layer() == [OTHER]


@pytest.mark.parametrize(("width", "children"), [(1, 1), (2, 4), (4, 4)])
def test_spd_keeps_the_best_of_four_children(width: int, children: int) -> None:
    d0 = Device0("spd", Pipeline(2, (4, 8)), spd_width=width)
    root = d0.send()
    request = d0.strategy.next_draft()
    assert request is not None
    assert request.children == children
    d0.draft({ROOT: [(A, 0.4), (B, 0.3), (C, 0.2), (D, 0.1)]})
    layer = d0.send()
    assert tokens(layer) == [A, B, C, D][:width]
    assert root.taps == layer.taps == (2, 4)


# ---- PEARL and plain speculation -----------------------------------------------------------------


def test_a_block_is_gamma_rows_and_is_sent_when_it_is_complete() -> None:
    d0 = Device0("pearl", pearl_gamma=3)
    root = d0.send()
    assert tokens(root) == [ROOT]
    d0.chain(ROOT, A)
    assert d0.layer() == []  # one verification at a time
    assert d0.back(root, A) == [(A, True)]
    assert d0.layer() == []
    d0.chain(A, B, C)
    assert d0.asked() == []
    block = d0.send()
    assert tokens(block) == [A, B, C]
    d0.chain(C, D, E, F)
    assert d0.asked() == []
    assert d0.back(block, B, C, D) == [(B, True), (C, True), (D, True)]
    assert d0.layer() == [D, E, F]


def test_a_rejection_leads_back_to_pre_verify() -> None:
    d0 = Device0("pearl", pearl_gamma=3)
    root = d0.send()
    d0.chain(ROOT, A, B, C)
    d0.back(root, A)
    block = d0.send()
    d0.chain(C, D)
    assert d0.back(block, B, OTHER, D) == [(B, True), (OTHER, False)]
    again = d0.send()
    assert tokens(again) == [OTHER]
    assert d0.asked() == [OTHER]
    d0.draft({OTHER: [(G, 0.9)]})
    assert d0.back(again, H) == [(H, False)]  # rejected at once: stay
    assert d0.layer() == [H]


@pytest.mark.parametrize(("passes", "gamma"), [(7.3, 7), (7.6, 8), (0.2, 1), (1e9, 64)])
def test_the_default_block_is_the_speed_ratio(passes: float, gamma: int) -> None:
    strategy = STRATEGIES["pearl"](Params(), Ledger(), Pipeline(4, (), passes))
    assert strategy.gamma == gamma  # type: ignore[attr-defined]


def test_a_chain_is_sent_when_it_is_complete() -> None:
    d0 = Device0("speculative", speculative_gamma=2)
    for parent, child in ((ROOT, A), (A, B)):
        assert d0.layer() == []
        d0.chain(parent, child)
    assert d0.asked() == []
    chain = d0.send()
    assert tokens(chain) == [ROOT, A, B]
    assert d0.back(chain, A, OTHER, G) == [(A, True), (OTHER, False)]
    assert d0.asked() == [OTHER]


def test_every_node_of_a_static_level_is_expanded() -> None:
    d0 = Device0("stpp", stpp_branching="2,1,2")
    d0.draft({ROOT: [(A, 0.9), (B, 1e-9)]})
    assert d0.asked() == [A, B]
    d0.draft({A: [(C, 0.9)], B: [(D, 1e-9)]})
    assert d0.asked() == [C, D]
    assert d0.layer() == []
    d0.draft({C: [(E, 0.9), (F, 0.1)], D: [(G, 0.9), (H, 0.1)]})
    assert sorted(d0.layer()) == [ROOT, A, B, C, D, E, F, G, H]


# ---- PipeInfer -----------------------------------------------------------------------------------


def eager(stages: int = 4, **params: int | float | str) -> Device0:
    """Micro-batches of one level with branches, and a cutoff that does not rise."""
    return Device0("pipeinfer", stages, **{
        "pipeinfer_tokens": 1, "pipeinfer_sequences": 2, "pipeinfer_split": 0.1,
        "pipeinfer_recovery": 0.0, **params})


def torn(d0: Device0) -> Segment:
    """The root is sent; A or B, then C below A and D below B, then E below C are drafted."""
    root = d0.send()
    d0.draft({ROOT: [(A, 0.5), (B, 0.4)]})
    d0.draft({A: [(C, 0.9)], B: [(D, 0.9)]})
    d0.draft({C: [(E, 0.9)]})
    return root


def test_a_miss_cancels_all_speculation_from_the_back() -> None:
    d0 = eager()
    root = torn(d0)
    runs = [d0.send() for _ in range(3)]
    assert [tokens(run) for run in runs] == [[A, B], [C, D], [E]]
    assert d0.back(root, OTHER) == [(OTHER, False)]
    assert cancelled(d0) == [run.run for run in reversed(runs)]
    assert d0.strategy.controls() == []
    assert d0.layer() == [OTHER]


def test_only_a_run_without_a_living_row_is_cancelled() -> None:
    d0 = eager()
    root = torn(d0)
    runs = [d0.send() for _ in range(3)]
    assert d0.back(root, B) == [(B, True)]
    assert cancelled(d0) == [runs[2].run]
    canonical = d0.send()
    assert tokens(canonical) == [B]
    assert d0.back(runs[0], C, OTHER) == [(OTHER, False)]
    assert cancelled(d0) == [runs[1].run]  # never the canonical one


def test_dead_rows_that_wait_are_not_sent() -> None:
    d0 = eager()
    root = torn(d0)
    d0.send()
    d0.back(root, B)
    assert [d0.layer() for _ in range(3)] == [[B], [D], []]


def test_a_micro_batch_that_died_waiting_does_not_hold_drafting_back() -> None:
    d0 = eager(stages=1)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.5), (B, 0.4)]})
    d0.draft({A: [(C, 0.9)]})
    assert d0.asked() == []
    d0.back(root, B)
    assert d0.asked() == [B]
    assert [d0.layer(), d0.layer()] == [[B], []]


def test_speculation_goes_on_at_the_root_when_its_tips_died() -> None:
    d0 = eager()
    root = torn(d0)
    for _ in range(3):
        d0.send()
    d0.draft({E: [(F, 0.9)]})
    d0.back(root, B)
    assert d0.asked() == [B]


def test_no_more_micro_batches_than_the_pipeline_holds_and_one() -> None:
    d0 = eager(stages=1)
    d0.send()
    d0.chain(ROOT, A, B)
    assert d0.asked() == []


@pytest.mark.parametrize("canonical", ["all", "needed"])
def test_a_canonical_run_repeats_a_row_without_seeing_it(canonical: str) -> None:
    d0 = eager(pipeinfer_canonical=canonical)
    root = d0.send()
    d0.chain(ROOT, A)
    run = d0.send()
    d0.back(root, A)
    if canonical == "needed":
        assert d0.layer() == []
        return
    again = d0.send()
    assert tokens(again) == [A]
    assert again.positions.tolist() == run.positions.tolist()
    seen = again.base + np.flatnonzero(unpack_bits(again.bits, again.stop - again.base)[0])
    assert seen.tolist() == again.numbers.tolist()  # beside the text, to which A belongs only now
    assert run.numbers[0] not in again.committed
    assert d0.layer() == []
    assert d0.back(run, OTHER) == [(OTHER, False)]
    assert d0.send().committed.tolist() == run.numbers.tolist()


def test_a_canonical_run_waits_for_room_while_other_runs_come_back() -> None:
    d0 = eager()
    root = torn(d0)
    runs = [d0.send() for _ in range(3)]
    d0.back(root, OTHER)
    fresh = d0.send()
    d0.chain(OTHER, G)
    d0.send()
    assert d0.back(fresh, G) == [(G, True)]
    assert d0.back(runs[0]) == d0.back(runs[1]) == []
    assert d0.layer() == [G]


def test_no_canonical_run_for_a_row_whose_output_is_here() -> None:
    d0 = eager()
    root = d0.send()
    d0.chain(ROOT, A)
    run = d0.send()
    d0.chain(A, B)
    d0.send()
    d0.back(root, A)
    d0.back(run, B)
    assert [d0.layer(), d0.layer()] == [[B], []]


@pytest.mark.parametrize(("split", "rows"), [(0.3, [A, B]), (0.4, [A])])
def test_a_second_child_starts_a_branch_from_the_split_on(split: float, rows: list[int]) -> None:
    d0 = eager(pipeinfer_split=split)
    d0.send()
    d0.draft({ROOT: [(A, 0.5), (B, 0.35)]})
    assert d0.layer() == rows


def test_a_micro_batch_ends_at_its_length_or_where_the_draft_is_unsure() -> None:
    d0 = eager(pipeinfer_tokens=3, pipeinfer_accept=0.5)
    d0.send()
    d0.chain(ROOT, A, B)
    assert d0.layer() == []
    d0.chain(B, C)
    assert d0.layer() == [A, B, C]
    d0.chain(C, D)
    d0.chain(D, E, confidence=0.4)
    assert d0.layer() == [D]


def test_the_cutoff_rises_with_every_batch_falls_with_every_failure_and_is_reset() -> None:
    d0 = eager(pipeinfer_accept=0.01, pipeinfer_recovery=0.4, pipeinfer_decay=0.02)
    strategy = d0.strategy
    assert isinstance(strategy, PipeInfer)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.05)]})
    assert math.isclose(strategy.cutoff, 0.41)
    run = d0.send()
    d0.draft({A: [(B, 0.38)]})
    assert math.isclose(strategy.cutoff, 0.39)
    assert (d0.asked(), d0.layer()) == ([], [])  # another attempt with the same answer
    assert math.isclose(strategy.cutoff, 0.37)
    assert d0.asked() == [B]
    assert d0.layer() == [B]
    assert math.isclose(strategy.cutoff, 0.77)
    assert d0.back(root, A) == [(A, True)]
    assert math.isclose(strategy.cutoff, 0.01)
    d0.back(run, OTHER)
    assert math.isclose(strategy.cutoff, 0.01)


def test_without_decay_a_failed_attempt_is_not_repeated_before_text_comes() -> None:
    d0 = eager(pipeinfer_accept=0.5, pipeinfer_decay=0.0)
    root = d0.send()
    d0.draft({ROOT: [(A, 0.4)]})
    assert d0.asked() == []
    d0.back(root, OTHER)
    d0.send()
    assert d0.asked() == [OTHER]

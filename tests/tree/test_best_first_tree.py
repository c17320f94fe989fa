"""The tree that weighs evidence, against a model that recomputes every node's probability from its path."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kits.hypothesis_examples import examples

from flowspec_edge.tree.acceptance import AcceptanceEstimator, Evidence, accepted_path
from flowspec_edge.tree.best_first_tree import BestFirstTree
from flowspec_edge.tree.draft_tree import Node

NO = -math.inf
EXACT = 1e-9  # scores are kept up to date by adding changes
HOPELESS, WORTH_DRAFTING = 1e-4, 1e-3
FRESH = AcceptanceEstimator(True, learns=False)
confidences = st.one_of(st.sampled_from([0.0, -0.1, -0.7, -0.7, -3.0, -9.0]), st.floats(-20, 0))


@dataclass(eq=False)
class Guess:
    """A child of the model: what is known of it, no score, and no node as long as none was needed."""

    node: Node | None
    parent: Guess | None
    drafted: float = NO
    looked_up: float = NO
    expanded: bool = False
    sent: bool = False
    successor: int = -1
    children: dict[int, Guess] = field(default_factory=dict)

    def below(self) -> list[Guess]:
        """All nodes below this one."""
        return [guess for child in self.children.values() for guess in (child, *child.below())]

    @property
    def made(self) -> Node:
        """Its node, which must be there."""
        assert self.node is not None
        return self.node


class Model(RuleBasedStateMachine):
    """Whatever happens, in whatever order."""

    @initialize(greedy=st.booleans())
    def start(self, greedy: bool) -> None:
        self.acceptance = AcceptanceEstimator(greedy, learns=False)
        self.tree = BestFirstTree(99, 10, 0, self.acceptance)
        self.root = Guess(self.tree.root, None)
        self.numbers = 0

    def chance(self, parent: Guess, drafted: float, looked_up: float) -> float:
        return self.acceptance.probability(Evidence(drafted, looked_up, parent.expanded))

    def log_p(self, guess: Guess) -> float:
        """The sum along its path, from the root as it is now."""
        total, step = 0.0, guess
        while step is not self.root:
            assert step.parent is not None
            total += math.log(self.chance(step.parent, step.drafted, step.looked_up))
            step = step.parent
        return total

    def is_held(self, parent: Guess, held: bool, p: float) -> bool:
        """A new child with this chance given its parent: held unless it is hopeless."""
        p *= math.exp(self.log_p(parent))
        assert p > HOPELESS * (1 - EXACT) if held else p < HOPELESS * (1 + EXACT)
        return held

    def make_nodes(self) -> None:
        """Look which children have become nodes meanwhile."""
        for guess in [self.root, *self.root.below()]:
            if guess.node is not None:
                for token, child in guess.children.items():
                    child.node = guess.node.children.get(token)

    def nodes(self) -> list[Guess]:
        """All that have a node."""
        return [guess for guess in (self.root, *self.root.below()) if guess.node is not None]

    @rule(data=st.data(), token=st.integers(0, 4), confidence=confidences)
    def the_text_names_a_child(self, data: st.DataObject, token: int, confidence: float) -> None:
        parent = pick(data, self.nodes())
        node = self.tree.look_up_child(parent.made, token, confidence)
        known = parent.children.get(token)
        if known is not None:
            assert node is parent.made.children[token]
            assert known.node in (node, None)
            known.looked_up = confidence
        elif self.is_held(parent, node is not None, self.chance(parent, NO, confidence)):
            parent.children[token] = Guess(node, parent, looked_up=confidence)
        self.make_nodes()

    @rule(limit=st.integers(1, 4), children=st.dictionaries(st.integers(0, 4), confidences, max_size=3),
          again=st.booleans(), answered=st.integers(0, 4))
    def draft(self, limit: int, children: dict[int, float], again: bool, answered: int) -> None:
        """A pass over the likeliest unexpanded nodes, and perhaps over the root again."""
        may = [guess for guess in self.root.below()
               if not guess.expanded and guess.parent is not None and guess.parent.expanded]
        asked = self.given_out(self.tree.pop_unexpanded(limit), limit, may, WORTH_DRAFTING)
        self.tree.requeue_expansion([guess.made for guess in asked[answered:]])
        for guess in ([self.root] if again else []) + asked[:answered]:
            self.expand(guess, children)

    def expand(self, guess: Guess, children: dict[int, float]) -> None:
        """The draft model names these children, and beside them one that is absent."""
        tokens, scores = [*children, 5], [*children.values(), NO]
        guess.expanded = True
        order = sorted(range(len(tokens)), key=lambda place: -scores[place])
        tokens, scores = [tokens[place] for place in order], [scores[place] for place in order]
        for token in [token for token, child in guess.children.items() if child.node is None]:
            del guess.children[token]  # named before, and taken back
        estimates = self.acceptance.draft_estimates(np.array(scores)).tolist()
        self.tree.name_children(guess.made, tokens, scores, estimates)
        named = {token for token, _, _ in self.tree.named_children(guess.made)}
        for token, confidence in children.items():
            known = guess.children.get(token)
            if known is not None:
                known.drafted = confidence
            elif self.is_held(guess, token in named, self.chance(guess, confidence, NO)):
                guess.children[token] = Guess(None, guess, drafted=confidence)

    def given_out(self, nodes: list[Node], limit: int, of: list[Guess], least: float) -> list[Guess]:
        """What these nodes stand for, which must be the likeliest ``of`` those, in falling order: ``limit``,
        or all that are likelier than ``least``."""
        self.make_nodes()
        by_id = {guess.made.id: guess for guess in self.nodes()}
        chosen = [by_id[node.id] for node in nodes]
        assert len({node.id for node in nodes}) == len(nodes)
        surely, perhaps = ([guess for guess in of if self.log_p(guess) > math.log(least * edge)]
                           for edge in (1 + 1e-6, 1 - 1e-6))
        assert min(limit, len(surely)) <= len(chosen) <= min(limit, len(perhaps))
        assert all(guess in perhaps for guess in chosen)  # none that was sent, or is gone
        scores = [self.log_p(guess) for guess in chosen]
        assert all(a >= b - EXACT for a, b in pairwise(scores))
        left = [self.log_p(guess) for guess in surely if guess not in chosen]
        assert not left or not scores or max(left) <= scores[-1] + EXACT
        return chosen

    @rule(limit=st.integers(0, 6), kept=st.integers(0, 6))
    def send(self, limit: int, kept: int) -> None:
        """Take; send as many as are wanted and put back the rest."""
        unsent = [guess for guess in self.root.below() if not guess.sent]
        taken = self.given_out(self.tree.pop_unsent(limit), limit, unsent, HOPELESS)
        for place, guess in enumerate(taken):
            assert guess.parent is not None
            assert guess.parent is self.root or guess.parent.sent or guess.parent in taken[:place]
        for guess in taken[:kept]:
            self.mark_sent(guess)
        self.tree.requeue([guess.made for guess in taken[kept:]])

    def mark_sent(self, guess: Guess) -> None:
        self.tree.mark_sent(guess.made, self.numbers)
        guess.sent = True
        self.numbers += 1

    @precondition(lambda self: not self.root.sent)
    @rule()
    def send_the_root(self) -> None:
        self.mark_sent(self.root)

    @rule(data=st.data(), token=st.integers(0, 4))
    def come_back(self, data: st.DataObject, token: int) -> None:
        waiting = [guess for guess in (self.root, *self.root.below()) if guess.sent and guess.successor < 0]
        if waiting:
            guess = pick(data, waiting)
            guess.successor = data.draw(st.sampled_from([*guess.children, token]))
            assert self.tree.record(guess.made.number, guess.successor)

    @rule()
    def walk(self) -> None:
        """As far as the target has spoken; a miss begins a new tree."""
        root = self.root
        while root.successor in root.children:
            root = root.children[root.successor]
        self.tree.learn()  # of this estimate, which does not: nothing changes
        path, missed = accepted_path(self.tree)
        self.make_nodes()
        assert (path[-1] if path else self.root.made) is root.made
        assert missed == root.successor
        if missed >= 0:
            self.tree = BestFirstTree(missed, root.made.position + 1, self.tree.next_id, self.acceptance)
            self.root = Guess(self.tree.root, None)
        else:
            self.tree.reroot(path)
            self.root, root.parent = root, None

    @invariant()
    def probabilities_are_those_of_the_evidence(self) -> None:
        nodes = [guess for guess in self.nodes() if guess is not self.root]
        assert {node.id for node in self.tree.nodes()} == {guess.made.id for guess in nodes}
        assert self.tree.probability(self.tree.root) == 1
        for guess in nodes:
            assert self.tree.probability(guess.made) == pytest.approx(math.exp(self.log_p(guess)), rel=EXACT)

    @invariant()
    def nothing_is_known_of_dropped_nodes(self) -> None:
        assert set(self.tree._scores) <= {node.id for node in (self.tree.root, *self.tree.nodes())}

    @invariant()
    def what_is_no_node_is_named(self) -> None:
        for parent in self.nodes():
            named = [token for token, _, _ in self.tree.named_children(parent.made)]
            assert sorted(named) == sorted(t for t, child in parent.children.items() if child.node is None)
            for token, _, estimate in self.tree.named_children(parent.made):
                assert estimate == pytest.approx(self.log_p(parent.children[token]) - self.log_p(parent))


def pick(data: st.DataObject, what: list[Guess]) -> Guess:
    """Any one of them."""
    return what[data.draw(st.integers(0, len(what) - 1))]


Model.TestCase.settings = settings(examples(120, quick=40), stateful_step_count=40)
TestBestFirstTree = Model.TestCase


def made() -> BestFirstTree:
    return BestFirstTree(99, 10, 0, AcceptanceEstimator(True, learns=False))


def named(tree: BestFirstTree, parent: Node, *children: tuple[int, float],
          acceptance: AcceptanceEstimator = FRESH) -> list[Node]:
    """Children that the draft model alone names, each as believed as the model is confident; made nodes."""
    scores = [math.log(p) for _, p in children]
    estimates = acceptance.draft_estimates(np.array(scores)).tolist()
    tree.name_children(parent, [token for token, _ in children], scores, estimates)
    tree.requeue(tree.pop_unsent(1000))  # which has made nodes of them
    return [parent.children[token] for token, _ in children]


@given(st.lists(st.sampled_from([0.2, 0.3, 0.4]), min_size=2, max_size=12), st.integers(1, 3))
@settings(deadline=None)
def test_a_node_queued_again_under_a_former_score_is_given_once(chances: list[float], limit: int) -> None:
    tree = made()
    for p in chances:
        named(tree, tree.root, *((token, p) for token in (1, 2, 3)))
    given_out: list[int] = []
    while nodes := tree.pop_unexpanded(limit):
        given_out += [node.token for node in nodes]
        for node in nodes:
            named(tree, node)
    assert sorted(given_out) == [1, 2, 3]
    assert sorted(node.token for node in tree.pop_unsent(10)) == [1, 2, 3]


def test_what_the_target_has_reached_is_learned_once() -> None:
    acceptance = AcceptanceEstimator(True)
    tree = BestFirstTree(99, 10, 0, acceptance)
    [a] = named(tree, tree.root, (1, 0.5))
    b, other = named(tree, a, (2, 0.5), (3, 0.3))
    named(tree, other, (4, 0.3))
    expected = AcceptanceEstimator(True)
    for p, taken in ((0.5, True), (0.5, True), (0.3, False)):
        expected.learn(Evidence(math.log(p), NO, True), taken)
    for number, node in enumerate((tree.root, a, b, other)):
        tree.mark_sent(node, number)
    tree.record(0, 1)
    tree.record(1, 2)
    tree.record(3, 4)  # verified, but not on the way
    tree.learn()
    tree.reroot(accepted_path(tree)[0])
    tree.learn()  # nothing is new
    [new] = named(tree, b, (5, 0.4), acceptance=acceptance)
    assert tree.probability(new) == pytest.approx(expected.probability(Evidence(math.log(0.4), NO, False)))

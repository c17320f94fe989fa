"""Parameters: what is refused, and how long a segment they allow."""

from __future__ import annotations

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.strategies.flowspec_plus import FlowSpecPlusParameters
from flowspec_edge.strategies.params import Params


@pytest.mark.parametrize(("given", "message"), [
    ({"width": 0}, "width must be at least 1, not 0"),
    ({"pipeinfer_recovery": -0.1}, "pipeinfer_recovery must be at least 0, not -0.1"),
    ({"pipeinfer_accept": float("nan")}, "pipeinfer_accept must be a number (0 to 2), not nan"),
    ({"tau": 0.0}, "tau must be positive, not 0.0"),
    ({"rank": "score"}, "rank must be draft or noise, not 'score'"),
    ({"draft": "medusa"},
     "draft must be own or eagle2 or eagle2-deep or eagle3 or dflash or dspark or mtp or lm or ngram, "
     "not 'medusa'; a head's directory is given to flowspec models shard --draft DIR, or linked as MODEL/eagle2 or by "
     "the name of its kind"),
    ({"pipeinfer_canonical": "none"}, "pipeinfer_canonical must be all or needed, not 'none'"),
    ({"stpp_branching": "2,x"}, "stpp_branching must be positive numbers separated by commas, not '2,x'"),
    ({"stpp_branching": "100,100"}, "a segment of 10101 rows is more than 8192: lower the tree, width, gamma "
                                    "or branching that asks for it"),
    ({"plus_without": "nonsense"}, "plus_without knows ahead, curve, learn, lookup, not 'nonsense'"),
    ({"plus_rows": -1}, "plus_rows must be at least 0, not -1"),
])
def test_what_cannot_be_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Params(**given)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_ideas_are_left_out_by_name() -> None:
    assert FlowSpecPlusParameters().disabled_ideas() == frozenset()
    assert FlowSpecPlusParameters(plus_without=" learn,,lookup, ").disabled_ideas() == {"learn", "lookup"}


def test_the_longest_segment_is_that_of_the_widest_strategy() -> None:
    assert Params().largest_segment() == 81  # EAGLE-2's whole tree
    assert Params(stpp_branching="10,10,10").largest_segment() == 1 + 10 + 100 + 1000
    assert Params(pipedec_width=500).largest_segment() == 501
    assert Params(plus_rows=500).largest_segment() == 501

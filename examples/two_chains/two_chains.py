"""A strategy outside flowspec_edge: two chains of draft tokens, verified in one segment.

A strategy decides; it never acts. It is asked for a draft pass when D0 is idle, and for a segment when the
first stage has room, and it hears which token the target gives after each row. ``TreeStrategy`` brings the
draft tree, the acceptance rule and the restart after a miss, so two decisions remain.
"""

from __future__ import annotations

from flowspec_edge import Segment, TreeStrategy


class TwoChains(TreeStrategy):
    name = "two_chains"
    summary = "two chains of EAGLE-2's draft tokens, verified whole, by turns (an example)"
    parameters = ("speculative_gamma",)  # the names that --set takes

    @property
    def max_in_flight(self) -> int:
        return 1  # segments: the next one waits for the verdict on this one

    def begin_round(self) -> None:
        """Draft ``speculative_gamma`` levels of two nodes each below the root, the newest token."""
        gamma = self.params.speculative_gamma
        self.expand([self.tree.root], levels=gamma, width=2, keep=2 * gamma)

    def next_segment(self) -> Segment | None:
        if self.drafting or self.tree.root.number >= 0:  # not drafted yet, or sent already
            return None
        return self.send(self.tree.pop_unsent(self.tree.size), root=True)

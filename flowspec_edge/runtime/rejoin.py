"""After a loss: who is waited for, who is started anew, and for how long.

Knows which stages have shown that they can go on, which processes here must be replaced, and when it
is enough.  Does not know requests or sessions: whoever drives the cluster keeps them meanwhile.

A stage shows that it can go on by a heartbeat, after the loss and after its Hello, that says it can
reach the next device.  One whose process is ours is killed when it is silent, and started anew when
it has ended.  Others are started by others; they, and those whose links broke, come back by
themselves.  Tensor-parallel ranks cannot do without one another: all are started anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from flowspec_edge.errors import PeerLost
from flowspec_edge.runtime.children import Children
from flowspec_edge.runtime.observer import Observer
from flowspec_edge.runtime.stage_links import ADVICE, StageLinks

log = logging.getLogger(__name__)

_LOOK_S = 0.05  # how often the stages are looked at
_MOST_STARTS = 5  # of a stage, after one loss
_PAUSE_S = 0.5  # before the second of them; doubled every time


class Rejoin:
    """Waits for the stages of a cluster; only the thread that drives it may call.

    trouble  what was lost, while it is waited for; any thread may read it
    """

    def __init__(self, links: StageLinks, children: Children, within: float, observer: Observer,
                 gone: Callable[[], str | None], new_group: Callable[[], None] | None = None) -> None:
        """within     seconds for all stages to be back; with 0 a loss is the end
        gone       says whether a stage that others started has ended for good, and why
        new_group  for ranks, which are started anew together: called when all have ended
        """
        self.trouble: str | None = None
        self._links = links
        self._children = children
        self._within = within
        self._observer = observer
        self._gone = gone
        self._new_group = new_group
        self._lost_at = 0.0
        self._deadline = 0.0
        self._starts: dict[int, int] = {}  # since the loss, by stage
        self._start_at: dict[int, float] = {}  # not before
        self._in_vain = ""  # how the last start ended that was no success

    def lost(self, error: PeerLost) -> None:
        """A stage is lost, for the first time or again before all were back: wait for all from now on.

        Raises ``error`` if nothing is to be waited for any more.
        """
        now = time.monotonic()
        if self.trouble is None:
            self._lost_at, self._deadline = now, now + self._within
            self._starts.clear()
            self._start_at.clear()
            self._in_vain = ""
        if now >= self._deadline or self._gone() is not None:
            raise error
        self.trouble = str(error).removesuffix(ADVICE)
        log.warning("%s; waiting for it for up to %.0f s", self.trouble, self._deadline - now)
        self._observer.lost(self.trouble, now)
        self._links.members.expect_all()
        if self._new_group:
            self._start_anew(dict.fromkeys(range(1, len(self._children.pids) + 1), self.trouble))

    def wait(self) -> bool:
        """Look after the stages once, for a moment; whether all are back.

        PeerLost, which names who is not, when the time is over or a stage ends again and again.
        """
        members = self._links.members
        silent: list[int] = []
        try:
            self._links.collect(lambda message: None)
            silent = members.silent(time.monotonic())
        except PeerLost as error:  # another word of that stage is waited for, or its end
            log.info("%s", error)
        if self._children.pids:
            self._start_anew({**{stage: f"V{stage} is silent" for stage in silent}, **self._children.ended()})
        if (gone := self._gone()) is not None:
            raise PeerLost(gone + ADVICE)
        absent = members.absent()
        if not absent and self._links.reaches_v1 and not self._children.ended():
            return True
        if time.monotonic() >= self._deadline:
            who = ", ".join(absent) if absent else "V1 (D0 cannot reach it)"
            raise PeerLost(f"{self.trouble}; not back within {self._within:g} s: {who}{self._in_vain}")
        self._links.wait(_LOOK_S)
        return False

    def over(self) -> None:
        """All go on."""
        self.trouble = None
        now = time.monotonic()
        log.warning("all stages are back after %.1f s", now - self._lost_at)
        self._observer.back(now)

    def _start_anew(self, causes: Mapping[int, str]) -> None:
        """Replace the processes of these stages, unless one was replaced just now; of ranks, all."""
        now = time.monotonic()
        due = {stage: cause for stage, cause in causes.items() if now >= self._start_at.get(stage, 0.0)}
        if not due:
            return
        for stage, cause in due.items():
            starts = self._starts.get(stage, 0)
            if starts == _MOST_STARTS:
                self._deadline = now
                raise PeerLost(f"{cause}; it was started {starts} times in vain")
            if starts:
                self._in_vain = f" ({cause})"
            log.warning("%s: it is started anew", cause)
        stages = range(1, len(self._children.pids) + 1) if self._new_group else sorted(due)
        for stage in stages:
            self._start_at[stage] = now + _PAUSE_S * 2 ** self._starts.get(stage, 0)
            self._starts[stage] = self._starts.get(stage, 0) + 1
            self._links.members.forget(stage)
        self._children.restart(stages, self._new_group)

"""The time to the first token by the length of the prompt.

No strategy drafts before the first token, so it is plain decoding's for all of them.  Which tokens a prompt has makes
no difference, so that a prompt of one token over and over will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowspec_edge.errors import UsageError

if TYPE_CHECKING:
    from flowspec_edge.d0.request import Request, Result
    from flowspec_edge.drivers.virtual.devices import Devices
    from flowspec_edge.strategies.params import Params

LENGTHS = (512, 4096, 32_768)  # tokens of a prompt


@dataclass(frozen=True)
class FirstToken:
    """The time to the first token of a prompt of some length.

    seconds  from the request's arrival to its first token; None if the prompt does not fit
    why      it does not fit, or what has to be set so that it does; "" for nothing
    """

    prompt_tokens: int
    seconds: float | None
    why: str = ""


def request_of(tokens: int, params: Params | None = None, first: int = 0) -> Request:
    """Return a request for an answer of one token.

    Its prompt has ``tokens`` tokens, and begins with the token ``first``.
    """
    from flowspec_edge.d0.request import Request  # here: readers of results need neither numpy nor a driver
    from flowspec_edge.strategies.params import Params

    return Request([first, *[0] * (tokens - 1)], "autoregressive", 1, params=params or Params())


def in_virtual_time(devices: Devices, tokens: int, params: Params | None = None) -> FirstToken:
    """Simulate the prompt on ``devices``, without a model."""
    from flowspec_edge.drivers.virtual.cluster import VirtualCluster
    from flowspec_edge.drivers.virtual.recording import RecordedText, Recording
    from flowspec_edge.model.draft_kinds import EAGLE2
    from flowspec_edge.sampling.settings import Sampling

    text = RecordedText("prompt", str(tokens), (0,) * tokens, (0,), "length", None, Sampling(), ())
    recording = Recording("prompt", devices.d0.model.layers, 2, frozenset(), EAGLE2.name, "noise", 0.6, (text,))
    with VirtualCluster(recording, len(devices.stages), devices) as cluster:
        return FirstToken(tokens, cluster.generate(request_of(tokens, params)).stats.ttft_s)


def measured(generate: Callable[[Request], Result], lengths: Sequence[int], params: Params | None = None
             ) -> list[FirstToken]:
    """Run a prompt of each length on a cluster; those that its model was not made for have a reason instead."""
    results = []
    for first, tokens in enumerate(lengths):  # no prompt goes on with the cache of another
        try:
            results.append(FirstToken(tokens, generate(request_of(tokens, params, first)).stats.ttft_s))
        except UsageError as error:
            results.append(FirstToken(tokens, None, str(error).partition(";")[0]))
    return results

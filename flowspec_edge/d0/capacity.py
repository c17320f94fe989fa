"""Cache rows that requests take in every stage, for text and for drafts."""

from __future__ import annotations

from flowspec_edge.d0.request import Request
from flowspec_edge.strategies.params import Params


def tentative_rows(params: Params, stages: int) -> int:
    """Rows for draft nodes: two whole trees and all rows in flight, doubled because prunes may be late."""
    return max(1024, 2 * (2 * params.largest_tree() + (stages + 2) * params.largest_segment()))


def session_rows(request: Request, stages: int) -> int:
    return len(request.prompt) + request.max_new_tokens + tentative_rows(request.params, stages)


def cache_rows(context: int, at_once: int, params: Params, stages: int) -> int:
    """Rows for ``at_once`` concurrent requests whose texts and retained prefixes total ``context`` tokens."""
    return context + at_once * tentative_rows(params, stages)

"""How many examples a property test tries: a part of them in `make test`, all of them in `make soak`."""

from __future__ import annotations

import os

from hypothesis import settings

EVERYTHING = bool(os.environ.get("FLOWSPEC_ALL_EXAMPLES"))


def examples(all_of_them: int, quick: int) -> settings:
    """``quick`` new random examples in every run, or all where FLOWSPEC_ALL_EXAMPLES is set."""
    return settings(max_examples=all_of_them if EVERYTHING else quick, deadline=None)

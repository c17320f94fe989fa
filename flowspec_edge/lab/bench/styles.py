"""How a method looks, the same in every figure: its name in the papers, colour and marker."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from flowspec_edge.strategies.registry import STRATEGIES, title_of


class MethodStyle(NamedTuple):
    """How figures show a method; ``marker`` is one of matplotlib's that can be hollow."""

    label: str
    colour: str
    marker: str


# Colours of Paul Tol's schemes for the colour-blind; neighbours in a figure differ in marker, too.
STYLES = {
    "flowspec": ("#ee6677", "o"),
    "flowspec_plus": ("#aa3377", "*"),
    "flowspec_no_sbd": ("#ccbb44", "^"),
    "pruned_pp": ("#66ccee", "v"),
    "chunk_pp": ("#4477aa", "s"),
    "chain": ("#ee7733", "1"),
    "pipedec": ("#228833", "D"),
    "megatron": ("#555555", "p"),
    "galaxy": ("#997700", "d"),
    "autoregressive": ("#bbbbbb", "8"),
    "stpp": ("#eecc66", "h"),
    "spd": ("#009988", ">"),
    "pipeinfer": ("#222255", "P"),
    "pearl": ("#225522", "X"),
    "speculative": ("#994455", "<"),
}
METHODS = tuple(name for name in STRATEGIES if name in STYLES)  # all that come with this package
_OTHERS = ("#0077bb", "#cc3311", "#ee7733", "#33bbee", "#882255", "#44aa99")  # strategies from outside


def style_of(name: str) -> MethodStyle:
    """Return a strategy from outside gets a colour by its name."""
    look = STYLES.get(name) or (_OTHERS[crc32(name.encode()) % len(_OTHERS)], "H")
    return MethodStyle(title_of(name), *look)

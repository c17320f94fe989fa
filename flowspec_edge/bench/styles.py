"""How a method looks, the same in every figure: its name in the papers, colour and marker."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32


class MethodStyle(NamedTuple):
    """``marker`` is one of matplotlib's that can be hollow."""

    label: str
    colour: str
    marker: str


STYLES = {  # colours of Paul Tol's schemes for the colour-blind; neighbours in a figure differ in marker, too
    "flowspec": MethodStyle("FlowSpec", "#ee6677", "o"),
    "flowspec_plus": MethodStyle("FlowSpec+", "#aa3377", "*"),
    "flowspec_no_sbd": MethodStyle("FlowSpec w/o SBD", "#ccbb44", "^"),
    "pruned_pp": MethodStyle("Pruned PP", "#66ccee", "v"),
    "chunk_pp": MethodStyle("Chunk-PP", "#4477aa", "s"),
    "chain": MethodStyle("chain in flight", "#ee7733", "1"),
    "pipedec": MethodStyle("PipeDec", "#228833", "D"),
    "megatron": MethodStyle("Megatron-LM", "#555555", "p"),
    "galaxy": MethodStyle("Galaxy", "#997700", "d"),
    "autoregressive": MethodStyle("autoregressive", "#bbbbbb", "8"),
    "stpp": MethodStyle("STPP", "#eecc66", "h"),
    "spd": MethodStyle("SPD", "#009988", ">"),
    "pipeinfer": MethodStyle("PipeInfer", "#222255", "P"),
    "pearl": MethodStyle("PEARL", "#225522", "X"),
    "speculative": MethodStyle("speculative", "#994455", "<"),
}
_OTHERS = ("#0077bb", "#cc3311", "#ee7733", "#33bbee", "#882255", "#44aa99")  # strategies from outside


def style_of(name: str) -> MethodStyle:
    """A strategy from outside gets a colour by its name."""
    return STYLES.get(name) or MethodStyle(name, _OTHERS[crc32(name.encode()) % len(_OTHERS)], "H")

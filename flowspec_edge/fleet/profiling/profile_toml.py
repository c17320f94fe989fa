"""A profile as the text of a TOML file with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from flowspec_edge.config import Profile

_WIDTH = 110
_COMMENTS = {
    "layers": {"stage": "of the curve"},
    "bytes_per_value": {"model": "of a hidden state on the wire"},
    "layer_mb": {"model": "weights of one layer"},
    "quantised": {"model": "to 4 bits"},
    "full_ms": {"int4": "the same product with the profile's own weights"},
    "rows": {"stage": "of a segment; one ms and one context_ms for each"},
    "context_ms": {"stage": "added by 1000 cached tokens"},
    "overhead_ms": {"stage": "of every segment, for any number of layers"},
    "pass_ms": {"draft": "EAGLE head"},
    "lm_pass_ms": {"draft": "small draft model"},
    "spd_pass_ms": {"draft": "SPD's module"},
    "ms": {"lm_head": "for an output", "int4": "a product with int4 weights"},
    "row_ms": {"draft": "added by each node", "lm_head": "added by each row, bookkeeping included"},
    "mbps": {"link": "10^6 bits a second"},
    "bookkeeping_ms": {"host": "D0's own work for one output"},
    "step_ms": {"collective": "a step of a ring, without its bytes"},
    "usable_mb": {"memory": "free for the process of a stage or of D0"},
    "process_mb": {"memory": "of such a process beside weights and cache"},
    "gb_per_s": {"memory": "10^9 bytes read a second"},
    "temperature_c": {"conditions": "the hottest zone at the end of the measurement"},
    "peer": {"conditions": "the other end of the measured link"},
}
_LEFT_OUT: tuple[Any, ...] = (None, "", [], {})


def render(profile: Profile) -> str:
    data = profile.model_dump()
    lines = [f"{key} = {_long(value) if key == 'source' else _value(value)}" for key, value in data.items()
             if not isinstance(value, Mapping) and value is not None]
    for table, values in data.items():
        if isinstance(values, Mapping):
            lines += ["", f"[{table}]"]
            lines += [_line(table, key, value) for key, value in values.items() if value not in _LEFT_OUT]
    return "\n".join(lines) + "\n"


def _line(table: str, key: str, value: Any) -> str:
    comment = _COMMENTS.get(key, {}).get(table)
    return f"{key} = {_value(value)}" + (f"  # {comment}" if comment else "")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_text(str(key))} = {_value(inner)}" for key, inner in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    """A JSON string is valid TOML, except for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _long(value: str) -> str:
    """Each line of the multi-line string ends with a backslash, which joins it to the next."""
    lines = [""]
    for word in re.findall(r"^ +|[^ ]+ *", _text(value)[1:-1]):
        if lines[-1] and len(lines[-1]) + len(word) > _WIDTH - 1:
            lines.append("")
        lines[-1] += word
    return '"""\n' + "\\\n".join(lines) + '"""'

"""A profile as the text of a TOML file that a person can read and change.

Knows the order, the units and the remarks.  Does not write files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from flowspec_edge.config import Profile

_WIDTH = 110
_REMARKS = {
    "layers": {"stage": "the curve is for so many"},
    "bytes_per_value": {"model": "of a hidden state on the wire"},
    "layer_mb": {"model": "weights of one layer"},
    "rows": {"stage": "of a segment; what follows belongs to these"},
    "context_ms": {"stage": "added by 1000 cached tokens"},
    "overhead_ms": {"stage": "of every segment, however many layers"},
    "pass_ms": {"draft": "EAGLE head"},
    "lm_pass_ms": {"draft": "small draft model"},
    "spd_pass_ms": {"draft": "SPD's module"},
    "ms": {"lm_head": "for an output"},
    "row_ms": {"draft": "more for each node", "lm_head": "more for each row, bookkeeping included"},
    "mbps": {"link": "10^6 bits a second"},
    "bookkeeping_ms": {"host": "D0's own work for one output"},
    "step_ms": {"collective": "a step of a ring, beside its bytes"},
    "usable_mb": {"memory": "free for a stage's or D0's process"},
    "process_mb": {"memory": "what such a process takes beside weights and cache"},
    "gb_per_s": {"memory": "10^9 bytes a second that can be read"},
    "temperature_c": {"conditions": "the hottest zone, when the measuring ended"},
    "peer": {"conditions": "what the link was measured with"},
}
_LEFT_OUT: tuple[Any, ...] = (None, "", [], {})


def render(profile: Profile) -> str:
    """TOML that ``config.load_profile`` reads back as an equal profile."""
    data = profile.model_dump()
    lines = [f"{key} = {_long(value) if key == 'source' else _value(value)}" for key, value in data.items()
             if not isinstance(value, Mapping) and value is not None]
    for table, values in data.items():
        if isinstance(values, Mapping):
            lines += ["", f"[{table}]"]
            lines += [_line(table, key, value) for key, value in values.items() if value not in _LEFT_OUT]
    return "\n".join(lines) + "\n"


def _line(table: str, key: str, value: Any) -> str:
    remark = _REMARKS.get(key, {}).get(table)
    return f"{key} = {_value(value)}" + (f"  # {remark}" if remark else "")


def _value(value: Any) -> str:
    """A JSON text or number is one of TOML, too, if it holds no DEL."""
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_text(str(key))} = {_value(inner)}" for key, inner in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _long(value: str) -> str:
    """Over several lines, of which a backslash at the end makes one; it eats the space after it."""
    lines = [""]
    for word in re.findall(r"^ +|[^ ]+ *", _text(value)[1:-1]):
        if lines[-1] and len(lines[-1]) + len(word) > _WIDTH - 1:
            lines.append("")
        lines[-1] += word
    return '"""\n' + "\\\n".join(lines) + '"""'

"""Whether a JSON schema from a client can be compiled in bounded time and memory.

llguidance bounds the size of what it makes, but not its work on the intersection of patterns: thirty short
ones under ``allOf`` take minutes and gigabytes, and a thread cannot be ended.  Schemas with patterns are
therefore compiled in a process with limits first.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache

from flowspec_edge.errors import UsageError

_CPU_S = 3
_MEMORY = 2**30  # bytes of address space; an ordinary schema takes a tenth
_WALL_S = 60.0  # on a machine with other work
_REGEX = re.compile(r'"(?:pattern|patternProperties|format)"\s*:')
# Errors of the schema itself are reported where it is compiled for the tokenizer.
_COMPILE = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_S}, {_CPU_S}))
import llguidance
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
limits = llguidance.LLParserLimits(verbose_errors=False)
lark = sys.stdin.buffer.read().decode()
llguidance.LLMatcher(llguidance.LLTokenizer("byte"), lark, log_level=0, limits=limits)
"""


def require_tractable(lark: str) -> None:
    """UsageError if compiling ``lark``, a grammar without special tokens, needs more than the limits."""
    if _REGEX.search(lark) and not _compiles(lark):
        raise UsageError(f"the schema's patterns are too complex together: they take more than {_CPU_S} s or "
                         f"{_MEMORY >> 20} MiB")


@lru_cache(16)  # clients repeat their tools with every message; a text has at most 2 MiB
def _compiles(lark: str) -> bool:
    try:
        done = subprocess.run([sys.executable, "-c", _COMPILE], input=lark.encode(), timeout=_WALL_S,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0

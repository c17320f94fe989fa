"""Permissions that bind this process, if it is root's, too."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_VERSION = 0x20080522
_CAPGET, _CAPSET = (125, 126) if platform.machine() == "x86_64" else (90, 91)
_SYSCALL = ctypes.CDLL(None, use_errno=True).syscall


@contextmanager
def without_overrides() -> Iterator[None]:
    """Let permissions bind this thread, and those that it starts, meanwhile."""
    header, held = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert _SYSCALL(_CAPGET, header, held) == 0
    fewer = (ctypes.c_uint32 * 6)(*held)
    fewer[0] &= ~_OVERRIDES  # of the effective ones, which the permitted ones may become again
    assert _SYSCALL(_CAPSET, header, fewer) == 0
    try:
        yield
    finally:
        assert _SYSCALL(_CAPSET, header, held) == 0

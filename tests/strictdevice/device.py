"""Puts the strict device in the place of a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from strictdevice import build, log

CAPABILITY = (8, 7)  # an Orin's
_TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # shared with the host, as on an Orin


class Stream:
    """The only stream of the strict device."""

    device = None

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def synchronize(self) -> None:
        _wait("stream")

    def query(self) -> bool:
        return True

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass


class Event:
    """An event: copies that were queued before it was recorded are there once it has been waited for."""

    def __init__(self, *_: object, **__: object) -> None:
        self._ticket = -1

    def record(self, stream: object = None) -> None:
        self._ticket = log.device().ticket()

    def synchronize(self) -> None:
        _wait("event", self._ticket)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 1.0  # milliseconds


class Current:
    """``torch.cuda.device``: the only one is the current one."""

    def __init__(self, device: object = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _wait(name: str, until: int | None = None) -> None:
    log.tell("wait", name)
    log.device().finish(log.device().ticket() if until is None else until)


def install() -> None:
    """Put the strict device in the place of a GPU, once, before anything is computed.

    Calls after the first do nothing.  Needs a CPU build of PyTorch.
    """
    if log.extension is not None:
        return
    if torch.backends.cuda.is_built():
        raise RuntimeError("the strict device needs a CPU build of PyTorch")
    log.extension = build.extension()
    log.extension.listen(log.tell)
    _describe(log.extension)


def _describe(extension: Any) -> None:
    """Have ``torch.cuda`` describe one Orin."""
    only, generator = Stream(), torch.default_generator
    facts = SimpleNamespace(name="strict device", major=CAPABILITY[0], minor=CAPABILITY[1],
                            total_memory=_TOTAL, is_integrated=True, multi_processor_count=8)
    told = {
        "_lazy_init": lambda: None, "_is_in_bad_fork": lambda: False, "is_available": lambda: True,
        "is_initialized": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda device: None, "device": Current, "get_arch_list": lambda: ["sm_87"],
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: facts.name,
        "get_device_properties": lambda device=None: facts,
        "Stream": Stream, "Event": Event,
        "current_stream": lambda device=None: only, "default_stream": lambda device=None: only,
        "synchronize": lambda device=None: _wait("device"),
        "empty_cache": lambda: log.tell("wait", "empty_cache"),
        "mem_get_info": lambda device=None: (_TOTAL // 2, _TOTAL),
        "memory_allocated": lambda device=None: extension.held(),
        "memory_reserved": lambda device=None: extension.held(),
        "max_memory_allocated": lambda device=None: extension.most(),
        "default_generators": (generator,), "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
    }
    for name, value in told.items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # bitsandbytes imports it

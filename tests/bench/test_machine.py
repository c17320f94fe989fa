"""What is told about the machine, and what is not."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
import sys

import numpy
import torch

from flowspec_edge.bench.machine import machine, versions


def test_the_machine_but_not_whose_it_is() -> None:
    told = machine()
    assert told["cores"] == os.cpu_count()
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert platform.machine() in told["platform"]
    if sys.platform == "linux":
        with open("/proc/meminfo", encoding="utf-8") as file:
            assert told["memory_bytes"] // 1024 == int(file.readline().split()[1])
    words = set(re.split(r"[^\w.-]+", json.dumps(told)))
    assert words.isdisjoint({socket.gethostname(), getpass.getuser(), os.path.basename(os.getcwd())})


def test_versions() -> None:
    told = versions()
    assert (told["torch"], told["numpy"]) == (torch.__version__, numpy.__version__)
    assert told.keys() == {"flowspec-edge", "torch", "transformers", "numpy"}

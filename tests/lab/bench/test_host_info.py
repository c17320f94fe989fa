"""The description of the machine: complete, and anonymous."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
import sys

from flowspec_edge.lab.bench.host_info import host_info


def test_no_host_name_user_or_path() -> None:
    told = host_info()
    assert told["cores"] == os.cpu_count()
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert platform.machine() in told["platform"]
    if sys.platform == "linux":
        with open("/proc/meminfo", encoding="utf-8") as file:
            assert told["memory_bytes"] // 1024 == int(file.readline().split()[1])
    words = set(re.split(r"[^\w.-]+", json.dumps(told)))
    assert words.isdisjoint({socket.gethostname(), getpass.getuser(), os.path.basename(os.getcwd())})

"""Runs in a new environment on the board: checks imports, and that torch is the system's and computes."""

import importlib
import sys
from pathlib import Path

from flowspec_edge.boards.probe.onboard.torch_check import check_torch, innermost

MODULES = ("transformers", "zmq", "msgpack", "flowspec_edge.cli.main", "flowspec_edge.cli.serve.daemons",
           "flowspec_edge.drivers.stage.process", "flowspec_edge.drivers.stage.load",
           "flowspec_edge.drivers.processes.clusters", "flowspec_edge.strategies.flowspec_plus",
           "flowspec_edge.serving.server")

found = check_torch("cpu")
if found["why"]:
    sys.exit(f"the board's Python has no torch that every user can import: {found['why']}")
if Path(found["file"]).is_relative_to(sys.prefix):
    sys.exit(f"torch is not the board's own, but one in {sys.prefix}")
if found["numpy_fault"]:
    sys.exit(f"torch {found['version']} cannot use the environment's numpy {found['numpy']}: "
             f"{found['numpy_fault']}; install a torch that was built against it, for all users")
for name in MODULES:
    try:
        importlib.import_module(name)
    except Exception as error:  # a damaged library may raise anything
        sys.exit(f"{name} cannot be imported: {innermost(error)}")
if not importlib.import_module("transformers.utils").is_torch_available():
    sys.exit(f"transformers does not use torch {found['version']}: it is too old for it")

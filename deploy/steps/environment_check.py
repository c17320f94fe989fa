"""Runs in a new environment on the board: everything is there, and torch is the board's own."""

import importlib
import sys
from pathlib import Path

try:
    import torch
except ImportError as error:
    sys.exit(f"the board's Python has no torch that every user sees: {error}")
if Path(torch.__file__).is_relative_to(sys.prefix):
    sys.exit(f"torch is not the board's own, but one in {sys.prefix}")
for name in ("transformers", "zmq", "msgpack", "flowspec_edge.cli.main", "flowspec_edge.cli.draft",
             "flowspec_edge.runtime.worker", "flowspec_edge.runtime.met_clusters",
             "flowspec_edge.serving.server"):
    importlib.import_module(name)
if not importlib.import_module("transformers.utils").is_torch_available():
    sys.exit(f"transformers does not use torch {torch.__version__}: it is too old for it")

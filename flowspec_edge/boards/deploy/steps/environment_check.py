"""Runs in a new environment on the board: checks imports, and that torch is the system's and computes.

In an image, two arguments: what torch is to compute on, "cpu" or "cuda", and the release that is wanted.  The image
has a torch of its own.
"""

import importlib
import sys
from importlib.metadata import version
from pathlib import Path

from flowspec_edge.boards.probe.onboard.torch_check import check_torch, innermost

MODULES = ("transformers", "zmq", "msgpack", "flowspec_edge.cli.main", "flowspec_edge.cli.serve.daemons",
           "flowspec_edge.drivers.stage.process", "flowspec_edge.drivers.stage.load",
           "flowspec_edge.drivers.processes.clusters", "flowspec_edge.strategies.flowspec_plus",
           "flowspec_edge.serving.server")

image = sys.argv[1:]
device, release = image or ("cpu", version("flowspec-edge"))
owner = "image" if image else "board's Python"
if version("flowspec-edge") != release:
    sys.exit(f"the image has flowspec {version('flowspec-edge')}, and the release is {release}: build the image again")
torch_facts = check_torch(device)
if torch_facts["why"]:
    sys.exit(f"the {owner} has no torch that every user can import: {torch_facts['why']}")
if not image and Path(torch_facts["file"]).is_relative_to(sys.prefix):
    sys.exit(f"torch is not the board's own, but one in {sys.prefix}")
if device == "cuda" and (torch_facts["gpu_fault"] or not torch_facts["cuda"]):
    sys.exit(f"the image's torch {torch_facts['version']} does not compute on this board's GPU: "
             f"{torch_facts['gpu_fault'] or 'it sees none'}; build the image for this board's JetPack")
if torch_facts["numpy_fault"]:
    sys.exit(f"torch {torch_facts['version']} cannot use the {'image' if image else 'environment'}'s numpy "
             f"{torch_facts['numpy']}: {torch_facts['numpy_fault']}; install a torch that was built against it, "
             "for all users")
for name in MODULES:
    try:
        importlib.import_module(name)
    except Exception as error:  # a damaged library may raise anything
        sys.exit(f"{name} cannot be imported: {innermost(error)}")
if not importlib.import_module("transformers.utils").is_torch_available():
    sys.exit(f"transformers does not use torch {torch_facts['version']}: it is too old for it")

"""The part of a board's check-up that computes: torch, its GPU, a real product, 4-bit kernels, encryption.

Knows what must work for a stage to run here.  Libraries are asked in processes of their own, for one that
was built for other hardware may end the process that uses it.  Does not know models or other boards.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from flowspec_edge.fleet.checkup import Finding

_PATIENCE_S = 300.0  # a small board reads torch from its card
_SHAPE = (1024, 1024)
_ROWS = (1, 16)
_4_BIT = ("int4", "nf4")
_BUILD = ("build bitsandbytes on a board: cmake -DCOMPUTE_BACKEND=cuda -DCOMPUTE_CAPABILITY=87, and give "
          "that wheel to all; or shard in int4, which needs no bitsandbytes")

# What torch and transformers say of themselves and of one another, as a line of JSON.
_ASK = """
import json, torch, transformers
cuda = torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__,
                  "used": transformers.is_torch_available(), "built_for": torch.version.cuda,
                  "gpu": torch.cuda.get_device_name() if cuda else None}))
"""


@dataclass(frozen=True)
class Libraries:
    """What torch and transformers say.

    used       whether transformers uses this torch: one that it finds too old it leaves alone without a word
    built_for  the CUDA version that torch was built for; None for a build without
    gpu        its name, if torch sees one
    """

    torch: str
    transformers: str
    used: bool
    built_for: str | None
    gpu: str | None


def check_compute(jetson: bool) -> list[Finding]:
    """All of it; ``jetson``: a GPU must be there.  Takes as long as importing torch a few times."""
    libraries = _libraries()
    if isinstance(libraries, Finding):
        return [libraries, _encryption()]
    return [_torch(libraries), check_gpu(libraries, jetson), *_kernels("cuda" if libraries.gpu else "cpu"),
            _encryption()]


def _libraries() -> Libraries | Finding:
    try:
        done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=False,
                              timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return Finding("torch", "failed", f"importing it took more than {_PATIENCE_S:.0f} s",
                       "see whether the board swaps, or its card is failing: dmesg")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return Libraries(**json.loads(lines[-1]))
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    why = said[-1] if said else f"the process ended with code {done.returncode}"
    return Finding("torch", "failed", why, "install the release again, on top of the board's own torch")


def _torch(libraries: Libraries) -> Finding:
    found = f"{libraries.torch}, transformers {libraries.transformers}"
    if not libraries.used:
        return Finding("torch", "failed", f"{found}, which does not use so old a torch",
                       "install torch 2.6 or newer")
    return Finding("torch", "ok", found)


def check_gpu(libraries: Libraries, jetson: bool) -> Finding:
    """Whether torch sees one; ``jetson``: there is one to be seen."""
    if libraries.gpu:
        return Finding("gpu", "ok", f"{libraries.gpu}, CUDA {libraries.built_for}")
    if not jetson:
        return Finding("gpu", "ok", "none: this machine computes on its CPU")
    if libraries.built_for is None:
        return Finding("gpu", "failed", "this torch was built without CUDA",
                       "install a torch that was built for this JetPack, before flowspec")
    return Finding("gpu", "failed", f"torch, built for CUDA {libraries.built_for}, sees no GPU",
                   "see the groups below, and whether that is this JetPack's CUDA")


def _kernels(device: str) -> list[Finding]:
    """A real product in full and in 4 bits, each compared with float64."""
    from flowspec_edge.fleet.kernel_trial import Wish, try_kinds

    full = "fp16" if device == "cuda" else "fp32"
    trials = {trial.kind: trial for trial in try_kinds(Wish((full, *_4_BIT), device, _SHAPE, _ROWS, full))}
    findings = [Finding("product", "ok", f"{full} on {device}, right to {trials[full].error:.0e}")
                if trials[full].works else
                Finding("product", "failed", f"{full} on {device}: {trials[full].why}",
                        "this torch does not fit this device: install another")]
    works = [kind for kind in _4_BIT if trials[kind].works]
    if not works:
        whys = "; ".join(f"{kind}: {trials[kind].why}" for kind in _4_BIT)
        return [*findings, Finding("4 bits", "warning", whys, f"shard models in fp16, or {_BUILD}")]
    broken = [f"{kind} does not: {trials[kind].why}" for kind in _4_BIT if kind not in works]
    if broken:
        return [*findings, Finding("4 bits", "warning", f"{works[0]} works; {broken[0]}",
                                   _BUILD if works == ["int4"] else "shard models in nf4")]
    return [*findings, Finding("4 bits", "ok", f"{' and '.join(works)} work on {device}")]


def _encryption() -> Finding:
    import zmq

    if zmq.has("curve"):
        return Finding("encryption", "ok", f"CURVE, ZeroMQ {zmq.zmq_version()}")
    return Finding("encryption", "failed", f"this ZeroMQ ({zmq.zmq_version()}) has no CURVE",
                   "install pyzmq from its wheel: pip install --force-reinstall pyzmq")

"""The part of a board's check-up that computes: torch, its GPU, a real product, 4-bit kernels, encryption.

Knows what must work for a stage to run here.  Libraries are asked in processes of their own, for one that
was built for other hardware may end the process that uses it.  Does not know models or other boards.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowspec_edge.fleet.checkup import Finding

if TYPE_CHECKING:
    from flowspec_edge.fleet.kernel_trial import Trial

_PATIENCE_S = 300.0  # a small board reads torch from its card
_SHAPE = (1024, 1024)
_ROWS = (1, 16)
_4_BIT = ("int4", "nf4")

# What torch and transformers say of themselves and of one another, as a line of JSON.
_ASK = """
import json, torch, transformers
cuda = torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__,
                  "used": transformers.is_torch_available(), "built_for": torch.version.cuda,
                  "gpu": torch.cuda.get_device_name() if cuda else None,
                  "capability": torch.cuda.get_device_capability() if cuda else None}))
"""


@dataclass(frozen=True)
class Libraries:
    """What torch and transformers say.

    used       whether transformers uses this torch: one that it finds too old it leaves alone without a word
    built_for  the CUDA version that torch was built for; None for a build without
    gpu        its name, if torch sees one
    capability its compute capability, (8, 7) for Orin
    """

    torch: str
    transformers: str
    used: bool
    built_for: str | None
    gpu: str | None
    capability: tuple[int, int] | None = None


def check_compute(jetson: bool) -> list[Finding]:
    """All of it; ``jetson``: a GPU must be there.  Takes as long as importing torch a few times."""
    libraries = _libraries()
    if isinstance(libraries, Finding):
        return [libraries, _encryption()]
    return [_torch(libraries), check_gpu(libraries, jetson),
            *check_kernels(try_products(libraries), libraries.capability), _encryption()]


def _libraries() -> Libraries | Finding:
    try:
        done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=False,
                              timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return Finding("torch", "failed", f"importing it took more than {_PATIENCE_S:.0f} s",
                       "see whether the board swaps, or its card is failing: dmesg")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        told = json.loads(lines[-1])
        return Libraries(**{**told, "capability": tuple(told["capability"]) if told["capability"] else None})
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


def try_products(libraries: Libraries) -> list[Trial]:
    """A real product in full and in 4 bits, each compared with float64: the full kind's trial first."""
    from flowspec_edge.fleet.kernel_trial import Wish, try_kinds

    device, full = ("cuda", "fp16") if libraries.gpu else ("cpu", "fp32")
    return try_kinds(Wish((full, *_4_BIT), device, _SHAPE, _ROWS, full))


def check_kernels(trials: Sequence[Trial], capability: tuple[int, int] | None) -> list[Finding]:
    """What the trials of :func:`try_products` mean for a GPU of this compute capability; None: for a CPU."""
    from flowspec_edge.fleet.kernel_trial import advisable

    full, device = trials[0], "cpu" if capability is None else "cuda"
    findings = [Finding("product", "ok", f"{full.kind} on {device}, right to {full.error:.0e}")
                if full.works else
                Finding("product", "failed", f"{full.kind} on {device}: {full.why}",
                        "this torch does not fit this device: install another")]
    works = [trial.kind for trial in trials[1:] if trial.works]
    broken = [f"{trial.kind} does not: {trial.why}" for trial in trials[1:] if not trial.works]
    advised = next((kind for kind in works if advisable(kind, capability)), "fp16")
    if not broken:
        return [*findings, Finding("4 bits", "ok", f"{' and '.join(works)} work on {device}")]
    found = "; ".join([*(f"{kind} works" for kind in works), *broken])
    advice = f"shard models in {advised}"
    if "nf4" in works and not advisable("nf4", capability):
        advice += ": on this GPU bitsandbytes expands the whole matrix for every product of more than 4 rows"
    elif advised == "int4":
        advice += ", which needs no bitsandbytes"
    if "nf4" not in works and advisable("nf4", capability):
        advice += f", or {_build(capability)}"
    return [*findings, Finding("4 bits", "warning", found, advice)]


def _build(capability: tuple[int, int] | None) -> str:
    """How nf4 comes to work."""
    if capability is None:
        return "install bitsandbytes 0.49 or newer"
    return ("build bitsandbytes for this GPU: cmake -DCOMPUTE_BACKEND=cuda "
            f"-DCOMPUTE_CAPABILITY={capability[0]}{capability[1]}")


def _encryption() -> Finding:
    import zmq

    if zmq.has("curve"):
        return Finding("encryption", "ok", f"CURVE, ZeroMQ {zmq.zmq_version()}")
    return Finding("encryption", "failed", f"this ZeroMQ ({zmq.zmq_version()}) has no CURVE",
                   "install pyzmq from its wheel: pip install --force-reinstall pyzmq")

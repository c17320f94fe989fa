"""Whether this Python's torch can compute: the import, a round trip through numpy, one product on the GPU.

Runs on a bare board (``script``) and in a new environment (``environment_check``), so it needs only the
standard library, numpy, torch and Python 3.8.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import Any

_WIDTH = 256
_TOLERANCE = 0.01  # of the largest value: a hundred times the error of rounding to fp16
_OUT_OF_MEMORY_SCORE = "/proc/self/oom_score_adj"


def main(torch_device: str) -> None:
    """Print the facts as a line of JSON; if memory runs out, the kernel kills this process, not a service."""
    with suppress(OSError), open(_OUT_OF_MEMORY_SCORE, "w", encoding="ascii") as score:
        score.write("1000")
    print(json.dumps(check_torch(torch_device)))


def check_torch(torch_device: str) -> dict[str, Any]:
    """Check torch, and also the GPU, if ``torch_device`` is "cuda" and there is one.

    version, file, numpy  torch's version and file, numpy's version; "" if the import fails
    build                 a digest that differs between two builds of the same version
    cuda                  the GPU's compute capability, [8, 7] for Orin; None if torch sees no GPU
    built_for             the CUDA version that torch was built for; None for a build without CUDA
    why                   the innermost cause of a failed import
    numpy_fault           why torch and numpy cannot exchange arrays
    gpu_fault             why the GPU does not compute
    """
    facts: dict[str, Any] = {"version": "", "file": "", "build": "", "numpy": "", "cuda": None,
                             "built_for": None, "gpu": "", "why": "", "numpy_fault": "", "gpu_fault": ""}
    try:
        import torch  # isort: skip  # first: the one to report if both are missing
        import numpy
    except Exception as error:  # a damaged library may raise anything
        return {**facts, "why": innermost(error)}
    facts.update(version=torch.__version__, file=torch.__file__, build=build(), numpy=numpy.__version__,
                 built_for=torch.version.cuda, numpy_fault=round_trip())
    device = torch_device if torch_device.startswith("cuda") else "cuda"
    try:
        if torch.cuda.is_available():
            facts["cuda"] = list(torch.cuda.get_device_capability(device))
            facts["gpu"] = torch.cuda.get_device_name(device)
    except Exception as error:
        facts["gpu_fault"] = innermost(error)
    if facts["cuda"] and torch_device.startswith("cuda"):
        facts["gpu_fault"] = product(device)
    return facts


def round_trip() -> str:
    """Return why torch and numpy cannot exchange arrays; "" if they can.

    A torch built against another major version of numpy only warns at its import, and fails here.
    """
    import numpy
    import torch

    try:
        back = torch.from_numpy(numpy.arange(6, dtype="float32")).numpy()
    except Exception as error:
        return innermost(error)
    return "" if back.tolist() == [0, 1, 2, 3, 4, 5] else f"0 to 5 came back as {back.tolist()}"


def product(device: str) -> str:
    """Return why an fp16 product on ``device`` differs from the CPU's in float64; "" if it does not."""
    import torch

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_WIDTH, _WIDTH, generator=generator).half() for _ in range(2))
    expected = left.double() @ right.double()
    try:
        error = ((left.to(device) @ right.to(device)).cpu().double() - expected).abs().max().item()
    except Exception as failure:
        return innermost(failure)
    largest = expected.abs().max().item()
    return "" if error <= _TOLERANCE * largest else f"it is off by {error:.3g}, of values up to {largest:.3g}"


def build() -> str:
    from importlib.metadata import PackageNotFoundError, distribution

    import torch

    try:
        record = distribution("torch").read_text("RECORD") or ""
    except PackageNotFoundError:  # Debian's, or a copied one
        record = ""
    identity = (torch.version.git_version, torch.version.cuda, record)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def innermost(error: BaseException) -> str:
    """Return the end of the chain of causes in one line, such as "OSError: libcudart.so.12: cannot open …"."""
    inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if inner is not None:
        return innermost(inner)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

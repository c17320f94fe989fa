"""Stub libraries for a CUDA build of torch that is to be imported, and to compute on the CPU, without CUDA.

PyPI's x86_64 wheels of torch are linked to some 2.5 GB of CUDA's libraries.  In their place they get one
library that has every function which torch imports from them, and each returns an error: cudaErrorNoDevice
where torch asks how many GPUs there are.  So that torch is a CUDA build on a machine without a GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

_LIBRARY = re.compile(r"lib(cu|nccl|nvrtc|nvshmem)\w*\.so[.\d]*")
_FUNCTION = re.compile(r"(__cuda|cu(da|[A-Z]|blas|fft|pti|sparse|solver|dnn|rand)|nccl|nvrtc|nvshmem)\w*")
_TEXT = re.compile(r"String|Name$")  # these return a text
_NO_DEVICE = 100
_FILE = "libcuda.so.1"


def stub(directory: Path) -> None:
    """Write the libraries that torch's own in ``directory`` need into it."""
    libraries = [path for path in directory.glob("*.so*") if path.is_file()]
    needed = {name for path in libraries
              for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _said("readelf", "--dynamic", path))}
    # The linker wants versions as torch was linked to them: NAME@VERSION; those without one stay so.
    versions: defaultdict[str, set[str]] = defaultdict(set)
    for path in libraries:
        for line in _said("nm", "--dynamic", "--undefined-only", path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if _FUNCTION.fullmatch(name):
                versions[version].add(name)
    source = "".join(f'const char *{name}(void) {{ return "there is no GPU"; }}\n' if _TEXT.search(name) else
                     f"int {name}(void) {{ return {_NO_DEVICE}; }}\n"
                     for name in sorted(set().union(*versions.values())))
    script = directory / "stub.map"
    script.write_text("".join(f"{version} {{ global: {'; '.join(sorted(names))}; }};\n"
                              for version, names in sorted(versions.items()) if version))
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", f"-Wl,--version-script={script}", "-o",
                    str(directory / _FILE), "-x", "c", "-"], input=source, text=True, check=True)
    script.unlink()
    for name in sorted(needed):
        if _LIBRARY.fullmatch(name) and name != _FILE:
            (directory / name).symlink_to(_FILE)


def _said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

"""Finished parts of a model: a directory appears under its name only when it is complete.

Does not know what is in a part.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console


def make_part(console: Console, path: Path, part: Callable[[Path], None]) -> None:
    """Let ``part`` write into a directory beside ``path``, then give it that name.

    What is there already is left alone.
    """
    if path.is_dir():
        console.print(f"{path} is finished already; going on")
        return
    partial = path.with_name(f".partial-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    part(partial)
    for file in partial.rglob("*"):
        file.chmod(0o644)  # safetensors leaves its files to their owner alone
    os.replace(partial, path)
    console.print(f"{path} is finished")

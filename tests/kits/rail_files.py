"""Boards whose INA3221 is a directory: files as the kernel's driver writes them, changed by the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

CHIP = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
ORIN_NX = "NVIDIA Jetson Orin NX Engineering Reference Developer Kit"


def board(root: Path, watts: float, model: str = ORIN_NX, boot: str = "boot") -> Path:
    """An Orin NX that draws ``watts`` at 5 V; of its other two rails, which are parts of that, half."""
    write(root, "sys/firmware/devicetree/base/model", f"{model}\0")
    write(root, "proc/sys/kernel/random/boot_id", f"{boot}\n")
    for channel, label in enumerate(("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC"), start=1):
        write(root, f"{CHIP}/in{channel}_label", f"{label}\n")
        rail(root, channel, watts if channel == 1 else watts / 2)
    write(root, f"{CHIP}/in7_label", "sum of shunt voltages\n")
    write(root, f"{CHIP}/curr4_input", f"{round(2 * watts / 5 * 1000)}\n")
    return root


def rail(root: Path, channel: int, watts: float, chip: str = CHIP) -> None:
    """A channel's reading, at 5 V."""
    write(root, f"{chip}/in{channel}_input", "5000\n")
    write(root, f"{chip}/curr{channel}_input", f"{round(watts / 5 * 1000)}\n")


def write(root: Path, name: str, text: str) -> None:
    """A file as a whole: the sampler may read at any moment."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def once_measured(ask: Callable[[], T], measured: Callable[[T], object], tries: int = 5) -> T:
    """The first result of ``ask`` that is ``measured``, else the last of ``tries``: a meter whose thread gets
    no processor for over a second leaves a request without a figure."""
    result = ask()
    for _ in range(tries - 1):
        if measured(result):
            break
        result = ask()
    return result

"""The process of a stage that takes an emulated device's time: ``drivers.stage.process`` with other parts.

    python -m flowspec_edge.lab.emulation --config FILE
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flowspec_edge.drivers.stage import process
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.drivers.stage.parts import StageParts
from flowspec_edge.lab.emulation.durations import Emulation
from flowspec_edge.lab.emulation.emulator import FILE
from flowspec_edge.lab.emulation.links import EmulatedTransport
from flowspec_edge.transport.keys import KeyPair


def serve(path: Path, verbose: bool = False, config_changes: Mapping[str, Any] | None = None,
          directory: Path | None = None) -> int:
    """Serve as ``drivers.stage.process.serve``; the emulation is described beside the configuration."""
    return process.serve(path, verbose, config_changes, directory=directory,
                         make_parts=partial(emulated_parts, path.with_name(FILE)))


def emulated_parts(file: Path, config: WorkerConfig, pair: KeyPair | None) -> StageParts:
    """Return links and times of the device that ``file`` describes for this stage."""
    emulation = Emulation.load(file)
    transport = EmulatedTransport(emulation, config.stage, keys=pair, unencrypted=config.unencrypted)
    return StageParts(transport, emulation.charge(config.stage))

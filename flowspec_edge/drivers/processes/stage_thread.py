"""The only stage of a cluster as a thread of D0's process.

A board that holds a whole model then needs one CUDA context and one interpreter, not two.  This saves 0.9 GB
of the 5.5 GB that an 8 GB board has.  D0 and its only stage never compute at the same time, so nothing is
lost.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.drivers.stage.process import StopRequest, run_worker
from flowspec_edge.drivers.stage.status_sender import format_error
from flowspec_edge.errors import FlowspecError

log = logging.getLogger(__name__)


def shares_a_process(configs: Sequence[WorkerConfig]) -> bool:
    """Return whether the stage is a thread of this process.

    It is if it is the only stage, and not on a CPU, where forks share memory and a process can be killed.
    """
    return len(configs) == 1 and configs[0].device != "cpu"


class StageThread:
    """A stage with the part of ``Popen``'s interface that ``subprocesses`` uses.

    A thread cannot be killed: ``kill`` is ``terminate``, which a stage obeys between two layers.
    """

    def __init__(self, config: WorkerConfig, output: Path) -> None:
        """Start the stage; ``output``: the file for the error that ends it."""
        self.pid = os.getpid()
        self._stop = StopRequest()
        self._code: int | None = None
        # A duplicate, because the stage closes its socket, and the cluster needs the socket for a restart.
        changes = {"listen_fd": os.dup(config.listen_fd) if config.listen_fd >= 0 else -1, "parent": 0}
        self._config, self._output = config.model_copy(update=changes), output
        self._thread = threading.Thread(target=self._run, name=f"V{config.stage}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        code = 0
        try:
            run_worker(self._config, self._stop)
        except Exception as error:
            if not isinstance(error, FlowspecError):
                log.exception("V%d: unexpected error", self._config.stage)
            self._output.write_text(f"{format_error(error)}\n", encoding="utf-8")
            code = error.exit_code if isinstance(error, FlowspecError) else 1
        self._code = code

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self._code

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("stage", timeout or 0.0)
        return code

    def terminate(self) -> None:
        self._stop.arrived = True

    kill = terminate

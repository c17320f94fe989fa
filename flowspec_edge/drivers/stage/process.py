"""A verification device's process.

    python -m flowspec_edge.drivers.stage --config FILE
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from flowspec_edge.drivers.observe.power import board_meter
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.drivers.stage.parts import MakeParts, default_parts
from flowspec_edge.drivers.stage.release_link import ReleaseLink
from flowspec_edge.drivers.stage.sd_notify import Notifier
from flowspec_edge.drivers.stage.status_sender import format_error
from flowspec_edge.errors import FlowspecError
from flowspec_edge.messages import Failed
from flowspec_edge.transport import keys
from flowspec_edge.util.terminal import printable
from flowspec_edge.util.tomlfile import load_toml

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether a signal has asked the process to end; ``serving``: the worker's loop runs; ``arrived``: it is to end."""

    serving = arrived = False


class StopSignals(StopRequest):
    """SIGTERM and SIGINT end the process with exit code 0.

    While the shard loads, at once: loading may take minutes, and nothing can be lost. Once ``serving``, they
    are only noted for the worker's loop, because an exception raised by a handler could leave any function
    half done.
    """

    def __init__(self) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.arrived = True
        if not self.serving:
            os._exit(0)

    def ignore(self) -> None:
        """Ignore signals for the rest of the process, the interpreter's own end included."""
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def run_worker(config: WorkerConfig, signals: StopRequest, notifier: Notifier | None = None,
               release: ReleaseLink | None = None, make_parts: MakeParts = default_parts) -> None:
    """Load the shard and serve until Shutdown or a signal; errors are sent to D0 (Failed), then raised."""
    pair = keys.load(Path(config.key_file), config.public_key) if config.key_file else None
    from flowspec_edge.drivers.stage.worker import Worker, connect  # here, as below: it imports torch

    parts = make_parts(config, pair)
    try:
        links = connect(config, parts.transport)
        try:
            from flowspec_edge.drivers.stage.load import load_engine  # here: it imports torch

            engine, hello = load_engine(config)
            with board_meter(enabled=parts.charge is None) as meter:
                signals.serving = True
                Worker(config, links, engine, hello, notifier, meter, lambda: signals.arrived, release,
                       parts.charge).run()
        except Exception as error:
            links.control.send(Failed(config.instance, config.stage, format_error(error)))
            raise
    finally:
        parts.transport.close()


def serve(path: Path, verbose: bool = False, config_changes: Mapping[str, Any] | None = None,
          notifier: Notifier | None = None, directory: Path | None = None,
          release: ReleaseLink | None = None, make_parts: MakeParts = default_parts) -> int:
    """Run a configuration file's worker, with ``config_changes``; return the exit code. Errors go to stderr.

    ``directory`` belongs to the process that started this one, and is removed if that was killed.
    ``release``: of a service, which ends when D0 belongs to another one and a restart may mend that.
    """
    started_by = os.getppid()
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING)
    signals = StopSignals()
    try:
        run_worker(load_toml(path, WorkerConfig).model_copy(update=config_changes or {}), signals, notifier, release,
                   make_parts)
    except Exception as error:
        if not isinstance(error, FlowspecError):
            log.exception("V: unexpected error")
        print(f"flowspec worker: {printable(format_error(error))}", file=sys.stderr)
        return error.exit_code if isinstance(error, FlowspecError) else 1
    finally:
        signals.ignore()
        if directory and _is_gone(started_by):
            shutil.rmtree(directory, ignore_errors=True)  # other workers may do the same
    return 0


def _is_gone(started_by: int) -> bool:
    d0 = multiprocessing.parent_process()  # of a forked worker, which outlives its fork server
    return not d0.is_alive() if d0 else os.getppid() != started_by


def main(run: Callable[..., int] = serve) -> int:
    """Run the command line; ``run``: as :func:`serve`."""
    parser = argparse.ArgumentParser(description="One verification device of a flowspec cluster.")
    parser.add_argument("--config", type=Path, required=True, help="a worker's TOML file")
    parser.add_argument("--remove", type=Path, metavar="DIR",
                        help="remove this directory if the starting process is killed")
    parser.add_argument("--verbose", action="store_true", help="log what happens")
    arguments = parser.parse_args()
    return run(arguments.config, arguments.verbose, directory=arguments.remove)

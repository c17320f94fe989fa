"""The ``flowspec`` command: handles Ctrl-C from the first moment on, before its imports, which take long."""

from __future__ import annotations

import _thread
import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130  # 128 + SIGINT, the shells' convention


class _Interrupt:
    """Ctrl-C ends the process at once while nothing has begun or all is done, else by KeyboardInterrupt."""

    def __init__(self) -> None:
        self.running = False
        self.arrived = False
        # A shell's background job ignores SIGINT.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            sys.unraisablehook = self._unraisable

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.running:
            os._exit(_INTERRUPTED)
        self.arrived = True
        raise KeyboardInterrupt

    def _unraisable(self, about: sys.UnraisableHookArgs) -> None:
        """Repeat an interrupt that arrived in a destructor: the interpreter would print and forget it."""
        if issubclass(about.exc_type, KeyboardInterrupt):
            _thread.interrupt_main()
        else:
            sys.__unraisablehook__(about)


def main() -> int:
    interrupt = _Interrupt()
    from flowspec_edge.util.interpreter import leave_out_current_directory

    leave_out_current_directory()
    from flowspec_edge.cli.main import main as command

    interrupt.running = True
    try:
        code = command()
    except BaseException:
        if not interrupt.arrived:  # else a library made another exception of it
            raise
        code = _INTERRUPTED
    interrupt.running = False
    return _INTERRUPTED if interrupt.arrived and code else code


if __name__ == "__main__":
    sys.exit(main())

"""``python -m flowspec_edge.lab.emulation``."""

from __future__ import annotations

import sys

from flowspec_edge.drivers.stage.process import main
from flowspec_edge.lab.emulation.process import serve

sys.exit(main(serve))

"""Python imports this module as it starts, if its directory is in PYTHONPATH.

So pytest and all child processes of tests have the strict device.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from strictdevice.device import install

install()

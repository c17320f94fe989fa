"""The key that lets clients in who are not on the draft device itself.

Knows that the draft device makes it, once, and keeps it.  Does not know who asks with it.
"""

from __future__ import annotations

from flowspec_edge.fleet.commands import as_root
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.places import API_KEY
from flowspec_edge.fleet.ssh import runner_for

# Whole or not at all, and root's alone: systemd hands it to the service.
_MAKE = """
[ ! -s "$1" ] || exit 0
umask 377
head -c 33 /dev/urandom | base64 -w 0 > "$1.new"
mv "$1.new" "$1"
echo made
"""


def make_client_key(inventory: Inventory, device: DeviceEntry, path: str = API_KEY) -> bool:
    """See to it that the draft device has one; whether it was made just now.

    FlowspecError that names the board.
    """
    return bool(runner_for(inventory, device).run(as_root(["sh", "-ec", _MAKE, "sh", path])).strip())

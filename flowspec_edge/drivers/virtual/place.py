"""Virtual time as a backend of ``clusters.open_cluster``.

This module imports quickly, because the command line builds backends before it imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowspec_edge.device_profile import Profile
    from flowspec_edge.drivers.processes.spec import ClusterSpec
    from flowspec_edge.drivers.virtual.cluster import VirtualCluster
    from flowspec_edge.drivers.virtual.devices import Devices
    from flowspec_edge.drivers.virtual.recording import Recording


@dataclass(frozen=True)
class Virtual:
    """All devices are simulated in one process, and every time is the profile's (``VirtualCluster``).

    profile         of each device, which share the layers of its model evenly; or the devices themselves
    learn           D0 learns segment times from the stages' reports, instead of from the profile
    recording  what a model said, in place of a model
    right_children  the share of right children that drafts have (``CalibratedDrafter``): 1 is the head's own
    """

    profile: Profile | Devices
    learn: bool = False
    right_children: float = 1.0
    recording: Recording | None = None

    def open(self, spec: ClusterSpec) -> VirtualCluster:
        """Load the model; errors as of ``VirtualCluster``."""
        from flowspec_edge.drivers.virtual.cluster import VirtualCluster

        return VirtualCluster(self.recording or spec.model, spec.stages, self.profile, spec.dtype, spec.observer,
                              device=spec.device, learn=self.learn, scheduling_policy=spec.scheduling_policy,
                              right_children=self.right_children)

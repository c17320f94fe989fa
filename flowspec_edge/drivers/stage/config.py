"""Configuration of a stage process: one flat TOML file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from flowspec_edge.model.manifest import RunDtype
from flowspec_edge.transport.bind_check import unencrypted_bind_problem
from flowspec_edge.util.tomlfile import Count, Misplaced, Positive, StrictModel, Text


class WorkerConfig(StrictModel):
    """One stage V``stage`` of ``stages``; addresses are ZeroMQ endpoints such as tcp://host:port."""

    instance: Text  # identity on the control channel, unique in the cluster
    stage: Count
    stages: Count
    model: Text  # its directory; of a sharded model the stage's part is enough
    dtype: RunDtype = "fp32"
    device: Text = "cpu"
    cache_rows: Annotated[int, Field(ge=0)] = 0  # of KV caches, allocated at the start; 0: as sessions come
    requests: Annotated[int, Field(ge=0)] = 0  # at once, for which layers with a window have memory; 0: any
    threads: Annotated[int, Field(ge=0)] = 0  # of torch; 0: its default
    control: Text  # where D0's control channel listens
    listen: Text  # where this stage receives segments
    next: Text  # where it sends results: the next stage, or D0
    listen_fd: Annotated[int, Field(ge=-1)] = -1  # a listening socket for ``listen``, inherited
    heartbeat_s: Positive = 0.5
    # After this time without D0, a stage that D0 started ends and a service abandons its sessions; after
    # this time without the next device, every stage abandons its sessions.
    lost_after_s: Positive = 15.0
    # A link to the next device that breaks in a session and stays down is reported only after this time: if
    # that device is dead, D0 detects it sooner, and names it.
    broken_after_s: Positive = 8.0
    open_within_s: Positive = 10.0  # how long a segment may be ahead of its session's Open
    parent: Annotated[int, Field(ge=0)] = 0  # process that this one must not outlive; 0: none
    key_file: str = ""  # empty: no encryption, the keys below are not used
    unencrypted: bool = False  # allows links without encryption beyond loopback
    public_key: str = ""  # of the pair in key_file, Z85; empty: its only one
    control_key: str = ""  # public keys, Z85
    next_key: str = ""
    previous_key: str = ""

    @model_validator(mode="after")
    def _is_encrypted(self) -> WorkerConfig:
        if not self.unencrypted and not self.key_file:
            for key in ("control", "listen", "next"):
                if reason := unencrypted_bind_problem(getattr(self, key)):
                    raise Misplaced(reason, key)
        return self

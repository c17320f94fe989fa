"""What a stage process is told when it starts: one flat TOML file.

Knows the keys and writes them as well as it reads them.  Does not know what they are used for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from flowspec_edge.config import Strict, load_toml
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.tomlfile import Misplaced
from flowspec_edge.transport.reach import why_not_open

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dtype = Literal["fp32", "bf16", "fp16"]
Text = Annotated[str, Field(min_length=1)]


class WorkerConfig(Strict):
    """One stage V``stage`` of ``stages``; addresses are ZeroMQ endpoints such as tcp://host:port."""

    instance: Text  # the identity on the control channel; unique in the cluster
    stage: Annotated[int, Field(ge=1)]
    stages: Annotated[int, Field(ge=1)]
    model: Text  # the model's directory; of a sharded one the stage's own part is enough
    dtype: Dtype = "fp32"
    device: Text = "cpu"
    threads: Annotated[int, Field(ge=0)] = 0  # of torch; 0 leaves its default
    control: Text  # where D0's control channel listens
    listen: Text  # where this stage takes segments
    next: Text  # where its results go: the next stage, or from the last one D0
    listen_fd: Annotated[int, Field(ge=-1)] = -1  # a listening socket for ``listen``, inherited
    heartbeat_s: Seconds = 0.5
    # Without D0 for so long a stage that D0 started ends; another gives its sessions up, as any does
    # that has not reached the next device for so long.
    lost_after_s: Seconds = 15.0
    # A link to the next device that broke in a session and stays down, or that to another rank, is
    # reported only after so long: if that one is dead, D0 finds out sooner, and names it.
    broken_after_s: Seconds = 8.0
    parallelism: Parallelism = "pipeline"  # other than this, each stage is a rank with a slice of all layers
    group: str = ""  # where ranks meet: file:///path, shared and new, or tcp://host:port at V1
    interface: str = ""  # network interface of the ranks' own links; empty leaves it to gloo
    group_within_s: Seconds = 60.0  # how long a rank waits for the others in a collective
    open_within_s: Seconds = 10.0  # how long a segment may be ahead of its session's Open
    emulate: str = ""  # a file of runtime.emulation: take this device's time, not this machine's
    parent: Annotated[int, Field(ge=0)] = 0  # process that this one must not outlive; 0: none
    key_file: str = ""  # empty: no encryption, on loopback alone, and the keys below are not used
    unencrypted: bool = False  # links, and collectives, may be so beyond loopback, too
    control_key: str = ""  # public keys, Z85
    next_key: str = ""
    previous_key: str = ""

    @model_validator(mode="after")
    def _ranks_meet(self) -> WorkerConfig:
        if self.tensor_parallel and self.stages > 1 and not self.group:
            raise ValueError("group must say where the ranks meet")
        return self

    @model_validator(mode="after")
    def _is_encrypted(self) -> WorkerConfig:
        if not self.unencrypted:
            for key in ("group",) if self.key_file else ("control", "listen", "next", "group"):
                if reason := why_not_open(getattr(self, key)):  # collectives cannot be encrypted at all
                    raise Misplaced(reason, key)
        return self

    @property
    def tensor_parallel(self) -> bool:
        """Whether the stages are ranks that compute every segment together."""
        return self.parallelism != "pipeline"

    @classmethod
    def load(cls, path: Path) -> WorkerConfig:
        """Read ``path``; UsageError names the file and the key at fault."""
        return load_toml(path, cls)

    def dump(self) -> str:
        """The TOML that :meth:`load` reads."""
        # A JSON string or number is one of TOML too.
        return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
                       for key, value in self.model_dump().items())

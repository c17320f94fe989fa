"""What the draft device's service is told when it starts: one flat TOML file.

Knows the keys and writes them as well as it reads them.  Does not know what they are used for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from flowspec_edge.config import Strict, load_toml
from flowspec_edge.runtime.workerconfig import Dtype, Seconds, Text
from flowspec_edge.strategies.params import DEFAULT_STRATEGY
from flowspec_edge.tomlfile import Misplaced
from flowspec_edge.transport.reach import why_not_open

Several = Annotated[int, Field(ge=1)]


class DraftConfig(Strict):
    """D0 of a cluster whose stages are services of their own; addresses are ZeroMQ endpoints.

    Lists have one entry per stage, V1's first.
    """

    cluster: Text  # its name
    model: Text  # the sharded model's directory, with D0's part
    name: Text  # what clients call the model
    strategy: Text = DEFAULT_STRATEGY
    dtype: Dtype = "fp16"
    device: Text = "cpu"  # torch's, for lm_head and the draft models; the tree stays on the CPU
    control: Text  # where the stages connect to
    output: Text  # where VN's results come in
    first: Text  # where V1 takes segments
    instances: Annotated[list[Text], Field(min_length=1)]
    digests: list[str] = Field(default_factory=list)  # of shards, as in Hello; empty: any
    key_file: str = ""  # empty: no encryption, on loopback alone
    unencrypted: bool = False  # links may be so beyond loopback, too
    worker_keys: list[str] = Field(default_factory=list)  # public keys, Z85
    threads: Annotated[int, Field(ge=0)] = 0  # of torch; 0 leaves its default
    context: Several = 4096
    at_once: Annotated[int, Field(ge=0)] = 0  # 0: as many as there are stages, at least 2
    queue: Annotated[int, Field(ge=0)] = 16
    rejoin_within_s: Seconds = 60.0
    ready_within_s: Seconds = 60.0
    start_within_s: Seconds = 600.0  # for all stages to say Hello: they load their shards
    host: Text = "127.0.0.1"  # where HTTP listens
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key_file: str = ""

    @model_validator(mode="after")
    def _one_each(self) -> DraftConfig:
        for name in ("digests", "worker_keys"):
            if getattr(self, name) and len(getattr(self, name)) != len(self.instances):
                raise ValueError(f"{name} must have one entry per instance")
        if bool(self.key_file) != bool(self.worker_keys):
            raise ValueError("key_file and worker_keys go together")
        for key in () if self.key_file or self.unencrypted else ("control", "output", "first"):
            if reason := why_not_open(getattr(self, key)):
                raise Misplaced(reason, key)
        return self

    @classmethod
    def load(cls, path: Path) -> DraftConfig:
        """Read ``path``; UsageError names the file and the key at fault."""
        return load_toml(path, cls)

    def dump(self) -> str:
        """The TOML that :meth:`load` reads."""
        # JSON strings, numbers and lists of strings are TOML too.
        return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
                       for key, value in self.model_dump().items())

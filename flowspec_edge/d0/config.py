"""Configuration of the draft device's service: one flat TOML file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from flowspec_edge.d0.request import SchedulingPolicy
from flowspec_edge.model.draft_kinds import OWN, NamedDraft
from flowspec_edge.model.manifest import ComputeDtype
from flowspec_edge.strategies.params import DEFAULT_STRATEGY
from flowspec_edge.transport.bind_check import unencrypted_bind_problem
from flowspec_edge.util.tomlfile import Count, Misplaced, Origin, Positive, StrictModel, Text


class DraftConfig(StrictModel):
    """Addresses are ZeroMQ endpoints; lists have one entry per stage, V1's first."""

    cluster: Text  # name
    model: Text  # the sharded model's directory, with D0's part
    name: Text  # clients' name of the model
    strategy: Text = DEFAULT_STRATEGY
    draft: NamedDraft = OWN  # the strategy's own kind of draft model, or that kind
    dtype: ComputeDtype = "fp16"
    device: Text = "cpu"  # torch's, for lm_head and the draft models; the tree stays on the CPU
    control: Text  # where the stages connect to
    output: Text  # where VN's results arrive
    first: Text  # V1's address for segments
    instances: Annotated[list[Text], Field(min_length=1)]
    digests: list[str] = Field(default_factory=list)  # of shards, as in Hello; empty: any
    key_file: str = ""  # empty: no encryption, only on loopback
    unencrypted: bool = False  # allows unencrypted links beyond loopback
    public_key: str = ""  # of the pair in key_file, Z85; empty: its only one
    worker_keys: list[str] = Field(default_factory=list)  # public keys, Z85
    threads: Annotated[int, Field(ge=0)] = 0  # of torch; 0 leaves its default
    context: Count = 4096
    at_once: Annotated[int, Field(ge=0)] = 0  # 0: as many as there are stages, at least 2
    scheduling_policy: SchedulingPolicy = "fair"  # how they share the stages
    queue: Annotated[int, Field(ge=0)] = 16
    rejoin_within_s: Positive = 60.0
    ready_within_s: Positive = 60.0
    start_within_s: Positive = 600.0  # for all stages' Hello: they load their shards first
    host: Text = "127.0.0.1"  # where HTTP listens
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    forwarded_allow_ips: str = ""  # proxies whose X-Forwarded-For names the client
    cors_origins: list[Origin] = Field(default_factory=list)  # of web pages that may ask; "*": all
    api_key_file: str = ""  # one or several keys, one a line

    @model_validator(mode="after")
    def _check_counts(self) -> DraftConfig:
        for name in ("digests", "worker_keys"):
            if getattr(self, name) and len(getattr(self, name)) != len(self.instances):
                raise ValueError(f"{name} must have one entry per instance")
        if bool(self.key_file) != bool(self.worker_keys):
            raise ValueError("key_file and worker_keys go together")
        for key in () if self.key_file or self.unencrypted else ("control", "output", "first"):
            if reason := unencrypted_bind_problem(getattr(self, key)):
                raise Misplaced(reason, key)
        return self

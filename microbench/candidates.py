"""A candidate head's recall on real weights, and what it brings in virtual time.

``recall``: chats are drafted with the model's EAGLE-2 head (``--model``, which ranks by lm_head); of the states that
lm_head read, how many of the best ten tokens are among the candidates of a factor.  "own": as D0 makes it, "svd": of
lm_head's truncated SVD, which knows no states, "drafted": of the principal components of other drafted states.

``speed``: recordings under a testbed (``--testbed``), whose draft passes read all of lm_head, or a factor and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from flowspec_edge.boards.planning.testbed import profile_or_testbed
from flowspec_edge.d0 import models
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drafting.candidates import principal, sample_states
from flowspec_edge.drafting.eagle.eagle2 import rank_outputs
from flowspec_edge.drafting.load import load_drafters
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.recording import load_recording
from flowspec_edge.lab.bench.tasks import load_prompts
from flowspec_edge.model.chat import Message
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.model.output_head import OutputHead
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.quant.schemes import quantise_linears, scheme
from flowspec_edge.strategies.params import Params
from flowspec_edge.util.resources import resource_dir
from microbench._common import Row, options, print_rows

RANKS, COUNTS = (64, 128, 256), (32, 64, 128)
_STATES = 3000  # whose best ten tokens are sought
EAGLE2 = Params(draft="eagle2", ngram=False)


class Watched(OutputHead):
    """An output head that keeps the states that drafts rank by."""

    def __init__(self, head: OutputHead) -> None:
        super().__init__(list(head.blocks), head.hidden_size, head.dtype, head.device)  # type: ignore[arg-type]
        self.states: list[Tensor] = []

    def forward(self, states: Tensor) -> Tensor:
        self.states.append(states.flatten(0, -2).clone())
        return super().forward(states)


def drafted(name: str, prompts: int, tokens: int) -> tuple[OutputHead, nn.Module, Tensor]:
    """Return lm_head, the EAGLE-2 head, and the states of its drafts."""
    model, loaded = resolve_model(name), dict[str, Any]()

    def watching(kind: str, opened: Any, head: OutputHead, *arguments: Any) -> Callable[[], Any]:
        loaded["watched"] = Watched(head)
        loaded["make"] = load_drafters(kind, opened, loaded["watched"], *arguments)
        return loaded["make"]  # type: ignore[no-any-return]

    vars(models)["load_drafters"] = watching
    cluster = VirtualCluster(model.path, 2, load_profile("paper-7b"))
    tokenizer = Tokenizer(model)
    for prompt in load_prompts(resource_dir("models") / name / "prompts.jsonl", prompts):
        text = tokenizer.chat([Message("user", prompt.text)])
        for temperature in (0.0, 1.0):
            cluster.generate(Request(list(getattr(text, "tokens", text)), "flowspec", tokens,
                                     Sampling(temperature, seed=1), EAGLE2, model.stop_ids))
    watched = loaded["watched"]
    return watched, loaded["make"]()._head, torch.cat(watched.states)


@torch.inference_mode()
def recall(name: str, prompts: int, tokens: int) -> Iterator[Row]:
    lm_head, head, states = drafted(name, prompts, tokens)
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(0))
    test_states, training_states = states[order[:_STATES]], states[order[_STATES : 3 * _STATES]]
    best = OutputHead.forward(lm_head, test_states).topk(10).indices
    matrix = OutputHead.forward(lm_head, torch.eye(lm_head.hidden_size, dtype=lm_head.dtype)).T  # the matrix
    factors = {"own": sample_states(head, rank_outputs, lm_head), "drafted": training_states}
    for rank in RANKS:
        bases = {source: principal(sample[:2048], rank).to(states.dtype) for source, sample in factors.items()}
        bases["svd"] = torch.linalg.eigh(matrix.T @ matrix)[1][:, -rank:].T
        for source, base in bases.items():
            for bits in ("16bit", "int4") if source == "own" else ("16bit",):
                up = nn.Linear(rank, len(matrix), bias=False)
                up.weight = nn.Parameter((matrix @ base.T).contiguous(), requires_grad=False)
                module = nn.Sequential(up)
                if bits == "int4":
                    quantise_linears(module, scheme("int4"), torch.device("cpu"))
                low = module(test_states @ base.T)
                for count in COUNTS:
                    hits = (best[:, :, None] == low.topk(count).indices[:, None]).any(-1).float()
                    case = f"{source}, factor in {bits}, rank {rank}, {count} candidates"
                    yield f"{case}: best one", float(hits[:, 0].mean()), ""
                    yield f"{case}: best ten", float(hits.mean()), ""


def speed(testbed: str) -> Iterator[Row]:
    for name in ("smollm2-135m", "demo"):
        recording = load_recording(resource_dir("models") / name / "recording.flowrec")
        for temperature in sorted({text.sampling.temperature for text in recording.texts}):
            texts = [text for text in recording.texts if text.sampling.temperature == temperature][:8]
            for strategy in ("flowspec", "flowspec_plus", "chunk_pp"):
                make_request = partial(Request, strategy=strategy, params=EAGLE2)
                for count in (0, 128):
                    profile = profile_or_testbed(testbed, count)
                    assert profile.boards
                    cluster = VirtualCluster(recording, profile.boards - 1, profile)
                    requests = [make_request(list(text.prompt), max_new_tokens=len(text.answer), sampling=text.sampling)
                                for text in texts]
                    speeds = [cluster.generate(request).stats.tokens_per_second for request in requests]
                    yield (f"{name}, T = {temperature:g}, {strategy}, {count or 'no'} candidates",
                           fmean(rate for rate in speeds if rate), "tokens/s")


if __name__ == "__main__":
    args = options(__doc__, model="smollm2-135m", testbed="orin-nano-8gb-super:5/qwen3.6-27b/int4", prompts=6,
                   tokens=32, only="recall,speed")
    if "recall" in args.only:
        print_rows(recall(args.model, args.prompts, args.tokens))
    if "speed" in args.only:
        print_rows(speed(args.testbed))

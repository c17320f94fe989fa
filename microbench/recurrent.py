"""A recurrent layer over a draft tree beside transformers' decoding step, and its drift in 16 bits.

    python -m microbench.recurrent          # times, in the shape of Qwen3-Next-80B-A3B's gated delta net
    python -m microbench.recurrent drift    # 4,000 tokens in fp16 and bf16, small shape
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from flowspec_edge.model.decoder_config import decoder_config
from flowspec_edge.stage.families.delta_net import DeltaNet
from flowspec_edge.stage.layers.recurrent import GatedDelta, RecurrentCache, RecurrentPass
from flowspec_edge.stage.layers.recurrent_layer import RecurrentLayer


class _Pass(RecurrentPass):
    """One session's layer 0."""

    def __init__(self, cache: RecurrentCache, rows: int) -> None:
        self._cache, self._rows = cache, rows

    def recurrent(self, layer_idx: int) -> Iterator[tuple[slice, RecurrentLayer | None]]:
        yield slice(0, self._rows), self._cache.layers[layer_idx]


def net_of(config: Qwen3NextConfig, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    net: Any = Qwen3NextGatedDeltaNet(config, 0).to(dtype).eval().requires_grad_(False)
    net.dt_bias.copy_(torch.linspace(-6, 1, len(net.dt_bias)))  # decays from none to fast, as trained ones
    return net


def shaped(small: bool = False) -> Qwen3NextConfig:
    if small:
        return Qwen3NextConfig(hidden_size=256, num_hidden_layers=2, linear_num_key_heads=2,
                               linear_num_value_heads=4, num_experts=1, num_experts_per_tok=1)
    return Qwen3NextConfig(num_hidden_layers=2)


def ours_of(net: Any, config: Qwen3NextConfig) -> DeltaNet:
    """Return a stage's module with the weights of transformers' ``net``."""
    layer = DeltaNet(decoder_config(config.to_dict(), "this benchmark"), 0)
    layer.load_state_dict(net.state_dict(), assign=True)
    layer.requires_grad_(False).prepare()
    return layer


def cache_of(config: Qwen3NextConfig, dtype: torch.dtype) -> RecurrentCache:
    kind = GatedDelta.from_config(decoder_config(config.to_dict(), "this benchmark"))
    return RecurrentCache(kind, [0], 400, dtype, torch.device("cpu"))


def run(net: DeltaNet, cache: RecurrentCache, x: Tensor, mask: NDArray[np.bool_]) -> Tensor:
    cache.begin(mask)
    inputs = net.before(x)
    out: Tensor = net.projection(net.finish(inputs, net.attend(inputs, None, _Pass(cache, len(x)), len(x))))
    return out


def causal(cache: RecurrentCache, rows: int) -> NDArray[np.bool_]:
    length = cache.first + len(cache)
    return np.tri(rows, length + rows, length, dtype=bool)


def branched(cache: RecurrentCache, text: int, rows: int, branches: int = 10) -> NDArray[np.bool_]:
    """Return what rows see of a tree whose branches, behind ``text`` rows, take turns in growing by a row."""
    columns = np.arange(cache.first + len(cache) + rows) - text
    new = columns[len(columns) - rows :, None]
    visible: NDArray[np.bool_] = (columns < 0) | ((columns <= new) & (columns % branches == new % branches))
    return visible


def read_in(net: DeltaNet, cache: RecurrentCache, x: Tensor) -> Tensor:
    out = []
    for piece in x.split(64):
        out.append(run(net, cache, piece, causal(cache, len(piece))))
        cache.append(len(piece))
        cache.commit(cache.first + len(cache))
    return torch.cat(out)


def milliseconds(work: Callable[[], object]) -> float:
    """Return the thread's processor time of ``work``, the least of a few runs: the machine may be busy."""
    times: list[float] = []
    while len(times) < 5 or sum(times) < 0.3:
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


@torch.inference_mode()
def times() -> None:
    torch.set_num_threads(1)
    config, dtype = shaped(), torch.float32
    net = net_of(config, dtype)
    ours = ours_of(net, config)
    print(f"processor ms a layer, {config.hidden_size} wide, {config.linear_num_value_heads} heads, fp32")
    for context in (1_003, 32_011):
        text = torch.randn(context, config.hidden_size)
        theirs = DynamicCache(config=config)
        net(text[None], cache_params=theirs)
        row = text[None, :1]
        print(f"context {context}: transformers' step, one row: "
              f"{milliseconds(partial(net, row, cache_params=theirs)):.2f}")
        cache = cache_of(config, dtype)
        read_in(ours, cache, text)
        for waiting in (0, 60, 120):
            while cache.first + len(cache) < context + waiting:
                run(ours, cache, torch.randn(20, config.hidden_size), branched(cache, context, 20))
                cache.append(20)
            timings = []
            for rows in (1, 4, 16):
                x, mask = torch.randn(rows, config.hidden_size), branched(cache, context, rows)
                timings.append(f"{rows}: {milliseconds(partial(run, ours, cache, x, mask)):.2f}")
            print(f"    {waiting} uncommitted rows in ten branches, rows of a pass {', '.join(timings)}")
    x = torch.randn(16, config.hidden_size)
    alone = milliseconds(lambda: (net.in_proj_qkvz(x), net.in_proj_ba(x), net.out_proj(x.repeat(1, 2))))
    print(f"the projections alone, 16 rows: {alone:.2f}")


@torch.inference_mode()
def drift() -> None:
    """Compare outputs and states with fp32 of the same weights.

    Ours run by segments of trees' sizes, theirs step by step behind a prompt, as each decodes.
    """
    config, tokens = shaped(small=True), 4_000  # whole blocks
    x = torch.randn(tokens, config.hidden_size)
    for dtype in (torch.float16, torch.bfloat16):
        net = net_of(config, dtype)
        exact, theirs = DynamicCache(config=config), DynamicCache(config=config)
        wide = net_of(config, dtype).float()
        truth = wide(x[None].to(dtype).float(), cache_params=exact)[0]
        out = [net(row[None, None].to(dtype), cache_params=theirs)[0] for row in x]
        cache = cache_of(config, dtype)
        own_outputs, ours = [], ours_of(net, config)
        for piece in x.to(dtype).split(7):
            own_outputs.append(run(ours, cache, piece, causal(cache, len(piece))))
            cache.append(len(piece))
            cache.commit(cache.first + len(cache) - 3)
        cache.commit(tokens)  # whole blocks
        state = exact.layers[0].recurrent_states[0][0]
        print(dtype, "relative error of outputs, first and last 500 rows, and of the state behind all:")
        for name, outputs, cached_state in (("ours", torch.cat(own_outputs), cache.layers[0].state),
                                            ("transformers", torch.cat(out), theirs.layers[0].recurrent_states[0][0])):
            parts = [relative(outputs[rows].float(), truth[rows]) for rows in (slice(500), slice(-500, None))]
            print(f"    {name}: {parts[0]:.2e} {parts[1]:.2e}, state {relative(cached_state.float(), state):.2e}")


def relative(outputs: Tensor, truth: Tensor) -> float:
    return float((outputs - truth).norm() / truth.norm())


if __name__ == "__main__":
    drift() if sys.argv[1:] == ["drift"] else times()

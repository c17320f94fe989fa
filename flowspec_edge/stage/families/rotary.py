"""Rotary position embeddings whose angles depend on the position alone.

Sources: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); YaRN (arXiv 2309.00071, sections 3.2
and 3.4); Llama 3.1's frequencies and Llama 4's scale of queries as their published code computes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowspec_edge.model.decoder_config import DecoderConfig


class Rotation(NamedTuple):
    """The rotation of N rows, as ``kernels.rotate_in_place`` takes it.

    It has cosines and signed sines [N, 1, d], for the first d values of each head; and a factor of queries [N, 1,
    1], or
    None.
    """

    cos: Tensor
    sin: Tensor
    scale: Tensor | None = None


class Rotary:
    """Embeddings may differ by the type of the layer."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        scaled = config.family.form.scaled_queries
        self._bases = {}
        for kind, rope in config.ropes.items():
            frequencies, factor = _frequencies(rope, config.head_dim, config.max_position_embeddings)
            self._bases[kind] = frequencies.to(device), factor, _query_scale(rope) if scaled else None

    def __call__(self, positions: Tensor, kind: str, dtype: torch.dtype) -> Rotation:
        """Return the rotation of rows at ``positions`` [N] int64.

        ``kind``: of layers, "" if all have the same angles.
        """
        frequencies, factor, scale = self._bases[kind]
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        scaled = None
        if scale is not None:
            beta, per = scale
            scaled = (1 + beta * torch.log(1 + torch.floor(positions / per)))[:, None, None].to(dtype)
        return Rotation(torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype),
                        scaled)


class RotaryTable:
    """Looks up what a rotary embedding computes: one launch instead of a dozen."""

    def __init__(self, rotary: Rotary, kind: str, dtype: torch.dtype, device: torch.device) -> None:
        """Set up an empty table; ``kind``: of layers, as the embedding takes it."""
        self._rotary, self._kind, self._dtype, self._device = rotary, kind, dtype, device
        self._angles = torch.empty(0)
        self._scale: Tensor | None = None
        self.reach(_FIRST_POSITIONS - 1)

    @torch.inference_mode()
    def reach(self, position: int) -> None:
        """Make room for positions up to this one."""
        if position < len(self._angles):
            return
        positions = torch.arange(max(position + 1, 2 * len(self._angles)), device=self._device)
        cos, sin, self._scale = self._rotary(positions, self._kind, self._dtype)
        self._angles = torch.cat((cos, sin), 1)  # [positions, 2, d]

    def __call__(self, positions: Tensor) -> Rotation:
        """Return the rotation of rows at ``positions`` [N] int64, which have been reached."""
        cos, sin = self._angles.index_select(0, positions)[:, :, None].unbind(1)
        return Rotation(cos, sin, None if self._scale is None else self._scale.index_select(0, positions))


_FIRST_POSITIONS = 4096


def _frequencies(rope: Mapping[str, Any], width: int, positions: int) -> tuple[Tensor, float]:
    """Angles a position [d / 2] in float32, and a factor of cosines and sines."""
    rotary_width, kind = int(width * rope["partial_rotary_factor"]), rope["rope_type"]
    powers = rope["rope_theta"] ** (torch.arange(0, rotary_width, 2, dtype=torch.float32, device="cpu") / rotary_width)
    if kind == "linear":
        return 1.0 / powers / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(1.0 / powers, rope), 1.0
    if kind == "yarn":
        return _yarn(powers, rope, positions)
    return 1.0 / powers, 1.0


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by the factor, short ones are not, those between in part."""
    low, high, text = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    turns = text * frequencies / (2 * math.pi)
    unchanged = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unchanged + (1 - unchanged) / rope["factor"])


def _yarn(powers: Tensor, rope: Mapping[str, Any], positions: int) -> tuple[Tensor, float]:
    text, rotary_width = rope["original_max_position_embeddings"], 2 * len(powers)
    factor = positions / text if rope.get("factor") is None else rope["factor"]

    def frequency_index(turns: float) -> float:
        """Return the place of the frequency that turns so often in the original text."""
        return rotary_width * math.log(text / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first, last = frequency_index(rope.get("beta_fast") or 32), frequency_index(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_width - 1)
    ramp = (torch.arange(len(powers), dtype=torch.float32, device="cpu") - first) / (last - first or 0.001)
    unchanged = 1 - ramp.clamp(0, 1)
    return (1 - unchanged) / (factor * powers) + unchanged / powers, _attention_factor(rope, factor)


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    if (stated_factor := rope.get("attention_factor")) is not None:
        return float(stated_factor)
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return _grown(factor, mscale) / _grown(factor, mscale_all_dim) if mscale and mscale_all_dim else _grown(factor, 1.0)


def _grown(factor: float, by: float) -> float:
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def _query_scale(rope: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return the factor by which queries grow with each stretch of positions, and the stretch."""
    beta = rope.get("llama_4_scaling_beta")
    return None if beta is None else (float(beta), int(rope["original_max_position_embeddings"]))

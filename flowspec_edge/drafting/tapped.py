"""Inner states of the target, as stages send them to drafters that read several layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Tap
from flowspec_edge.util.tensors import to_device, to_torch


class TappedStates:
    """States of rows that may still predict a token, on the drafter's device.

    ``layers``: after how many target layers the states are captured, in the order in which a row's are
    joined; they may repeat.  ``taps``: what the drafter asks of the stages.
    """

    def __init__(self, layers: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._layers = tuple(layers)
        self.taps = tuple(sorted(set(layers)))
        self._dtype, self._device = dtype, device
        self._rows: dict[int, dict[int, Tensor]] = {}  # number -> layer -> state [target_H]

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        """Another session's numbers follow."""
        self._rows.clear()

    def tap(self, message: Tap) -> None:
        """Keep the states of one layer; those of layers that are not asked for are ignored."""
        if message.layer in self.taps:
            states = to_device(to_torch(message.hidden), self._device).to(self._dtype)
            for number, state in zip(message.numbers.tolist(), states, strict=True):
                self._rows.setdefault(number, {})[message.layer] = state

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the joined states of ``rows`` [n, layers * target_H], and drop older ones.

        Older states cannot predict a token any more.  ProtocolError for a state that has not come.
        """
        states = torch.stack([torch.cat([self._state(row, layer) for layer in self._layers]) for row in rows])
        self._rows = {n: by_layer for n, by_layer in self._rows.items() if n >= rows[-1]}
        return states

    def _state(self, row: int, layer: int) -> Tensor:
        state = self._rows.get(row, {}).get(layer)
        if state is None:
            raise ProtocolError(f"the state of row {row} after {layer} layers is missing: a token that it "
                                "predicted was committed before its taps came")
        return state

"""A device's memory, from invented readings of /proc/meminfo and CUDA and from this machine's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.boards.measurement.memory import (
    DeviceMemory,
    GpuMemory,
    device_memory,
    read_gpu,
    read_rate,
    used_mb,
)
from flowspec_edge.boards.probe.board import BoardInfo, read_board
from flowspec_edge.errors import FlowspecError

TOTAL = 8000.0


def board(available_mb: float) -> BoardInfo:
    return BoardInfo(total_mb=TOTAL, available_mb=available_mb)


def test_a_boards_page_cache_is_usable() -> None:
    """An Orin Nano that has read a shard: 1.5 GB are free, and 4 GB more are page cache."""
    jetson = GpuMemory(free_mb=1500.0, total_mb=7990.0, integrated=True)
    assert device_memory(board(5500.0), jetson) == DeviceMemory(TOTAL, 5500.0 - 0.05 * TOTAL)
    assert device_memory(board(5500.0), None) == device_memory(board(5500.0), jetson)


def test_a_card_has_its_own_memory() -> None:
    card = GpuMemory(free_mb=20_000.0, total_mb=24_000.0, integrated=False)
    assert device_memory(board(5500.0), card) == DeviceMemory(24_000.0, 20_000.0 - 0.05 * 24_000.0)
    assert used_mb(board(5500.0), card) == 4000.0


def test_usable_memory_is_never_zero() -> None:
    assert device_memory(board(10.0), None).usable_mb == 1.0
    with pytest.raises(FlowspecError, match="does not state"):
        device_memory(BoardInfo(), None)


@given(st.floats(0, 2000), st.floats(0, 2000), st.floats(0, 2000))
def test_a_workers_shared_memory_counts_once(process: float, buffers: float, cached: float) -> None:
    """A worker holds ``process`` of its own and ``buffers`` of CUDA's, and the system keeps ``cached`` of the
    shard's file, which CUDA counts as used and MemAvailable does not."""
    before = used_mb(board(7000.0), GpuMemory(7000.0, TOTAL, integrated=True))
    after = used_mb(board(7000.0 - process - buffers),
                    GpuMemory(7000.0 - process - buffers - cached, TOTAL, integrated=True))
    assert after - before == pytest.approx(process + buffers)


def test_this_machine() -> None:
    here, gpu = read_board(), read_gpu("cpu")
    assert gpu is None
    assert 0 < device_memory(here, gpu).usable_mb < device_memory(here, gpu).total_mb
    assert 0 < used_mb(here, gpu) < device_memory(here, gpu).total_mb
    assert read_rate("cpu", 200.0) > 0

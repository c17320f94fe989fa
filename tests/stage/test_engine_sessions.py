"""Which sessions a stage has, and what memory; ``test_kept`` and ``test_batch`` have what each of them gets."""

from __future__ import annotations

from pathlib import Path

from kits.stages import engines

from flowspec_edge.messages import Close, Open


def test_a_session_that_an_open_does_not_name_is_dropped(model: Path) -> None:
    """After a restart of D0 nothing of its former sessions is left."""
    [engine] = engines(model, 1, capacity=16)
    for session in (2, 3, 4):
        engine.open(Open(session, 0, 16, concurrent=(session - 1, session - 2)))
    assert engine.sessions == (2, 3, 4)
    engine.open(Open(5, 0, 16, concurrent=(3, 4)))
    assert engine.sessions == (3, 4, 5)
    assert engine.cache_rows == 3 * 16  # in the memory of the second
    engine.open(Open(4, 1, 16, concurrent=(3, 5)))  # again, with a higher epoch
    assert sorted(engine.sessions) == [3, 4, 5]
    engine.open(Open(6, 0, 16))
    assert engine.sessions == (6,)


def test_a_closed_sessions_memory_is_used_again(model: Path) -> None:
    [engine] = engines(model, 1, capacity=16)
    engine.open(Open(2, 0, 16, concurrent=(1,)))
    engine.close(Close(1))
    engine.open(Open(3, 0, 16, concurrent=(2,)))
    assert engine.cache_rows == 32
    engine.close(Close(3))
    engine.open(Open(4, 0, 32, concurrent=(2,)))
    assert engine.cache_rows == 48
    engine.close(Close(4))
    engine.open(Open(5, 0, 16, concurrent=(2,)))
    assert engine.cache_rows == 48

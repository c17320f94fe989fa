"""Tickets: who listens is told once, whenever they begin to."""

from __future__ import annotations

import threading

import pytest

from flowspec_edge.errors import PeerLost
from flowspec_edge.runtime.request import Request
from flowspec_edge.runtime.tickets import Outcome, Ticket


def test_listeners_are_told_once_in_the_thread_that_settles() -> None:
    ticket, told = Ticket(Request([1])), list[tuple[Outcome, int]]()
    ticket.on_settled(lambda outcome: told.append((outcome, threading.get_ident())))
    ticket.on_settled(lambda outcome: told.append((outcome, threading.get_ident())))
    lost = PeerLost("V1 has left")
    driver = threading.Thread(target=ticket.settle, args=(lost,))
    driver.start()
    driver.join()
    assert told == [(lost, driver.ident)] * 2
    ticket.on_settled(lambda outcome: told.append((outcome, threading.get_ident())))
    assert told[2:] == [(lost, threading.get_ident())]
    with pytest.raises(PeerLost, match="V1 has left"):
        ticket.result(0)


def test_a_listener_finds_it_done() -> None:
    ticket, found = Ticket(Request([1])), list[bool]()
    ticket.on_settled(lambda outcome: found.append(ticket.done))
    ticket.give_up()
    assert found == [True]
    assert (ticket.result(0).tokens, ticket.result(0).finish_reason) == ([], "cancelled")


def test_nobody_is_left_out_who_begins_to_listen_while_it_is_settled() -> None:
    for _ in range(50):
        ticket, told, ready = Ticket(Request([1])), list[Outcome](), threading.Barrier(2)

        def listen(ticket: Ticket = ticket, told: list[Outcome] = told,
                   ready: threading.Barrier = ready) -> None:
            ready.wait(10)
            ticket.on_settled(told.append)

        listener = threading.Thread(target=listen)
        listener.start()
        ready.wait(10)
        ticket.give_up()
        listener.join()
        assert told == [ticket.result(0)]

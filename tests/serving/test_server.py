"""The server: what ends it, and with what; what its model cannot do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import openai
import pytest
from kits.http_server import NAME, Held, running, served

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.errors import FlowspecError, PeerLost
from flowspec_edge.serving.admission import Admission
from flowspec_edge.serving.app import make_app
from flowspec_edge.serving.server import listen, serve_app


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("moment", ["starting", "first token", "idle"])
def test_a_signal_ends_it_without_an_error_whatever_it_does(held: Held, model: Path, moment: str) -> None:
    before, what = signal.getsignal(signal.SIGTERM), served(model)
    admission, listener = Admission(what.probe()), listen("127.0.0.1", 0, None)
    opened: AbstractContextManager[Held] = nullcontext(held)
    pieces: list[None] = []
    if moment == "starting":
        opened = _killing(held)
    elif moment == "first token":
        held.on_piece = lambda: pieces.append(kill_me())
    serve_app(listener, make_app(admission, what), admission, opened,
              kill_me if moment == "idle" else lambda: None)
    assert admission.readiness().reason == "the server is shutting down"
    assert listener.fileno() == -1
    assert len(held.started) == (moment != "starting")
    assert len(pieces) == (moment == "first token")  # the cluster is not interrupted in what it does
    assert signal.getsignal(signal.SIGTERM) is before


class _Ending(Held):
    """Its stages get the signal, too."""

    def serve(self, stop: Callable[[], bool]) -> None:
        kill_me()
        raise PeerLost("V1 ended with exit code 0")


def test_stages_that_end_by_the_same_signal_are_no_error(processes: ProcessCluster, model: Path) -> None:
    admission, listener = Admission(served(model).probe()), listen("127.0.0.1", 0, None)
    held = _Ending(processes)
    serve_app(listener, make_app(admission, served(model)), admission, nullcontext(held), lambda: None)
    assert admission.closed


@contextmanager
def _killing(held: Held) -> Iterator[Held]:
    kill_me()
    yield held


def test_it_does_not_stay_up_without_its_http(held: Held, model: Path) -> None:
    admission, listener = Admission(served(model).probe()), listen("127.0.0.1", 0, None)
    listener.close()
    with pytest.raises(FlowspecError, match="the HTTP server has ended by itself"):
        serve_app(listener, make_app(admission, served(model)), admission, nullcontext(held), lambda: None)


def test_a_model_without_a_chat_template_refuses_chats(held: Held, model: Path) -> None:
    with running(served(model, None), held) as bare:
        with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
            bare.client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hello"}])
        assert str(model) not in str(caught.value)

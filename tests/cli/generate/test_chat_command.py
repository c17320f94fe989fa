"""``flowspec chat`` over processes: answers are plain decoding's, with commands between them."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from itertools import takewhile
from multiprocessing import connection
from pathlib import Path

import pytest
from kits.plain_answers import plain_text
from kits.process_clusters import PATIENCE
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.main import main
from flowspec_edge.model.chat import Message
from flowspec_edge.model.opened import OpenModel, resolve_model
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.serving.conversation import Conversation

ANSWER = 12  # tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It writes printable characters, none of which ends a line."""
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2, hidden=32, vocab=97)


class Told:
    """What plain decoding answers to a chat, turn by turn."""

    def __init__(self, model: Path) -> None:
        self._model, self._tokenizer = model, Tokenizer(OpenModel(model), "vicuna")

    def ids(self, *said: str, system: str | None = None) -> list[int]:
        roles = ("user", "assistant")
        turns = [Message(roles[i % 2], text) for i, text in enumerate(said)]  # type: ignore[arg-type]
        return self._tokenizer.chat([*([Message("system", system)] if system else []), *turns])

    def answer(self, *said: str, system: str | None = None, sampling: Sampling | None = None) -> str:
        return plain_text(self._model, self.ids(*said, system=system), ANSWER, sampling)


@pytest.fixture(scope="module")
def told(model: Path) -> Told:
    return Told(model)


def chat(model: Path, monkeypatch: pytest.MonkeyPatch, typed: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return main(["chat", "--model", str(model), "--stages", "2", "--chat-template", "vicuna",
                 "--max-new-tokens", str(ANSWER), *arguments])


def test_turns_build_on_one_another(model: Path, told: Told, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(model, monkeypatch, 'one\n"""\n/two\nlines\n"""\n\n/stats\n/history\n', "--system", "S") == 0
    first = told.answer("one", system="S")
    second = told.answer("one", first, "/two\nlines", system="S")
    out, err = capsys.readouterr()
    assert out == f"{first}\n{second}\n"
    assert err.count(f"cut off after {ANSWER} tokens") == 2
    assert re.search(rf"all 2 +{2 * ANSWER} ", err)
    before, after = told.ids("one", system="S"), told.ids("one", first, "/two\nlines", system="S")
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    reused = int(re.search(r"the last .* (\d+)\n", err)[1])  # type: ignore[index]
    assert shared - 1 <= reused < len(after)  # the first turn was not read in again
    assert re.search(r"\nV1 .*\n.*V2 ", err)
    assert err.endswith(f"system: S\nuser: one\nassistant: {first}\nuser: /two\nlines\nassistant: {second}\n")


def test_an_exchange_is_taken_back_and_a_chat_begun_anew(
        model: Path, told: Told, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = "/undo\none\ntwo\n/retry\n/undo\nthree\n/reset T\none\n/nonsense\n/quit\nnever\n"
    sampling = Sampling(1.0, seed=5)
    assert chat(model, monkeypatch, typed, "--temperature", "1", "--seed", "5") == 0
    one = told.answer("one", sampling=sampling)
    two = told.answer("one", one, "two", sampling=sampling)
    three = told.answer("one", one, "three", sampling=sampling)
    anew = told.answer("one", system="T", sampling=sampling)
    out, err = capsys.readouterr()
    assert out == f"{one}\n{two}\n{two}\n{three}\n{anew}\n"
    assert "nothing has been said yet" in err
    assert "there is no /nonsense" in err


@pytest.mark.parametrize(("chosen", "strategy"), [
    ((), "autoregressive"), (("--strategy", "pipedec"), "pipedec"), (("--draft", "ngram"), "flowspec_plus")])
def test_on_one_machine_one_stage_decodes_plainly_unless_told(
        model: Path, told: Told, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        chosen: tuple[str, ...], strategy: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert main(["chat", "--model", str(model), "--chat-template", "vicuna", "--device", "cpu", "--max-new-tokens",
                 str(ANSWER), *chosen]) == 0
    out, err = capsys.readouterr()
    assert out == f"{told.answer('one')}\n"
    assert f"{strategy}, 1 stage;" in err
    assert ("plain decoding: on one" in err) == (strategy == "autoregressive")


def test_without_a_seed_each_answer_has_its_own(model: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(model, monkeypatch, "one\n/retry\n/retry\n", "--temperature", "1") == 0
    assert len(set(capsys.readouterr().out.splitlines())) > 1


def test_the_stages_tell_while_an_answer_comes(model: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(model, monkeypatch, "one\n/live\ntwo\n", "--live") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2  # of the answers nothing is cut in two
    before, after = err.split("[lines of the stages off]")
    assert {line.split()[0] for line in before.splitlines() if " compute " in line} == {"V1", "V2"}
    assert " compute " not in after


def test_the_demonstration_model_is_the_default(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n"))
    assert main(["chat", "--max-new-tokens", "24"]) == 0
    out, err = capsys.readouterr()
    found = resolve_model()
    ids = Tokenizer(found, "bare").chat([Message("user", "def f(x):")])
    assert out.strip("\n") == plain_text(found.path, ids, 24).strip("\n")
    assert "not trained to chat" in err


def test_what_no_longer_fits_is_left_out(model: Path, told: Told) -> None:
    """The oldest exchanges go, one after the other; a message that does not fit alone is refused."""
    found = OpenModel(model)
    chat = Conversation(Tokenizer(found, "vicuna"), found, 100)
    left_out = 0
    said: list[str] = []
    for i in range(40):
        text = f"question {i} " + "x" * 300
        question = chat.ask(text)
        assert question.prompt == told.ids(*said[2 * question.omitted_exchanges:], text)
        assert len(question.prompt) + question.limit <= found.max_positions
        assert question.limit >= 64
        if question.omitted_exchanges > left_out:  # no more than had to go
            kept = told.ids(*said[2 * (question.omitted_exchanges - 1):], text)
            assert len(kept) + 64 > found.max_positions
        left_out = question.omitted_exchanges
        chat.answered(text, f"answer {i} " + "y" * 200)
        said += [text, f"answer {i} " + "y" * 200]
    assert left_out > 0
    with pytest.raises(Exception, match="shorten it"):
        chat.ask("z" * 10 * found.max_positions)


@pytest.mark.soak
def test_at_a_terminal(model: Path, told: Told, tmp_path: Path) -> None:
    """Ctrl-C stops an answer, and the chat goes on; Ctrl-D ends it; lines are remembered."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "flowspec_edge.cli.main", "chat", "--model", str(model), "--stages", "2",
               "--chat-template", "vicuna", "--max-new-tokens", "1500"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs,
                          env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"},
                          start_new_session=True) as process:
        os.close(theirs)
        try:
            seen = _read(ours, "> ")
            os.write(ours, b"one\n")
            seen = _read(ours, told.answer("one"))
            process.send_signal(signal.SIGINT)
            assert "[stopped]" in _read(ours, "> ")
            os.write(ours, b"/history\n")
            seen = _read(ours, "> ")
            assert "user: one" in seen
            os.write(ours, b"\x04")
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            os.close(ours)
    assert (tmp_path / "flowspec" / "chat-history").read_text().split("\n")[:2] == ["one", "/history"]


def _read(fd: int, until: str) -> str:
    """What a terminal shows, up to and with ``until``."""
    seen, deadline = "", time.monotonic() + PATIENCE
    while until not in seen:
        assert connection.wait([fd], max(0.0, deadline - time.monotonic())), seen
        seen += os.read(fd, 65536).decode(errors="replace").replace("\r\n", "\n")
    return seen

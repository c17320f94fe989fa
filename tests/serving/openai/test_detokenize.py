"""Stop strings and half characters: whatever the pieces, what comes out is what the whole text says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.serving.openai.detokenize import Detokenizer, StopMatcher

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def brute_force(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: at the first end of any stop string, all before the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(st.lists(st.text("abc", max_size=5)), STOPS)
def test_the_text_up_to_the_first_stop_string_comes_out(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = "".join(map(matcher.push, pieces))
    assert (out + matcher.close(), matcher.stopped) == brute_force("".join(pieces), stops)


@given(st.text("abc"), STOPS)
def test_nothing_is_sent_too_early_nor_held_for_nothing(text: str, stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    for end, letter in enumerate(text, start=1):
        out += matcher.push(letter)
        if matcher.stopped:
            break
        held = text[len(out) : end]
        assert out == text[: len(out)]
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text[at:end]) for stop in stops for at in range(len(out)))


def test_an_empty_stop_string_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])


def decode(ids: object) -> str:
    return bytes(ids).decode("utf-8", "replace")  # type: ignore[call-overload]


@given(st.text("aé🙂\n", max_size=12), st.lists(st.text("aé🙂\n", min_size=1, max_size=3), max_size=4),
       st.lists(st.integers(1, 5), min_size=1))
def test_a_reader_joins_bytes_of_one_character(text: str, stops: list[str], groups: list[int]) -> None:
    ids = list(text.encode())
    reader, out, at = Detokenizer(decode, stops), "", 0
    while at < len(ids):
        size = groups[at % len(groups)]
        out += reader.push(ids[at : at + size])
        at += size
    expected, stopped = brute_force(text, stops)
    assert (out + reader.close(), reader.stopped) == (expected, stopped)
    if not stopped:
        assert reader.tokens == len(ids)
    else:  # no token after the one that completes the stop string is counted
        ends = [len(text[:end].encode()) for end in range(len(text) + 1) if brute_force(text[:end], stops)[1]]
        assert reader.tokens == ends[0]


# Whole characters, their pieces, surrogates as CESU-8 has them, and bytes that begin nothing.
BYTES = st.lists(st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from([
    "é".encode(), "€".encode(), "🙂".encode(), "🙂".encode()[:2], b"\xed\xa0\xbd", b"\xf5", b"\x80", b" ",
    b"z"])), max_size=40).map(b"".join)


@given(BYTES)
def test_any_bytes_are_streamed_as_they_are_decoded_together(data: bytes) -> None:
    """All but the last three bytes have been sent at any time."""
    reader, out = Detokenizer(decode, []), ""
    for at, byte in enumerate(data, start=1):
        out += reader.push([byte])
        assert data[:at].decode("utf-8", "replace").startswith(out.rstrip("\ufffd"))
        assert len(out) >= len(data[:max(0, at - 3)].decode("utf-8", "ignore"))
        assert len(data[:at].decode("utf-8", "replace")) - len(out) <= 3
    assert out + reader.close() == data.decode("utf-8", "replace")


@given(BYTES, st.lists(st.sampled_from(["z", "é", "\ufffd", "\ufffd\ufffd", "\ufffdz"]), max_size=3))
def test_a_stop_string_is_found_among_any_bytes(data: bytes, stops: list[str]) -> None:
    reader, out = Detokenizer(decode, stops), ""
    for byte in data:
        out += reader.push([byte])
    out += reader.close()
    assert (out, reader.stopped) == brute_force(data.decode("utf-8", "replace"), stops)

"""The codec against its own inverse, and against bytes that no peer of ours would send."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowspec_edge import messages as m
from flowspec_edge.errors import ProtocolError
from flowspec_edge.transport.codec import MAX_FRAMES, MAX_HEADER_BYTES, decode, encode
from flowspec_edge.transport.fields import MAX_ROWS, MAX_TEXT

ints = st.integers(0, 2**63 - 1)
rows = st.integers(0, 5)
texts = st.text(max_size=20)


def int32(n: int) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.int32, n)


@st.composite
def payloads(draw: Any, n: int) -> m.Payload:
    dtype, numpy = draw(st.sampled_from([("float32", "f4"), ("float16", "f2"), ("bfloat16", "u2")]))
    return m.Payload(dtype, draw(hnp.arrays(numpy, (n, draw(st.integers(0, 4))))))


@st.composite
def segments(draw: Any) -> m.Segment:
    n, to_first = draw(rows), draw(st.booleans())
    return m.Segment(
        session=draw(ints), epoch=draw(ints), run=draw(ints), first=draw(ints), stop=draw(ints),
        numbers=draw(int32(n)), positions=draw(int32(n)), base=draw(ints),
        bits=draw(hnp.arrays(np.uint8, (n, draw(st.integers(0, 3))))), committed=draw(int32(draw(rows))),
        tokens=draw(int32(n)) if to_first else None, hidden=None if to_first else draw(payloads(n)),
        taps=tuple(draw(st.lists(ints, max_size=3))),
    )


@st.composite
def prunes(draw: Any) -> m.Prune:
    start = draw(st.integers(0, 2**31 - 2000))
    stop = start + draw(st.sampled_from([0, 1, 7, 8, 9, 90, 1500]))
    keep = sorted(draw(st.sets(st.integers(start, stop - 1), max_size=40))) if stop > start else []
    return m.Prune(draw(ints), draw(ints), draw(ints), start, stop, np.array(keep, np.int32))


@st.composite
def outputs(draw: Any) -> m.Output | m.Tap:
    n = draw(rows)
    numbers, hidden = draw(int32(n)), draw(payloads(n))
    if draw(st.booleans()):
        return m.Tap(draw(ints), draw(ints), draw(ints), draw(ints), numbers, hidden)
    return m.Output(draw(ints), draw(ints), draw(ints), numbers, hidden, draw(st.floats(0, 100)))


messages = st.one_of(
    segments(), prunes(), outputs(),
    st.builds(m.Open, ints, ints, st.integers(1, 2**40), st.integers(0, 9)),
    st.builds(m.Close, ints), st.builds(m.Credit, ints, ints, ints),
    st.builds(m.Cancel, ints, ints, st.lists(ints, max_size=5).map(tuple)),
    st.builds(m.Hello, texts, ints, st.integers(1, 99), st.tuples(ints, ints), texts, ints),
    st.builds(m.Heartbeat, texts, ints, st.dictionaries(texts, st.floats(allow_nan=False), max_size=5)),
    st.builds(m.Failed, texts, ints, texts), st.builds(m.Shutdown, texts),
)


def plain(value: Any) -> Any:
    """A message as plain values that compare by ==, dtypes and shapes included."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, m.Payload):
        return (value.dtype, plain(value.array))
    if isinstance(value, get_args(m.Message)):
        return (type(value).__name__, {f.name: plain(getattr(value, f.name)) for f in fields(value)})
    return value


def one_line(error: ProtocolError) -> None:
    assert len(str(error).splitlines()) == 1


def frames_of(message: m.Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


@given(messages)
def test_what_is_decoded_is_what_was_encoded(message: m.Message) -> None:
    frames = frames_of(message)
    assert len(frames) <= MAX_FRAMES
    assert plain(decode(frames)) == plain(message)


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_random_bytes_are_protocol_errors(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


@settings(max_examples=400)
@given(messages, st.data())
def test_damaged_frames_are_messages_or_protocol_errors(message: m.Message, data: st.DataObject) -> None:
    frames = frames_of(message)
    which = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[which])
    match data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "repeat"])):
        case "flip" if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
            frames[which] = bytes(frame)
        case "cut":
            frames[which] = bytes(frame[: data.draw(st.integers(0, len(frame)))])
        case "grow":
            frames[which] = bytes(frame) + data.draw(st.binary(min_size=1, max_size=5))
        case "drop":
            del frames[which]
        case "repeat":
            frames.insert(which, bytes(frame))
    try:
        decode(frames)
    except ProtocolError as error:
        one_line(error)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3), max_leaves=6)


@settings(max_examples=400)
@given(messages, values, st.data())
def test_any_value_in_any_field_is_a_message_or_a_protocol_error(message: m.Message, value: Any,
                                                                data: st.DataObject) -> None:
    frames = frames_of(message)
    name, header = msgpack.unpackb(frames[0])
    header[data.draw(st.sampled_from(sorted(header)))] = value
    try:
        decode([msgpack.packb([name, header]), *frames[1:]])
    except ProtocolError as error:
        one_line(error)


def segment(**changes: Any) -> m.Segment:
    n = np.arange(2, dtype=np.int32)
    usual = m.Segment(session=1, epoch=0, run=0, first=0, stop=2, numbers=n, positions=n, base=0,
                      bits=np.zeros((2, 1), np.uint8), committed=n, tokens=n)
    return replace(usual, **changes)


HIDDEN = m.Payload("float16", np.ones((2, 8), np.float16))


REMOVED = object()


def altered(message: m.Message, **changes: Any) -> list[bytes]:
    """The frames of ``message`` with header fields replaced or REMOVED."""
    frames = frames_of(message)
    name, header = msgpack.unpackb(frames[0])
    header = {k: v for k, v in {**header, **changes}.items() if v is not REMOVED}
    return [msgpack.packb([name, header]), *frames[1:]]


@pytest.mark.parametrize(("frames", "text"), [
    ([msgpack.packb(["Attack", {}])], "unknown message type 'Attack'"),
    ([msgpack.packb({"a": 1})], "header is not"),
    ([b"\x00" * (MAX_HEADER_BYTES + 1)], "header of 65537 bytes"),
    ([], "not valid msgpack"),
    (altered(m.Close(1), extra=2), "Close: unknown field 'extra'"),
    (altered(m.Credit(1, 2, 3), run=REMOVED), "Credit: missing field 'run'"),
    (altered(m.Credit(1, 2, 3), run=-1), "Credit.run: expected an integer"),
    (altered(m.Credit(1, 2, 3), run=True), "Credit.run: expected an integer"),
    (altered(segment(), numbers=["float32", 2]), "Segment.numbers: expected int32"),
    (altered(segment(), numbers=["int32", 2, 1]), "Segment.numbers: expected 1 dimensions, got 2"),
    (altered(segment(), numbers=["int32", 3]), "Segment.positions: dimension n is 2 here and 3"),
    (altered(segment(), committed=["int32", 10**9]), f"dimension c must be 0 to {MAX_ROWS}"),
    (altered(segment(), committed=["int32", 9]), "bytes, at least"),
    (altered(segment(), committed=["int32", 1]), "Segment: 4 bytes too many in the index frame"),
    (altered(segment(tokens=None, hidden=HIDDEN), hidden=["float64", 2, 8]), "hidden: expected a payload"),
    (altered(segment(tokens=None, hidden=HIDDEN), hidden=["float32", 2, 8]), "payload frame has 32 bytes"),
    (frames_of(segment(tokens=None, hidden=HIDDEN))[:2], "payload frame missing"),
    ([*frames_of(segment()), b"more"], "Segment: 1 frames too many"),
    (frames_of(segment())[:1], "Segment: index frame missing"),
    (altered(m.Prune(1, 0, 0, 4, 9, np.array([4, 8], np.int32)), stop=8), "bits past the range"),
    (altered(m.Hello("v1", 1, 2, (0, 4), "d"), layers=[0, 4, 8]), "Hello.layers: expected 2 integers"),
])
def test_each_fault_has_its_line(frames: list[bytes], text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(frames)
    assert text in str(caught.value)


@pytest.mark.parametrize(("message", "text"), [
    (segment(numbers=np.arange(2)), "cannot send Segment.numbers: expected int32, got int64"),
    (segment(positions=np.arange(3, dtype=np.int32)), "cannot send Segment.positions: dimension n"),
    (segment(hidden=HIDDEN), "cannot send Segment.hidden: exactly one"),
    (segment(tokens=None), "cannot send Segment.hidden: exactly one"),
    (segment(tokens=None, hidden=m.Payload("bfloat16", HIDDEN.array)), "cannot be held in float16"),
    (m.Prune(1, 0, 0, 4, 9, np.array([8, 4], np.int32)), "cannot send Prune.keep: expected increasing"),
])
def test_a_wrong_message_is_not_sent(message: m.Message, text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        encode(message)
    assert text in str(caught.value)


def test_arrays_are_read_only_views_on_the_frames() -> None:
    message = segment(tokens=None, hidden=HIDDEN)
    assert np.shares_memory(np.frombuffer(encode(message)[2], np.uint8), HIDDEN.array)
    frames = frames_of(message)
    decoded = decode(frames)
    assert isinstance(decoded, m.Segment)
    assert decoded.hidden is not None
    assert np.shares_memory(decoded.hidden.array, np.frombuffer(frames[2], np.uint8))
    assert np.shares_memory(decoded.numbers, np.frombuffer(frames[1], np.uint8))
    for array in (decoded.hidden.array, decoded.numbers, decoded.bits):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_arrays_that_are_not_contiguous_are_sent_in_row_order() -> None:
    array = np.arange(16, dtype=np.float32).reshape(8, 2).T
    decoded = decode(encode(segment(tokens=None, hidden=m.Payload("float32", array))))
    assert isinstance(decoded, m.Segment)
    assert decoded.hidden is not None
    np.testing.assert_array_equal(decoded.hidden.array, array)


@pytest.mark.parametrize(("keep", "size"), [
    (range(1000, 1080), 10),  # 80 of 80 numbers: ten bytes of bits
    (range(1000, 3000, 250), 8),  # few of many, close together: a byte each
    ([1000, 2999], 8),  # few of many, far apart: four bytes each
])
def test_a_prune_takes_the_shortest_form(keep: Any, size: int) -> None:
    numbers = np.array(keep, np.int32)
    stop = 1080 if len(numbers) == 80 else 3000
    frames = frames_of(m.Prune(1, 0, 0, 1000, stop, numbers))
    assert len(frames[1]) == size


def test_long_texts_are_cut() -> None:
    decoded = decode(encode(m.Failed("v1", 1, "x" * 10_000)))
    assert isinstance(decoded, m.Failed)
    assert decoded.cause == "x" * MAX_TEXT

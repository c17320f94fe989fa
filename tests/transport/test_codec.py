"""The codec against its own inverse, and against bytes that no peer of ours would send; damaged frames: tests/fuzz."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kits.hypothesis_examples import examples

from flowspec_edge import messages as m
from flowspec_edge.errors import ProtocolError
from flowspec_edge.transport.codec import FIELDS, MAX_FRAMES, MAX_HEADER_BYTES, decode, encode
from flowspec_edge.transport.fields import MAX_DIM, MAX_TEXT

ints = st.integers(0, 2**63 - 1)
row_numbers = st.integers(0, 2**31)
rows = st.integers(0, 5)
texts = st.text(max_size=20)
own_version = st.just(m.PROTOCOL_VERSION)
counters = st.dictionaries(texts, st.floats(allow_nan=False), max_size=5)


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
        session=draw(ints), epoch=draw(ints), run=draw(ints), first=draw(row_numbers),
        stop=draw(row_numbers), numbers=draw(int32(n)), positions=draw(int32(n)), base=draw(row_numbers),
        bits=draw(hnp.arrays(np.uint8, (n, draw(st.integers(0, 3))))), committed=draw(int32(draw(rows))),
        tokens=draw(int32(n)) if to_first else None, hidden=None if to_first else draw(payloads(n)),
        taps=tuple(draw(st.lists(ints, max_size=3))), text=draw(st.booleans()),
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
    return m.Output(draw(ints), draw(ints), draw(ints), numbers, hidden)


single = st.one_of(
    segments(), prunes(), outputs(),
    st.builds(m.Open, ints, ints, st.integers(1, 2**40), own_version,
              st.lists(ints, max_size=4).map(tuple), st.lists(ints, max_size=4).map(tuple),
              st.integers(-1, 2**40), ints, st.booleans()),
    st.builds(m.Close, ints, st.lists(ints, max_size=9).map(tuple)), st.builds(m.Credit, ints, ints, ints),
    st.builds(m.Computed, ints, ints, ints, st.integers(1, 99), ints, ints, ints, ints, ints),
    st.builds(m.Cancel, ints, ints, st.lists(ints, max_size=5).map(tuple)),
    st.builds(m.Hello, texts, ints, st.integers(1, 99), st.tuples(ints, ints), texts, own_version,
              st.integers(-1, 99)),
    st.builds(m.Heartbeat, texts, ints, counters, st.booleans()),
    st.builds(m.SessionReport, texts, ints, ints, counters),
    st.builds(m.Failed, texts, ints, texts), st.builds(m.Shutdown, texts), st.builds(m.Refusal),
)
parts = st.one_of(*(st.lists(kind, min_size=2, max_size=4, unique_by=lambda part: part.session)
                    for kind in (segments(), outputs().filter(lambda found: isinstance(found, m.Output)))))
messages = st.one_of(single, parts.map(lambda found: m.Batch(tuple(found))))


def plain(value: Any) -> Any:
    """A message as plain values that compare by ==, dtypes and shapes included."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: repr(number) for key, number in value.items()}  # so that nan is nan
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, m.Payload):
        return (value.dtype, plain(value.array))
    if isinstance(value, get_args(m.Message)):
        return (type(value).__name__, {f.name: plain(getattr(value, f.name)) for f in fields(value)})
    return value


def message_or_error(frames: list[bytes]) -> None:
    """Decoding gives a message, which can be sent again, or one line."""
    fault, message = "", None
    try:
        message = decode(frames)
    except ProtocolError as error:
        fault = str(error)
    if message is None:
        assert len(fault.splitlines()) == 1
    else:
        assert plain(decode(frames_of(message))) == plain(message)


def frames_of(message: m.Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


@settings(deadline=None)
@given(messages)
def test_what_is_decoded_is_what_was_encoded(message: m.Message) -> None:
    frames = frames_of(message)
    assert len(frames) <= MAX_FRAMES
    assert plain(decode(frames)) == plain(message)


@pytest.mark.parametrize("sessions", [(), (1,), (1, 1), range(1, m.MAX_BATCH + 2)])
def test_a_batch_has_several_sessions_once_each(sessions: Sequence[int]) -> None:
    none = np.empty(0, np.int32)
    outputs = tuple(m.Output(session, 0, 0, none, m.Payload("float16", np.empty((0, 4), np.float16)))
                    for session in sessions)
    with pytest.raises(ProtocolError, match=r"segments or outputs|each of another session"):
        encode(m.Batch(outputs))
    frames = [frame for output in outputs for frame in frames_of(output)]
    header = msgpack.packb(["Batch", "", [2] * len(outputs), b""])
    with pytest.raises(ProtocolError, match=r"match its header|segments or outputs|each of another session"):
        decode([header, *frames])


@pytest.mark.parametrize("parts", [
    (m.Shutdown(), m.Refusal()), (m.Credit(1, 0, 0), m.Credit(2, 0, 0)),
    (m.Batch(()), m.Batch(())),
])
def test_a_batch_has_segments_or_outputs_alone(parts: tuple[m.Message, ...]) -> None:
    inner = [msgpack.packb(["Batch", "", [], b""]) if isinstance(part, m.Batch) else frames_of(part)[0]
             for part in parts]
    with pytest.raises(ProtocolError, match="it has segments or outputs, not"):
        decode([msgpack.packb(["Batch", "", [1] * len(parts), b""]), *inner])


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3), max_leaves=6)


@examples(150, quick=30)
@given(single, values, st.data())
def test_any_header_is_a_message_or_a_protocol_error(message: m.Message, value: Any,
                                                                data: st.DataObject) -> None:
    frames = frames_of(message)
    header = msgpack.unpackb(frames[0])
    header[data.draw(st.integers(0, len(header) - 1))] = value
    message_or_error([msgpack.packb(header), *frames[1:]])


def segment(**changes: Any) -> m.Segment:
    n = np.arange(2, dtype=np.int32)
    usual = m.Segment(session=1, epoch=0, run=0, first=0, stop=2, numbers=n, positions=n, base=0,
                      bits=np.zeros((2, 1), np.uint8), committed=n, tokens=n)
    return replace(usual, **changes)


NONE = np.zeros(0, np.int32)
HIDDEN = m.Payload("float16", np.ones((2, 8), np.float16))


def altered(message: m.Message, place: int | str, value: Any) -> list[bytes]:
    """The frames of ``message`` with one value of the header, or one scalar field, replaced."""
    frames = frames_of(message)
    header = msgpack.unpackb(frames[0])
    header[place if isinstance(place, int) else SCALARS + [*FIELDS[type(message)]].index(place)] = value
    return [msgpack.packb(header), *frames[1:]]


TYPE, LAYOUT, DIMS, INDEX, SCALARS = range(5)
HIDDEN_SEGMENT = segment(tokens=None, hidden=HIDDEN)  # dims n = 2, c = 2, w = 1, H = 8
HIDDEN_LAYOUT = "int32 int32 int32 - uint8 float16"
PRUNE = m.Prune(1, 0, 0, 4, 9, np.array([4, 8], np.int32))


@pytest.mark.parametrize(("frames", "text"), [
    ([msgpack.packb(["Attack", "", [], b""])], "unknown message type 'Attack'"),
    (altered(segment(), TYPE, 7), "unknown message type 7"),
    ([msgpack.packb({"a": 1})], "the header is not a message's"),
    ([b"\x00" * (MAX_HEADER_BYTES + 1)], "no header of at most"),
    ([], "no header of at most"),
    ([msgpack.packb(["Close", "", [], b"", 1, [{}] * 1000])], "more lists, maps or values than any"),
    ([b"\x91" * 100_000], "the header is not a message's"),
    (altered(segment(), "base", 2**31 + 1), "Segment.base: expected an integer from 0 to 2147483648"),
    ([msgpack.packb(["Close", "", [], b"", 1])], "Close: expected 2 scalar fields, got 1"),
    (altered(m.Credit(1, 2, 3), "run", -1), "Credit.run: expected an integer"),
    (altered(m.Open(1, 2, 3), "timed", 1), "Open.timed: expected true or false"),
    (altered(m.Open(1, 2, 3), "capacity", 0), "Open.capacity: expected an integer from 1"),
    (altered(m.Heartbeat("v1", 1, {}), "isolated", 1.0), "Heartbeat.isolated: expected true or false"),
    (altered(m.SessionReport("v1", 1, 7), "counters", {"rows": 3}),
     "SessionReport.counters: expected a map of floats"),
    (altered(segment(), LAYOUT, "float32 int32 int32 int32 uint8 -"),
     "Segment.numbers: expected int32, got 'float32'"),
    (altered(segment(), LAYOUT, "int32 int32 int32 int32 -"), "Segment: expected 6 arrays"),
    (altered(segment(), LAYOUT, "- int32 int32 int32 uint8 -"), "Segment.numbers: expected int32, got '-'"),
    (altered(m.Credit(1, 2, 3), LAYOUT, "int32"), "Credit: expected 0 arrays"),
    (altered(segment(), LAYOUT, "int32 int32 int32 - uint8 -"), "small arrays have 26 bytes, 34 were sent"),
    (altered(HIDDEN_SEGMENT, LAYOUT, HIDDEN_LAYOUT.replace("-", "int32")), "needs more bytes than were sent"),
    (altered(HIDDEN_SEGMENT, LAYOUT, HIDDEN_LAYOUT.replace("float16", "-"))[:1], "Segment: more dimensions"),
    (altered(segment(numbers=NONE, positions=NONE, tokens=NONE, bits=np.zeros((0, 1), np.uint8)), LAYOUT,
             "int32 int32 int32 - uint8 -"), "Segment: it must have exactly one of tokens and hidden"),
    (altered(segment(numbers=NONE, positions=NONE, bits=np.zeros((0, 1), np.uint8), tokens=None,
                     hidden=m.Payload("float16", np.zeros((0, 8), np.float16))),
             LAYOUT, HIDDEN_LAYOUT.replace("-", "int32")), "Segment: it must have exactly one of tokens and"),
    (altered(HIDDEN_SEGMENT, LAYOUT, HIDDEN_LAYOUT.replace("16", "64")),
     "Segment.hidden: expected float32, float16, bfloat16, got 'float64'"),
    (altered(HIDDEN_SEGMENT, LAYOUT, HIDDEN_LAYOUT.replace("16", "32")), "has 64 bytes, its frame 32"),
    (altered(HIDDEN_SEGMENT, DIMS, [2, 2, 1, 7]), "has 28 bytes, its frame 32"),
    (altered(segment(), DIMS, [2, 2]), f"Segment.bits: its w must be 0 to {MAX_DIM}, not None"),
    (altered(segment(), DIMS, [2, 2, 1, 1]), "Segment: more dimensions than its arrays have"),
    (altered(segment(), DIMS, [2, 10**9, 1]), f"its c must be 0 to {MAX_DIM}, not 1000000000"),
    (altered(segment(), DIMS, [2, 9, 1]), "Segment.committed: needs more bytes than were sent"),
    (altered(segment(), INDEX, "text"), "Segment: expected 6 arrays, dimensions and bytes"),
    (frames_of(HIDDEN_SEGMENT)[:1], "Segment.hidden: its frame is missing"),
    ([*frames_of(HIDDEN_SEGMENT), b"more"], "Segment: 1 frames more than it has"),
    (altered(PRUNE, "stop", 8), "bits past the range"),
    (altered(PRUNE, "start", 10), "Prune.keep: [10, 9) is no range of int32"),
    (altered(PRUNE, LAYOUT, "int32"), "Prune.keep: needs more bytes than were sent"),
    (altered(PRUNE, LAYOUT, "runs"), "Prune.keep: unknown form 'runs'"),
    (altered(PRUNE, LAYOUT, "gaps"), "Prune.keep: numbers not increasing within [4, 9)"),
    (altered(m.Hello("v1", 1, 2, (0, 4), "d"), "layers", [0, 4, 8]), "Hello.layers: expected 2 integers"),
])
def test_each_fault_has_its_line(frames: list[bytes], text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(frames)
    assert text in str(caught.value)


@pytest.mark.parametrize(("message", "text"), [
    (segment(numbers=np.arange(2)), "expected int32, got int64"),
    (segment(positions=np.arange(3, dtype=np.int32)), "Segment.positions: its n is 3, not 2"),
    (segment(bits=np.zeros(2, np.uint8)), "cannot send Segment.bits: expected 2 dimensions, got 1"),
    (segment(hidden=HIDDEN), "cannot send Segment: it must have exactly one of tokens and hidden"),
    (segment(tokens=None), "cannot send Segment: it must have exactly one of tokens and hidden"),
    (segment(tokens=None, hidden=m.Payload("bfloat16", HIDDEN.array)), "cannot be held in float16"),
    (m.Prune(1, 0, 0, 4, 9, np.array([8, 4], np.int32)), "expected increasing numbers"),
    (segment(committed=np.zeros(MAX_DIM + 1, np.int32)), "its c is 65537, not 65536"),
    (segment(numbers=[0, 1]), "cannot send Segment.numbers: 'list' object has no attribute 'dtype'"),
    (segment(base=None), "cannot send Segment.base: int() argument must be"),
    (m.Credit(1, 0, 2**63), "cannot send Credit.run: expected an integer from 0"),
    (m.Close(1, ("one",)), "cannot send Close.retain: invalid literal"),  # type: ignore[arg-type]
    (m.Close(1, (0,) * (MAX_DIM + 1)), "cannot send Close.retain: 65537 integers are more than 65536"),
    (m.Heartbeat("v1", 1, {"rows": None}), "cannot send Heartbeat.counters"),  # type: ignore[dict-item]
])
def test_a_wrong_message_is_not_sent(message: m.Message, text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        encode(message)
    assert text in str(caught.value)


# What releases have sent, and what one may send that has more fields, and arrays.
OTHER_VERSIONS: list[tuple[list[Any], m.Message]] = [
    (["Hello", "", [], b"", "v2", 2, 4, [3, 5], "digest", 2], m.Hello("v2", 2, 4, (3, 5), "digest", 2)),
    (["Hello", "", [], b"", "v2", 2, 4, [3, 5], "digest", 8, 77], m.Hello("v2", 2, 4, (3, 5), "digest", 8)),
    (["Hello", "int32", [2], b"01234567", "v2", 2, 4, [3, 5], "digest", 99, "new", {"more": []}, None],
     m.Hello("v2", 2, 4, (3, 5), "digest", 99)),
    (["Open", "", [], b"", 7, 1, 64, 2, [6]], m.Open(7, 1, 64, 2)),
    (["Open", "", [], b"", 7, 1, 64, 7, [6], [], -1, 0, False, 0], m.Open(7, 1, 64, 7)),
    (["Open", "?", None, None, 7, 1, 64, 99], m.Open(7, 1, 64, 99)),
]


@pytest.mark.parametrize(("header", "message"), OTHER_VERSIONS)
def test_another_versions_first_message_is_read_up_to_its_version(header: list[Any], message: m.Message) -> None:
    assert plain(decode([msgpack.packb(header)])) == plain(message)


@pytest.mark.parametrize(("header", "text"), [
    (["Hello", "", [], b"", "v2", 2, 4, [3, 5], "digest"], "Hello: expected 8 scalar fields, got 5"),
    (["Hello", "", [], b"", "v2", 2, 4, [3, 5], "digest", "8"], "Hello: expected 8 scalar fields, got 6"),
    (["Hello", "", [], b"", "v2", "2", 4, [3, 5], "digest", 8], "Hello.stage: expected an integer from 0"),
    (["Open", "", [], b"", 7, 1, 64, -1], "Open.version: expected an integer from 0"),
])
def test_no_version_is_made_out(header: list[Any], text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode([msgpack.packb(header)])
    assert text in str(caught.value)


def test_arrays_are_read_only_views_on_the_frames() -> None:
    message = segment(tokens=None, hidden=HIDDEN)
    assert np.shares_memory(np.frombuffer(encode(message)[1], np.uint8), HIDDEN.array)
    frames = frames_of(message)
    decoded = decode(frames)
    assert isinstance(decoded, m.Segment)
    assert decoded.hidden is not None
    assert np.shares_memory(decoded.hidden.array, np.frombuffer(frames[1], np.uint8))
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
    assert len(msgpack.unpackb(frames[0])[INDEX]) == size


def test_a_header_of_many_small_maps_takes_no_memory() -> None:
    maps = b"\xdd" + (MAX_DIM).to_bytes(4, "big") + b"\x80" * MAX_DIM
    header = b"\xdc\x00\x3b" + maps * 59
    assert 3_800_000 < len(header) < MAX_HEADER_BYTES
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="more lists, maps or values"):
        decode([header])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2e6


@pytest.mark.parametrize(("cause", "received"), [("no \udcff file", "no ? file"), ("x" * 10_000, "x" * MAX_TEXT)])
def test_a_text_that_is_no_utf8_or_too_long_can_be_sent(cause: str, received: str) -> None:
    assert decode(encode(m.Failed("v1", 1, cause))) == m.Failed("v1", 1, received)

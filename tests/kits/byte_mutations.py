"""Mutations of a small corpus, the same for the same seed.

A target is a function of bytes. It may raise the errors that its caller handles; anything else fails the
test, which prints the input. To keep that input, write it to ``corpus/TARGET/``: every run begins with the
corpus as it is.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from flowspec_edge.errors import FlowspecError

CORPUS = Path(__file__).parent.parent / "fuzz" / "corpus"
FEW, MANY = 300, 1_000_000  # mutations in every run, and in `make soak`
MAX_BYTES = 4096  # of a mutated input; inputs of the corpus may be longer

amounts = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.soak)])

_VALUES = [b"", b"0", b"-1", b"1e309", b"-0.0", b"NaN", b"Infinity", b"null", b"true", b"[]", b"{}", b'""',
           b'"7"', b"2147483648", b"9223372036854775808", b"1" + b"0" * 400, b"[" * 200, b'{"a":' * 200,
           b"\x1b[31m", b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"../../etc/passwd", b"\n", b"#", b"'''"]
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")
_TOKEN = re.compile(rb'"[^"]*"|[\w.]+|[\[\]{}]')


def corpus(target: str) -> list[bytes]:
    """The contents of ``corpus/TARGET``, by the names of its files."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def mutations(seeds: Sequence[bytes], count: int, seed: int = 21) -> Iterator[bytes]:
    """The seeds, then ``count`` mutations of them."""
    yield from seeds
    rng = random.Random(seed)
    short = [data for data in seeds if len(data) <= MAX_BYTES] or [data[:MAX_BYTES] for data in seeds]
    for _ in range(count):
        data = rng.choice(short)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            data = rng.choice(_CHANGES)(rng, data, short)
        yield data[:MAX_BYTES]


def fuzz(target: Callable[[bytes], object], seeds: Sequence[bytes], count: int,
         expected: type[Exception] | tuple[type[Exception], ...] = FlowspecError) -> int:
    """Call ``target`` with the seeds and ``count`` mutations; return how many it accepted. Fails at the first
    exception that is not ``expected``."""
    accepted = 0
    for data in mutations(seeds, count):
        try:
            target(data)
            accepted += 1
        except expected:
            pass
        except Exception:
            pytest.fail(f"{traceback.format_exc(limit=-4)}\nfor the input, of {len(data)} bytes:\n"
                        f"{data[:20_000]!r}")
    return accepted


def _span(rng: random.Random, data: bytes) -> tuple[int, int]:
    first = rng.randrange(len(data) + 1)
    return first, min(len(data), first + rng.choice((1, 1, 2, 4, 8, 32, 128)))


def _flip(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) or 1)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if data else data


def _overwrite(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    first, stop = _span(rng, data)
    return data[:first] + rng.randbytes(stop - first) + data[stop:]


def _delete(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    first, stop = _span(rng, data)
    return data[:first] + data[stop:]


def _repeat(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    first, stop = _span(rng, data)
    return data[:stop] + data[first:stop] * rng.choice((1, 2, 50)) + data[stop:]


def _truncate(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _splice(rng: random.Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    other = rng.choice(seeds)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _insert(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(_VALUES) + data[at:]


def _exchange(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Put another value in the place of a number, word, text or bracket."""
    found = list((rng.choice((_NUMBER, _TOKEN))).finditer(data))
    if not found:
        return data
    here, value = rng.choice(found), rng.choice([*_VALUES, rng.choice(found).group()])
    return data[: here.start()] + value + data[here.end() :]


_CHANGES = (_flip, _overwrite, _delete, _repeat, _truncate, _splice, _insert, _exchange, _exchange, _exchange)

"""Straight-line coders for messages with arrays, made from the very forms that ``codec`` interprets.

To interpret the form of a segment field by field takes some 30 µs a hop, the generated source 11;
the bytes themselves take about 100 over loopback (``bench.micro_hop``).  A coder made here handles
well-formed messages only: for anything else it returns None or raises one of ``REFUSALS``, and
``codec`` takes the slow way, which says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np

from flowspec_edge.messages import Payload
from flowspec_edge.transport.fields import Array, ArrayField, Dense, Int, Scalar

REFUSALS = (TypeError, ValueError, AttributeError, IndexError, OverflowError)
LIMIT = 2**63

Encoder = Callable[[Any], "list[Any] | None"]
Decoder = Callable[[Sequence[Any], Any, list[Any], Any], Any]


def encoder(kind: type, scalars: dict[str, Scalar], arrays: dict[str, ArrayField], codes: dict[str, str],
            max_dim: int) -> Encoder:
    """``encode(message)`` for messages of ``kind`` whose arrays have the forms ``codes``."""
    scope: dict[str, Any] = {"packb": msgpack.packb}
    body: list[str] = []
    tests: list[str] = []
    parts: list[str] = []
    frames: list[str] = []
    dims: list[str] = []
    for name, field in arrays.items():
        code = codes[name]
        if field.codes[code] is None:
            continue
        body.append(f"{name} = message.{name}")
        if isinstance(field, Dense):
            body.append(f"{name} = {name}.array")
            frames.append(f"{name}.data.cast('B')")
            tests.append(f"{name}.size and {name}.flags.c_contiguous")
        else:
            parts.append(f"{name}.tobytes()")
        scope[f"{name}_dtype"] = field.codes[code]
        tests.append(f"{name}.dtype == {name}_dtype")
        new = [dim for dim in field.dims if dim not in dims]
        dims += new
        if new == list(field.dims):
            body.append(f"{_tuple(field.dims)} = {name}.shape")
        else:
            tests += [f"{name}.shape == {_tuple(tuple(_seen(name, d, new) for d in field.dims))}"]
            body += [f"{_seen(name, dim, new)} = {dim} = {name}.shape[{axis}]"
                     for axis, dim in enumerate(field.dims) if dim in new]
    tests += [f"{dim} <= {max_dim}" for dim in dims]
    values = []
    for name, scalar in scalars.items():
        scope[f"pack_{name}"] = scalar.pack
        values.append(f"pack_{name}(message.{name})")
    index = f"b''.join(({', '.join(parts)},))" if parts else "b''"
    layout = " ".join(codes.values())
    header = ", ".join([repr(kind.__name__), repr(layout), f"[{', '.join(dims)}]", index, *values])
    body.append(f"if not ({' and '.join(tests)}): return None")
    body.append(f"return [packb([{header}]), {', '.join(frames)}]")
    made: Encoder = _function("encode(message)", body, scope)
    return made


def _seen(name: str, dim: str, new: list[str]) -> str:
    return f"{name}_{dim}" if dim in new else dim


def decoder(kind: type, scalars: dict[str, Scalar], arrays: dict[str, ArrayField], codes: dict[str, str],
            max_dim: int) -> Decoder:
    """``decode(dims, index, scalars, frames)``, the parts of a header and the frames, likewise."""
    scope: dict[str, Any] = {"kind": kind, "ndarray": np.ndarray, "Payload": Payload}
    dims = dict.fromkeys(dim for name, field in arrays.items()
                         if field.codes[codes[name]] is not None for dim in field.dims)
    body = [f"{_tuple(tuple(dims))} = dims", f"{_tuple(tuple(scalars))} = scalars", "offset = 0"]
    ints = [*dims, *(name for name, scalar in scalars.items() if isinstance(scalar, Int))]
    tests = [f"{' is '.join(f'type({name})' for name in ints)} is int", "type(index) is bytes"]
    tests += [f"0 <= {dim} <= {max_dim}" for dim in dims]
    for name, scalar in scalars.items():
        if isinstance(scalar, Int):
            tests.append(f"{scalar.low} <= {name} < {LIMIT}")
        else:
            scope[f"unpack_{name}"] = scalar.unpack
            body.append(f"{name} = unpack_{name}({name})")
    body.append(f"if not ({' and '.join(tests)}): return None")
    frames = 1
    for name, field in arrays.items():
        code = codes[name]
        if field.codes[code] is None:
            body.append(f"{name} = None")
            continue
        scope[f"{name}_dtype"] = field.codes[code]
        shape = _tuple(field.dims)
        if isinstance(field, Dense):
            body += [f"{name} = ndarray({shape}, {name}_dtype, frames[{frames}])",
                     f"frame = frames[{frames}]",
                     f"if type(frame) is not bytes or {name}.nbytes != len(frame): return None",
                     f"{name} = Payload({code!r}, {name})"]
            frames += 1
        else:
            body += [f"{name} = ndarray({shape}, {name}_dtype, index, offset)", f"offset += {name}.nbytes"]
    body.append(f"if offset != len(index) or len(frames) != {frames}: return None")
    body.append(f"return kind({', '.join(f.name for f in fields(kind))})")
    made: Decoder = _function("decode(dims, index, scalars, frames)", body, scope)
    return made


def compilable(arrays: dict[str, ArrayField]) -> bool:
    """Whether straight-line coders exist for messages with ``arrays``."""
    return bool(arrays) and all(isinstance(field, Array | Dense) for field in arrays.values())


def _tuple(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)},)"


def _function(signature: str, body: list[str], scope: dict[str, Any]) -> Any:
    source = "\n    ".join([f"def {signature}:", *body])
    exec(compile(source, f"<{signature} made by {__name__}>", "exec"), scope)
    return scope[signature.partition("(")[0]]

"""A TOML file as a model, and what is wrong with it: one line with file, line, key and what to do.

Knows how pydantic says what it found.  Does not know what the files are for.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ValidationError

from flowspec_edge.errors import UsageError
from flowspec_edge.toml_lines import key_lines, nearest_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

M = TypeVar("M", bound=BaseModel)

_SYNTAX = {"Cannot overwrite a value": "; this key is given twice", "Invalid value": "; texts need quotes",
           "Cannot declare": "; this table is given twice, and [[NAME]] is for several"}
_ADVICE = {("int_type", str): "write it without quotes", ("float_type", str): "write it without quotes",
           ("bool_type", str): "write it without quotes", ("string_type", int): "write it in quotes",
           ("string_type", float): "write it in quotes", ("string_type", bool): "write it in quotes"}


class Misplaced(ValueError):
    """A validator's fault that lies further inside than the value it was given: at ``where`` in it."""

    def __init__(self, message: str, *where: str | int) -> None:
        super().__init__(message)
        self.where = where


def matching(pattern: str, what: str) -> AfterValidator:
    """For texts that ``pattern`` must match as a whole; ``what`` it describes, for people."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"{value!r} is not {what}")
        return value

    return AfterValidator(check)


def load_toml(path: Path, model: type[M]) -> M:
    """``path`` as a ``model``; every fault is one :class:`UsageError` that names file, line and key."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        text = raw.decode()
        data: dict[str, Any] = tomllib.loads(text)
    except UnicodeDecodeError as error:
        before = raw[: error.start].count(b"\n")
        raise UsageError(f"{path}:{before + 1} is not valid TOML: a byte that is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        at_line = found[1] if found else text.count("\n") + 1
        advice = next((advice for said, advice in _SYNTAX.items() if str(error).startswith(said)), "")
        raise UsageError(f"{path}:{at_line} is not valid TOML: {error}{advice}") from error
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = key_lines(text)
        faults, at = [], None
        for number, (where, fault) in enumerate(_faults(error, model)):
            line = nearest_line(lines, where)
            if not number:
                at = line
            faults.append(fault if line in (None, at) else f"line {line}: {fault}")
        raise UsageError(f"{path}{f':{at}' if at else ''}: {'; '.join(faults)}") from error


def _faults(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[list[str | int], str]]:
    """Where each fault is, and what it is."""
    for fault in error.errors():
        where = list(fault["loc"])
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, Misplaced):
            where += cause.where
        yield where, _words(fault, where, model)


def _words(fault: Any, where: list[str | int], model: type[BaseModel]) -> str:
    key = ".".join(map(str, where))
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_meant(where, model)}"
    if fault["type"] == "missing":
        return f"missing key {key!r}"
    message = fault["msg"].removeprefix("Value error, ")
    text = f"{key}: {message[:1].lower()}{message[1:]}" if key else message
    if fault["type"] != "value_error" and isinstance(fault["input"], (str, int, float)):
        text += f", not {_as_toml(fault['input'])}"
    advice = _ADVICE.get((fault["type"], type(fault["input"])))
    return f"{text}: {advice}" if advice else text


def _as_toml(value: str | float) -> str:
    """For one line, whatever is in it."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool)) else str(value)


def _meant(where: Sequence[str | int], model: type[BaseModel]) -> str:
    """What an unknown key may have been meant to be."""
    *outer, wrong = where
    here = model
    for part in outer:
        if isinstance(part, str):
            here = _inner(here.model_fields[part].annotation) or here
    for name, field in model.model_fields.items():
        other = _inner(field.annotation)
        if other is not None and wrong in other.model_fields:
            many = str(field.annotation).startswith("list")
            return f": it belongs to {f'[[{name}]]' if many else f'[{name}]'}"
    known = list(here.model_fields)
    if near := get_close_matches(str(wrong), known, n=1):
        return f": did you mean {near[0]!r}?"
    return f": known here are {', '.join(known)}"


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation, however it is wrapped."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _inner(argument))), None)

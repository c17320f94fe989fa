"""TOML files as pydantic models; every fault is one line with file, line, key and advice."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from flowspec_edge.errors import UsageError
from flowspec_edge.util.bounded_read import check_depth, read_bytes
from flowspec_edge.util.terminal import no_control_characters
from flowspec_edge.util.urls import origin_problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

M = TypeVar("M", bound=BaseModel)
KeyPath = tuple[str | int, ...]  # keys from the top of the file down, and array indexes from 0

_MAX_BYTES = 4 * 1024 * 1024
_MOST_LINES = 2_000  # of a file whose keys are located for an error: the time grows with their square

_SYNTAX = {"Cannot overwrite a value": "; this key is given twice", "Invalid value": "; texts need quotes",
           "Cannot declare": "; this table is given twice, and [[NAME]] is for several"}
_ADVICE = {("int_type", str): "write it without quotes", ("float_type", str): "write it without quotes",
           ("bool_type", str): "write it without quotes", ("string_type", int): "write it in quotes",
           ("string_type", float): "write it in quotes", ("string_type", bool): "write it in quotes"}

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class StrictModel(BaseModel):
    """Frozen; unknown keys and values of another type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @field_validator("*")
    @classmethod
    def _no_control_characters(cls, value: Any) -> Any:
        return no_control_characters(value) if isinstance(value, str) else value

    def dump(self) -> str:
        """Return a flat model as TOML."""
        return toml_table(self.model_dump())


class Misplaced(ValueError):
    """A validator's error at ``key_path`` inside the value that it checks."""

    def __init__(self, message: str, *key_path: str | int) -> None:
        super().__init__(message)
        self.key_path = key_path


def matching(pattern: str, description: str) -> AfterValidator:
    """Return a validator: the whole string must match ``pattern``, which the error calls ``description``."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"{value!r} is not {description}")
        return value

    return AfterValidator(check)


def _origin(value: str) -> str:
    if problem := origin_problem(value):
        raise ValueError(problem)
    return value


Origin = Annotated[str, AfterValidator(_origin)]  # of a web page


def load_toml(path: Path, model: type[M]) -> M:
    """Load a TOML file; UsageError with file, line and key of every fault."""
    return parse_toml(read_bytes(path, _MAX_BYTES), path, model)


def parse_toml(raw: bytes, path: Path, model: type[M]) -> M:
    """Parse TOML as :func:`load_toml`; ``path`` is for the errors."""
    try:
        text = raw.decode()
        data: dict[str, Any] = tomllib.loads(text)
    except UnicodeDecodeError as error:
        before = raw[: error.start].count(b"\n")
        raise UsageError(f"{path}:{before + 1} is not valid TOML: a byte that is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"at line (\d+)", str(error))
        at_line = match[1] if match else text.count("\n") + 1
        advice = next((advice for beginning, advice in _SYNTAX.items() if str(error).startswith(beginning)), "")
        raise UsageError(f"{path}:{at_line} is not valid TOML: {error}{advice}") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand brackets
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    check_depth(data, str(path))
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = key_lines(text) if text.count("\n") <= _MOST_LINES else {}
        faults, at = [], None
        for number, (key_path, fault) in enumerate(_faults(error, model)):
            line = nearest_line(lines, key_path)
            if not number:
                at = line
            faults.append(fault if line in (None, at) else f"line {line}: {fault}")
        raise UsageError(f"{path}{f':{at}' if at else ''}: {'; '.join(faults)}") from error


def toml_table(values: Mapping[str, Any]) -> str:
    """Return the lines of a table; JSON's strings, numbers and lists are valid TOML."""
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


def with_key(text: str, table: KeyPath, key: str, value: str | None) -> str:
    """TOML with ``key`` of a table set to the TOML ``value``, or without it if None; comments stay.

    A commented line such as ``# key = 1  # why`` becomes the key's line.  ``text`` must be valid TOML;
    LookupError if the table has no line of its own.
    """
    if "\r\n" in text:
        return with_key(text.replace("\r\n", "\n"), table, key, value).replace("\n", "\r\n")
    lines, rows = key_lines(text), text.split("\n")
    head = lines[table]
    if not rows[head - 1].lstrip().startswith("["):
        raise LookupError(f"the table of line {head}")

    def end_of(begin: int) -> int:
        return next(end for end in range(begin, len(rows) + 1) if is_toml("\n".join(rows[begin - 1:end])))

    begin = lines.get((*table, key))
    if begin is not None:
        end = end_of(begin)
    elif value is None:
        return text
    else:
        following = [number for number, row in enumerate(rows[head:], start=head) if row.lstrip()[:1] == "["]
        commented = re.compile(rf"#\s*{re.escape(key)}\s*=")
        begin = end = next((number for number in range(head + 1, min([*following, len(rows)]) + 1)
                            if commented.match(rows[number - 1])), 0)
        if not begin:
            keys = [line for key_path, line in lines.items() if key_path[:-1] == table]
            end = max([head, *map(end_of, keys)])
            begin = end + 1
    row = "" if begin > end or end > begin else rows[begin - 1]
    column = _find_comment(row)
    new = f"{key} = {value}"
    if column is not None:
        new = f"{new:<{column - 1}} {row[column:].rstrip()}"
    return "\n".join([*rows[:begin - 1], *([] if value is None else [new]), *rows[end:]])


def is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _find_comment(row: str) -> int | None:
    """Where the comment at the end of a line with a key begins, whether or not the line is commented out."""
    start = len(row) - len(row.lstrip("# "))
    return next((column for column in range(start, len(row))
                 if row[column] == "#" and is_toml(row[start:column])), None)


def _faults(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[list[str | int], str]]:
    for fault in error.errors():
        key_path = list(fault["loc"])
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, Misplaced):
            key_path += cause.key_path
        yield key_path, _message(fault, key_path, model)


def _message(fault: Any, key_path: list[str | int], model: type[BaseModel]) -> str:
    key = ".".join(map(str, key_path))
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_suggestion(key_path, model)}"
    if fault["type"] == "missing":
        return f"missing key {key!r}"
    message = fault["msg"].removeprefix("Value error, ")
    text = f"{key}: {message[:1].lower()}{message[1:]}" if key else message
    if fault["type"] != "value_error" and isinstance(fault["input"], (str, int, float)):
        text += f", not {_as_toml(fault['input'])}"
    advice = _ADVICE.get((fault["type"], type(fault["input"])))
    return f"{text}: {advice}" if advice else text


def _as_toml(value: str | float) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool)) else str(value)


def _suggestion(key_path: Sequence[str | int], model: type[BaseModel]) -> str:
    *outer, unknown_key = key_path
    table = model
    for part in outer:
        # A key of a whole file that is a dictionary is no field.
        if isinstance(part, str) and (field := table.model_fields.get(part) or table.model_fields.get("root")):
            table = _inner(field.annotation) or table
    for name, field in model.model_fields.items():
        other = _inner(field.annotation)
        if other is not None and unknown_key in other.model_fields:
            many = str(field.annotation).startswith("list")
            return f": it belongs to {f'[[{name}]]' if many else f'[{name}]'}"
    field_names = list(table.model_fields)
    if near := get_close_matches(str(unknown_key), field_names, n=1):
        return f": did you mean {near[0]!r}?"
    return f": known here are {', '.join(field_names)}"


def _inner(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for argument in get_args(annotation) if (model := _inner(argument))), None)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, of every table, key and array element in ``text``, which must be valid TOML.

    ("device", 1) is where the second [[device]] begins, ("device", 1, "name") where its name is set.
    tomllib does not report lines, so this parses ever longer prefixes, closing arrays that they cut.
    """
    rows = text.replace("\r\n", "\n").split("\n")
    lines: dict[KeyPath, int] = {}
    begin = 0
    for end in range(1, len(rows) + 1):
        prefix = "\n".join(rows[:end])
        for closing in ("", "\n]", "\n]]"):
            try:
                document = tomllib.loads(prefix + closing)
            except tomllib.TOMLDecodeError:
                continue
            for key_path in _paths(document):
                lines.setdefault(key_path, begin + 1)
            begin = end
            break
    return lines


def _paths(value: Any, key_path: KeyPath = ()) -> Iterator[KeyPath]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*key_path, key)
        yield from _paths(inner, (*key_path, key))


def nearest_line(lines: Mapping[KeyPath, int], key_path: Sequence[str | int]) -> int | None:
    """Return the line of ``key_path`` or of its innermost table that has one; None for the whole file."""
    path = tuple(key_path)
    return next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)

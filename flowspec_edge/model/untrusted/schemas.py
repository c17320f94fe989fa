"""What in a JSON schema cannot be enforced, found by trying its keywords one by one.

llguidance says what is wrong with a schema but not where, and compiles none of it then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

Fails = Callable[[Any], str]  # a schema -> why it cannot be enforced; empty: it can
Problem = tuple[str, str]  # where it is, such as "properties.name.pattern", and why

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # their values are schemas by name
_LISTED = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_NESTING = {*_NAMED, *_LISTED, *_SINGLE}
_UNTRIED = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
            "$schema", "$id", "$comment", "x-guidance"}  # restrict nothing


def enforceable(schema: dict[str, Any], fails: Fails) -> tuple[dict[str, Any], list[Problem]]:
    """Return ``schema`` without what cannot be enforced, and what that was, the innermost first.

    What remains allows all that the schema allows; it may fail as a whole all the same.
    """
    trial = _Trial(schema, fails)
    remaining = trial.checked(schema, "")
    if fails(remaining):
        remaining = trial.checked(remaining, "", contradictions=True)
    return remaining, trial.problems


class _Trial:
    """Tries what of one schema, ``root``, can be enforced."""

    def __init__(self, root: dict[str, Any], fails: Fails) -> None:
        self.problems: list[Problem] = []
        self._root = root
        self._fails_uncached = fails
        self._failures: dict[str, str] = {}  # most keywords are like many others

    def checked(self, node: Any, at: str, contradictions: bool = False) -> Any:
        """Return ``node`` without what cannot be enforced; ``at``: where it is.

        ``contradictions``: look also for keywords that exclude each other.
        """
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            self.problems.append((at, "must be a schema: an object or a boolean"))
            return {}
        remaining: dict[str, Any] = {}
        for keyword, value in node.items():
            path = _join(at, keyword)
            nested = self._nested(keyword, value, path, contradictions) if keyword in _NESTING else value
            if reason := self._reason(keyword, nested):
                self.problems.append((path, reason))
            else:
                remaining[keyword] = nested
        stated_patterns, patterns = node.get("patternProperties"), remaining.get("patternProperties", {})
        if isinstance(stated_patterns, dict) and len(patterns) < len(stated_patterns):
            remaining.pop("additionalProperties", None)  # it would forbid what a lost pattern allows
        if contradictions and (reason := self._fails(_alone(remaining))):
            self.problems.append((at, reason))
            return self._without_a_contradiction(remaining)
        return remaining

    def _nested(self, keyword: str, value: Any, at: str, contradictions: bool) -> Any:
        """Return a keyword's value with its schemas checked; of patterns only those that can be enforced."""
        if keyword in _NAMED and isinstance(value, dict):
            checked = {name: self.checked(part, _join(at, name), contradictions)
                       for name, part in value.items()}
            for name in list(checked) if keyword == "patternProperties" else ():
                if reason := self._fails({keyword: {name: {}}}):
                    self.problems.append((_join(at, name), reason))
                    del checked[name]
            return checked
        if keyword in (*_LISTED, "items") and isinstance(value, list):
            return [self.checked(part, f"{at}[{i}]", contradictions) for i, part in enumerate(value)]
        if keyword in _SINGLE and isinstance(value, dict):
            return self.checked(value, at, contradictions)
        return value

    def _reason(self, keyword: str, value: Any) -> str:
        """Why a keyword alone cannot be enforced; its schemas are tried elsewhere. Empty: it can."""
        if keyword in _UNTRIED or (keyword in (*_NAMED, "items", "additionalProperties")
                                   and isinstance(value, dict)):
            return ""
        if keyword == "$ref":
            return "" if _resolves(value, self._root) else f"the schema has no {json.dumps(value)}"
        return self._fails(_alone({keyword: value}))

    def _without_a_contradiction(self, node: dict[str, Any]) -> dict[str, Any]:
        """Without the keyword, if it is only one, that contradicts the others."""
        for keyword in reversed(node):
            remaining = {name: value for name, value in node.items() if name != keyword}
            if not self._fails(_alone(remaining)):
                return remaining
        return {name: node[name] for name in ("$defs", "definitions") if name in node}

    def _fails(self, schema: dict[str, Any]) -> str:
        key = json.dumps(schema)
        if key not in self._failures:
            self._failures[key] = self._fails_uncached(schema)
        return self._failures[key]


def _alone(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node with nothing in its schemas, and without references."""
    return {keyword: _emptied(keyword, value) for keyword, value in node.items() if keyword != "$ref"}


def _emptied(keyword: str, value: Any) -> Any:
    if keyword in _NAMED and isinstance(value, dict):
        return {name: _empty(part) for name, part in value.items()}
    if keyword in (*_LISTED, "items") and isinstance(value, list):
        return [_empty(part) for part in value]
    return _empty(value) if keyword in _SINGLE else value


def _empty(schema: Any) -> Any:
    return {} if isinstance(schema, dict) else schema


def _resolves(reference: Any, root: dict[str, Any]) -> bool:
    """Whether a reference has a target within the schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    if not reference.startswith("#/"):
        return True  # the schema itself, or an anchor
    target: Any = root
    for step in _steps(reference):
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        elif isinstance(target, dict) and step in target:
            target = target[step]
        else:
            return False
    return isinstance(target, (dict, bool))


def _steps(pointer: str) -> Iterator[str]:
    for step in unquote(pointer[2:]).split("/"):
        yield step.replace("~1", "/").replace("~0", "~")


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name

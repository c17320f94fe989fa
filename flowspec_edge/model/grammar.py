"""Grammars that an answer must match: which tokens may come next, computed by llguidance on the CPU.

A grammar restricts the target's own choice, the same for every strategy, so answers stay those of plain
decoding with the same restriction.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flowspec_edge.errors import UsageError
from flowspec_edge.model.untrusted.processes import LimitedProcesses, LimitExceeded, Limits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Weak models would add whitespace forever; JSON that is indented ten levels deep still fits.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{1,40}"}
_MAX_BYTES = 256 * 2**10  # of a grammar
_MAX_FORCED = 8 * 2**10  # bytes without a choice: they are tokenised for every mask
# llguidance's own limits are for one client. A mask takes at most about 5 ms with these.
_PARSER_LIMITS = {"verbose_errors": False, "step_lexer_fuel": 50_000, "step_max_items": 20_000,
                  "max_lexer_states": 50_000}
_COMPILING = Limits(cpu_s=1.0, memory=128 * 2**20, stack=2**20)
_MASKS_S, _MASKS_TURN_S = 0.3, 0.1  # CPU time for the masks of an answer: saved at most, and gained per turn
_KNOWN = 1024  # grammars that are not checked again
_QUICK_S = 0.1
_BYTES_SPECIAL = "<[256]>"  # a special token of llguidance's tokenizer for bytes
_MAX_REASON = 200  # characters of llguidance's explanation
_WITHIN_SLASHES = {"/": r"\/", "\n": r"\n"}
_EXCERPT = re.compile(r"\n\s*[0-9]+ \| ")  # of the grammar, which follows it


Special = Callable[[str], "str | None"]  # as GrammarCompiler.special


class GrammarState:
    """Where one answer is in its grammar. Tokens that end a sequence are never part of a path."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._left_s = _MASKS_S

    def turn(self) -> None:
        """The masks that follow are of another turn of the pipeline."""
        self._left_s = min(_MASKS_S, self._left_s + _MASKS_TURN_S)

    def advance(self, token: int) -> None:
        """The answer continues with ``token``; UsageError if the grammar does not allow it."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def complete(self) -> bool:
        """Whether no token may follow but one that ends the sequence."""
        return bool(self._matcher.is_stopped())

    def allowed(self, path: Sequence[int]) -> NDArray[np.uint8] | None:
        """Return which tokens may follow the answer and then ``path``: ceil(V / 8) bytes with a bit each, the
        lowest first; None if ``path`` cannot follow the answer. UsageError if the grammar is too complex:
        other answers wait for this thread."""
        import numpy as np  # here: every command's help imports this module

        if self._left_s < 0:
            raise UsageError("the answer's grammar is too complex: its masks take too long")
        began = time.thread_time()
        consumed = self._matcher.try_consume_tokens(list(path)) if path else 0
        bits = self._matcher.compute_bitmask() if consumed == len(path) else None
        if consumed:
            self._matcher.rollback(consumed)
        self._left_s -= time.thread_time() - began
        self._check()
        if bits is None:
            return None
        allowed = np.zeros(-(-self._vocabulary // 8), np.uint8)  # the model's vocabulary may be padded
        known = np.frombuffer(bits, np.uint8)[:len(allowed)]
        allowed[:len(known)] = known
        return allowed

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(f"the answer's grammar fails: {_reason(self._matcher.get_error())}")


class Grammar:
    """A compiled grammar; any number of answers may use it."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def begin(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._vocabulary)


@dataclass(frozen=True)
class GrammarText:
    """``lark``: in llguidance's syntax; ``checked``: the same with a special token of the byte tokenizer in
    place of each of the model's. ``gbnf``: both are in llama.cpp's syntax instead."""

    lark: str
    checked: str
    gbnf: bool = False

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.gbnf} {self.checked}".encode()).digest()


@dataclass(frozen=True)
class _Verdict:
    """Of a process with limits: why a grammar is refused (empty: it is not), how long that took, and the
    grammar in llguidance's syntax if it was in another one."""

    refusal: str
    seconds: float
    converted: str = ""


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        """``tokenizer``: transformers'; ``vocabulary``: the model's logits. UsageError without llguidance."""
        try:
            import llguidance.hf
        except ImportError as error:
            raise UsageError("JSON mode and tool calls need the package llguidance: "
                             "pip install 'flowspec-edge[grammar]'") from error
        self._library: Any = llguidance
        self._processes = LimitedProcesses("grammar", _COMPILING)
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._lock = threading.Lock()  # guards what follows
        self._wrapped: dict[frozenset[int], Any] = {}  # by the ids that end a sequence
        self._known: OrderedDict[bytes, _Verdict] = OrderedDict()  # by the digests of grammars

    def json_schema(self, schema: dict[str, Any], stop_ids: frozenset[int], strict: bool = True) -> Grammar:
        """The answer is JSON for ``schema``; UsageError if that is no schema. ``strict``: UsageError also for
        keywords that llguidance does not know, which are otherwise ignored."""
        return self.compile(self.text(lambda special: f"start: {json_value(schema, strict)}"), stop_ids)

    def text(self, write: Callable[[Special], str]) -> GrammarText:
        """``write``: returns a grammar in llguidance's Lark syntax, given what spells special tokens.
        UsageError if it is too long."""
        self._processes.start()  # while the vocabulary is wrapped
        text = GrammarText(write(self.special), write(lambda word: self.special(word) and _BYTES_SPECIAL))
        if len(text.checked) > _MAX_BYTES:
            raise UsageError(f"the schema is too long: {len(text.checked)} bytes; at most {_MAX_BYTES}")
        return text

    def written(self, grammar: str) -> GrammarText:
        """A grammar that the user wrote, in llama.cpp's syntax (GBNF) or in llguidance's (Lark). UsageError
        if it is too long."""
        text = self.text(lambda _: grammar)
        return replace(text, gbnf="::=" in grammar)

    def is_quick(self, text: GrammarText) -> bool:
        """Whether compiling is known to take no time to speak of."""
        known = self._known.get(text.digest)
        return known is not None and known.seconds < _QUICK_S

    def compile(self, text: GrammarText, stop_ids: frozenset[int]) -> Grammar:
        """UsageError if the grammar is wrong, or needs too much time or memory: each is first compiled in a
        process with limits."""
        lark = self._require_tractable(text) or text.lark
        limits = self._library.LLParserLimits(**_PARSER_LIMITS)
        matcher = self._library.LLMatcher(self._wrap(stop_ids), lark, log_level=0, limits=limits)
        matcher.compute_bitmask()  # here, in no hurry, and not in the thread that every answer waits for
        if matcher.is_error():
            raise UsageError(_reason(matcher.get_error()))
        return Grammar(matcher, self._vocabulary)

    def special(self, token: str) -> str | None:
        """A text's form in a Lark grammar if it is one token that plain text cannot spell; else None."""
        ids = self._tokenizer.convert_tokens_to_ids([token])
        wrapped = self._wrap(frozenset())
        known = ids[0] is not None and self._tokenizer.convert_ids_to_tokens(ids) == [token]
        return f"<[{ids[0]}]>" if known and wrapped.is_special_token(ids[0]) else None

    def _require_tractable(self, text: GrammarText) -> str:
        """Return the grammar in llguidance's syntax if it is in another one, else an empty text."""
        known = self._known.get(text.digest)
        if known is None:
            began = time.monotonic()
            refusal, converted = self._tried(text)
            known = _Verdict(refusal, time.monotonic() - began, converted)
            with self._lock:
                self._known[text.digest] = known
                if len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
        if known.refusal:
            raise UsageError(known.refusal)
        return known.converted

    def _tried(self, text: GrammarText) -> tuple[str, str]:
        """Why the grammar is refused (empty: it is not), and the converted grammar."""
        try:
            return "", self._processes.run({"lark": text.checked, "gbnf": text.gbnf, "limits": _PARSER_LIMITS,
                                            "forced": _MAX_FORCED})
        except LimitExceeded as error:
            refusal = f"the schema is too complex to compile: {error}"
            if not error.certain:
                raise UsageError(refusal) from error
            return refusal, ""
        except UsageError as error:
            return _reason(str(error)) or "not valid", ""

    def _wrap(self, stop_ids: frozenset[int]) -> Any:
        """The vocabulary as llguidance reads it; takes a second for a large one."""
        with self._lock:
            if stop_ids not in self._wrapped:
                try:
                    self._wrapped[stop_ids] = self._library.hf.from_tokenizer(
                        self._tokenizer, n_vocab=self._vocabulary, eos_token=sorted(stop_ids) or None)
                except Exception as error:  # its bindings raise several kinds
                    raise UsageError("llguidance cannot read the model's tokenizer: "
                                     f"{_reason(str(error))}") from error
            return self._wrapped[stop_ids]


def json_value(schema: dict[str, Any], strict: bool = True) -> str:
    """A JSON value for ``schema``, in llguidance's Lark syntax; ``strict`` as for
    :meth:`GrammarCompiler.json_schema`."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**_JSON_OPTIONS, 'lenient': not strict}})}"


def matching(regex: str) -> str:
    """A text that matches all of ``regex``, in llguidance's Lark syntax: slashes end it, and it has one
    line."""
    body = re.sub(r"\\?[/\n]|\\.", lambda found: _WITHIN_SLASHES.get(found[0][-1], found[0]), regex)
    return f"/{body}/"


def one_of(choices: Sequence[str]) -> str:
    """One of the texts, in llguidance's Lark syntax."""
    return " | ".join(json.dumps(choice) for choice in choices)


def _reason(text: str) -> str:
    """Without the position in, and the listing of, a grammar that the user did not write."""
    text = text.partition("failed to compile JSON schema: ")[2] or text
    text = _EXCERPT.split(text)[0]
    return " ".join(text.split())[:_MAX_REASON]

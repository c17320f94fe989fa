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
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flowspec_edge.errors import UsageError
from flowspec_edge.model.untrusted.processes import LimitedProcesses, LimitExceeded, Limits
from flowspec_edge.model.untrusted.schemas import Problem

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
_MAX_CHECKED = 1024  # grammars that are not checked again
_MAX_CHECKED_CHARACTERS = 16 * 2**20  # characters of those that are used in their place
_MOST_WRAPPED = 8  # vocabularies: a large one takes tens of megabytes, and clients may name further ends
_QUICK_S = 0.1
_BYTES_SPECIAL = "<[256]>"  # a special token of llguidance's tokenizer for bytes
_MAX_REASON = 200  # characters of llguidance's explanation
_WITHIN_SLASHES = {"/": r"\/", "\n": r"\n"}
_EXCERPT = re.compile(r"\n\s*[0-9]+ \| ")  # of the grammar, which follows it
_TOO_COMPLEX = "the schema is too complex to compile"
_GBNF_RULE = re.compile(r"^\s*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)
_decoder = json.JSONDecoder()
_DEAD_END = "no token of the model's vocabulary can write what the answer's grammar asks for next"


Special = Callable[[str], "str | None"]  # as GrammarCompiler.special


class GrammarState:
    """Where one answer is in its grammar. Tokens that end a sequence are never part of a path."""

    def __init__(self, start: Any, vocabulary: int) -> None:
        """Begin an answer; ``start``: a matcher at the beginning of the grammar, which is only copied."""
        self._start, self._matcher = start, start.deep_copy()
        self._vocabulary = vocabulary
        self._mask_budget_s = _MASKS_S
        self._tokens: list[int] = []  # of the answer
        self._dead_ends: set[tuple[int, ...]] = set()  # answers that no token can continue, unless they end

    def turn(self) -> None:
        """Begin the masks of another turn of the pipeline."""
        self._mask_budget_s = min(_MASKS_S, self._mask_budget_s + _MASKS_TURN_S)

    def advance(self, token: int) -> None:
        """Continue the answer with ``token``.

        UsageError if the grammar does not allow it, or if no token of the vocabulary can continue the answer then.
        """
        self._tokens.append(token)
        self._matcher.consume_token(token)
        self._check()
        if tuple(self._tokens) in self._dead_ends:
            raise UsageError(_DEAD_END)

    @property
    def complete(self) -> bool:
        """Whether no token may follow but one that ends the sequence."""
        return bool(self._matcher.is_stopped())

    def allowed(self, path: Sequence[int]) -> NDArray[np.uint8] | None:
        """Return which tokens may follow the answer and then ``path``.

        The result has ceil(V / 8) bytes with a bit for each token, the lowest first; it is None if ``path`` cannot
        follow the
        answer, or nothing ``path``. UsageError if the grammar is too complex, since other answers wait for this
        thread, or if
        no token can continue the answer.
        """
        import numpy as np  # here: every command's help imports this module

        if self._mask_budget_s < 0:
            raise UsageError("the answer's grammar is too complex: its masks take too long")
        began = time.thread_time()
        consumed = self._matcher.try_consume_tokens(list(path)) if path else 0
        bits = self._matcher.compute_bitmask() if consumed == len(path) else None
        if consumed:
            self._matcher.rollback(consumed)
        self._mask_budget_s -= time.thread_time() - began
        if path and _is_dead_end(self._matcher):  # of a draft: the answer need not go there
            self._dead_ends.add((*self._tokens, *path))
            self._matcher = self._start.deep_copy()  # the error stays with the other one
            self._matcher.consume_tokens(self._tokens)
            bits = None
        self._check()
        if bits is None:
            return None
        allowed = np.zeros(-(-self._vocabulary // 8), np.uint8)  # the model's vocabulary may be padded
        grammar_bytes = np.frombuffer(bits, np.uint8)[:len(allowed)]
        allowed[:len(grammar_bytes)] = grammar_bytes
        return allowed

    def _check(self) -> None:
        if _is_dead_end(self._matcher):
            raise UsageError(_DEAD_END)
        if self._matcher.is_error():
            raise UsageError(f"the answer's grammar fails: {_reason(self._matcher.get_error())}")


class Grammar:
    """A compiled grammar; any number of answers may use it."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def begin(self) -> GrammarState:
        return GrammarState(self._matcher, self._vocabulary)


@dataclass(frozen=True)
class GrammarText:
    """A grammar, not compiled.

    lark     in llguidance's syntax
    checked  the same with a special token of the byte tokenizer in place of each of the model's
    written  by a client, so it holds as it is or is refused
    gbnf     both are in llama.cpp's syntax instead
    """

    lark: str
    checked: str
    written: bool = False
    gbnf: bool = False

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.written} {self.gbnf} {self.checked}".encode()).digest()


@dataclass(frozen=True)
class _Verdict:
    """The verdict of a process with limits on a grammar.

    It says why the grammar is refused (empty: it is not), how long that took, and the grammar to use in its place, if
    there is one: in llguidance's syntax instead of another one, or without what is ignored.
    """

    refusal: str
    seconds: float
    instead: GrammarText | None = None

    @property
    def characters(self) -> int:
        return len(self.instead.lark) + len(self.instead.checked) if self.instead else 0


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        """Take a tokenizer of transformers; ``vocabulary``: the model's logits. UsageError without llguidance."""
        try:
            import llguidance
        except ImportError as error:
            raise UsageError("JSON mode and tool calls need the package llguidance: "
                             "pip install 'flowspec-edge[grammar]'") from error
        self._library: Any = llguidance
        self._processes = LimitedProcesses("grammar", _COMPILING)
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._lock = threading.Lock()  # guards what follows
        self._wrapped: OrderedDict[frozenset[int], Any] = OrderedDict()  # by the ids that end a sequence
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()  # by the digests of grammars

    def json_schema(self, schema: dict[str, Any], stop_ids: frozenset[int], strict: bool = True) -> Grammar:
        """Return the answer is JSON for ``schema``; UsageError if that is no schema.

        ``strict``: UsageError also for keywords that llguidance does not know, which are otherwise ignored.
        """
        return self.compile(self.text(lambda special: f"start: {json_value(schema, strict)}"), stop_ids)

    def text(self, write: Callable[[Special], str]) -> GrammarText:
        """Make the grammar's texts; UsageError if one is too long.

        ``write``: returns a grammar in llguidance's Lark syntax, given what spells special tokens.
        """
        self._processes.start()  # while the vocabulary is wrapped
        text = GrammarText(write(self.special), write(lambda marker: self.special(marker) and _BYTES_SPECIAL))
        if len(text.checked) > _MAX_BYTES:
            raise UsageError(f"the schema is too long: {len(text.checked)} bytes; at most {_MAX_BYTES}")
        return text

    def written(self, grammar: str) -> GrammarText:
        """Return a grammar that the user wrote, in llama.cpp's syntax (GBNF) or in llguidance's (Lark).

        UsageError if it is too long.
        """
        text = self.text(lambda _: grammar)
        return replace(text, written=True, gbnf=_GBNF_RULE.search(grammar) is not None)

    def is_quick(self, text: GrammarText) -> bool:
        """Whether compiling is known to take no time to speak of."""
        verdict = self._verdicts.get(text.digest)
        return verdict is not None and verdict.seconds < _QUICK_S

    def compile(self, text: GrammarText, stop_ids: frozenset[int]) -> Grammar:
        """Compile a grammar, after a process with limits has compiled it.

        UsageError if the grammar is wrong, or needs too much time or memory.
        """
        lark = self._require_tractable(text).lark
        limits = self._library.LLParserLimits(**_PARSER_LIMITS)
        matcher = self._library.LLMatcher(self._wrap(stop_ids), lark, log_level=0, limits=limits)
        matcher.compute_bitmask()  # here, in no hurry, and not in the thread that every answer waits for
        if _is_dead_end(matcher):
            raise UsageError(_DEAD_END)
        if matcher.is_error():
            raise UsageError(_reason(matcher.get_error()))
        return Grammar(matcher, self._vocabulary)

    def special(self, token: str) -> str | None:
        """Return a text's form in a Lark grammar if it is one token of the model that plain text cannot spell.

        Else None.
        """
        [number] = self._tokenizer.convert_tokens_to_ids([token])
        if number is None or number >= self._vocabulary:
            return None
        one_token = self._tokenizer.convert_ids_to_tokens([number]) == [token]
        return f"<[{number}]>" if one_token and self._wrap(frozenset()).is_special_token(number) else None

    def _require_tractable(self, text: GrammarText) -> GrammarText:
        """Return the grammar in llguidance's syntax, without what it ignores; UsageError if it is refused."""
        outcome = self._verdicts.get(text.digest)
        if outcome is None:
            began = time.monotonic()
            refusal, converted = self._try_compile(text)
            instead = GrammarText(converted, converted) if converted else None
            if refusal and not text.written and not refusal.startswith(_TOO_COMPLEX):
                refusal, instead = self._without_problems(text, refusal)
            outcome = _Verdict(refusal, time.monotonic() - began, instead)
            with self._lock:
                self._verdicts[text.digest] = outcome
                while len(self._verdicts) > _MAX_CHECKED or sum(
                        verdict.characters for verdict in self._verdicts.values()) > _MAX_CHECKED_CHARACTERS:
                    self._verdicts.popitem(last=False)
        if outcome.refusal:
            raise UsageError(outcome.refusal)
        return outcome.instead or text

    def _try_compile(self, text: GrammarText) -> tuple[str, str]:
        """Why the grammar is refused (empty: it is not), and the converted grammar."""
        try:
            return "", self._processes.run({"lark": text.checked, "gbnf": text.gbnf, "limits": _PARSER_LIMITS,
                                            "forced": _MAX_FORCED})
        except LimitExceeded as error:
            refusal = f"{_TOO_COMPLEX}: {error}"
            if not error.certain:
                raise UsageError(refusal) from error
            return refusal, ""
        except UsageError as error:
            return _reason(str(error)) or "not valid", ""

    def _refusal(self, lark: str) -> str:
        """Why a grammar in llguidance's syntax is refused; empty if it is not."""
        return self._try_compile(GrammarText(lark, lark))[0]

    def _without_problems(self, text: GrammarText, refusal: str) -> tuple[str, GrammarText | None]:
        """Handle a grammar with a schema that cannot be enforced.

        If that schema is strict, return why the grammar is refused; else return the grammar without the keywords
        that are ignored.
        """
        lark, checked = text.lark, text.checked
        for value in dict.fromkeys(_json_values(text.lark)):
            schema = json.loads(value)
            verdict = self._enforceable(schema)
            if verdict is None:
                continue
            remaining, problems = verdict
            if not schema["x-guidance"]["lenient"]:
                at, reason = problems[0] if problems else ("", refusal)
                location = ".".join(filter(None, (schema.get("$comment", "schema"), at)))
                return f"{location}: {_reason(reason)}", None
            lark, checked = (source.replace(value, json.dumps(remaining)) for source in (lark, checked))
        if lark == text.lark:
            return refusal, None
        return self._refusal(checked), GrammarText(lark, checked)

    def _enforceable(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]] | None:
        """Divide a schema into what can be enforced and what cannot. None: all of it can be enforced."""
        try:
            verdict = json.loads(self._processes.run({"schema": schema, "limits": _PARSER_LIMITS}))
            if verdict is None:
                return None
            remaining, problems = verdict
        except LimitExceeded:  # its keywords are too many to be tried one by one
            remaining, problems = schema, []
        if self._refusal(f"start: %json {json.dumps(remaining)}"):
            kind = {"type": "object"} if schema.get("type") == "object" else {}
            remaining = {**kind, "x-guidance": schema["x-guidance"]}
        return remaining, problems

    @cached_property
    def _description(self) -> str:
        """The tokenizer as JSON, with the model's tokens alone: llguidance allows all that it reads."""
        backend = copy(getattr(self._tokenizer, "backend_tokenizer", None))
        if backend is None:
            raise ValueError("it is not one of the package tokenizers, with a tokenizer.json")
        backend.no_padding()
        backend.no_truncation()
        if max(self._tokenizer.get_vocab().values(), default=0) < self._vocabulary:
            return str(backend.to_str())
        return _without_tokens_beyond(self._vocabulary, backend)

    def _wrap(self, stop_ids: frozenset[int]) -> Any:
        """Return the vocabulary as llguidance reads it; takes a second for a large one."""
        with self._lock:
            if stop_ids in self._wrapped:
                self._wrapped.move_to_end(stop_ids)
            else:
                ends = sorted(token for token in stop_ids if token < self._vocabulary)
                try:
                    self._wrapped[stop_ids] = self._library.LLTokenizer(
                        self._description, n_vocab=self._vocabulary, eos_token=ends or None)
                except Exception as error:  # its bindings raise several kinds
                    raise UsageError("llguidance cannot read the model's tokenizer: "
                                     f"{_reason(str(error))}") from error
                if len(self._wrapped) > _MOST_WRAPPED:
                    self._wrapped.popitem(last=False)
            return self._wrapped[stop_ids]


def _without_tokens_beyond(vocabulary: int, tokenizer: Any) -> str:
    """Return a tokenizer of the package tokenizers as JSON, with the token ids below ``vocabulary`` alone.

    llguidance tokenises a text without choices, so it must not know the others: removed from its masks alone,
    they would leave nothing to choose from. ValueError if the remaining tokens do not keep their ids.
    """
    from tokenizers import Tokenizer

    tokenizer_fields = json.loads(tokenizer.to_str())
    tokenizer_fields["added_tokens"] = [token for token in tokenizer_fields["added_tokens"] if token["id"] < vocabulary]
    model = tokenizer_fields["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {token: number for token, number in model["vocab"].items() if number < vocabulary}
    else:  # of the type Unigram: tokens and scores
        del model["vocab"][vocabulary:]
    if model["type"] == "BPE":
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [pair for pair in model["merges"]
                           if all(token in model["vocab"] for token in _tokens_of(pair, prefix))]
        if model["unk_token"] not in model["vocab"]:
            model["unk_token"] = None
    if model["type"] == "Unigram" and (model["unk_id"] or 0) >= vocabulary:
        model["unk_id"] = None
    tokenizer_fields["post_processor"] = None  # may name tokens that are gone; texts of a grammar get none
    text = json.dumps(tokenizer_fields)
    expected = {token: number for token, number in tokenizer.get_vocab().items() if number < vocabulary}
    if Tokenizer.from_str(text).get_vocab() != expected:
        raise ValueError(f"without its tokens from {vocabulary} on, the others would have other ids")
    return text


def _tokens_of(merge: str | list[str], prefix: str) -> tuple[str, str, str]:
    """Return the two tokens that a merge joins, and the one that it makes.

    Older files write the two with a space between; ``prefix``: of tokens that continue a word.
    """
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right.removeprefix(prefix)


def json_value(schema: dict[str, Any], strict: bool = True, name: str = "schema") -> str:
    """Return a JSON value for ``schema``, in llguidance's Lark syntax.

    ``strict`` as for :meth:`GrammarCompiler.json_schema`; ``name``: what errors call the schema.
    """
    options = {**_JSON_OPTIONS, "lenient": not strict}
    return f"%json {json.dumps({**schema, '$comment': name, 'x-guidance': options})}"


def _json_values(lark: str) -> Iterator[str]:
    """Yield the schemas of a grammar that :func:`json_value` has written.

    In a client's text there would be backslashes before the quotation marks.
    """
    for match in re.finditer(r"%json (?=\{)", lark):
        try:
            schema, end = _decoder.raw_decode(lark, match.end())
        except ValueError:
            continue
        options = schema.get("x-guidance")
        if isinstance(options, dict) and "lenient" in options:
            yield lark[match.end():end]


def _is_dead_end(matcher: Any) -> bool:
    """Whether the text cannot end, and no token can continue it."""
    return bool(matcher.is_error()) and str(matcher.get_error()).startswith("NoExtensionBias")


def matching(regex: str) -> str:
    """Return an expression in llguidance's Lark syntax that matches all of ``regex``.

    There a slash ends an expression, and an expression has one line.
    """
    body = re.sub(r"\\?[/\n]|\\.", lambda match: _WITHIN_SLASHES.get(match[0][-1], match[0]), regex)
    return f"/{body}/"


def one_of(choices: Sequence[str]) -> str:
    """One of the texts, in llguidance's Lark syntax."""
    return " | ".join(json.dumps(choice) for choice in choices)


def _reason(text: str) -> str:
    """Without the position in, and the listing of, a grammar that the user did not write."""
    text = text.partition("failed to compile JSON schema: ")[2] or text
    text = _EXCERPT.split(text)[0]
    if text.startswith("regex parse error:"):  # which shows the pattern, and marks the place
        text = f"in its pattern, {text.rpartition('error: ')[2]}"
    return " ".join(text.split())[:_MAX_REASON]

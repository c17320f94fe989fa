"""Grammars that an answer must match: which tokens may come next, computed by llguidance on the CPU.

A grammar restricts the target's own choice, the same for every strategy, so answers stay those of plain
decoding with the same restriction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowspec_edge.errors import UsageError
from flowspec_edge.model.schema_check import require_tractable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Weak models would add whitespace forever; JSON that is indented ten levels deep still fits.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{1,40}"}
_MAX_REASON = 200  # characters of llguidance's explanation
_EXCERPT = re.compile(r"\n\s*[0-9]+ \| ")  # of the grammar, which follows it


class GrammarState:
    """Where one answer is in its grammar. Tokens that end a sequence are never part of a path."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def advance(self, token: int) -> None:
        """The answer continues with ``token``; UsageError if the grammar does not allow it."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def complete(self) -> bool:
        """Whether no token may follow but one that ends the sequence."""
        return bool(self._matcher.is_stopped())

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return which tokens may follow the answer and then ``path``: bool [V]; None if ``path`` cannot
        follow the answer. UsageError if the grammar is too complex."""
        import numpy as np  # here: every command's help imports this module

        consumed = self._matcher.try_consume_tokens(list(path)) if path else 0
        bits = self._matcher.compute_bitmask() if consumed == len(path) else None
        if consumed:
            self._matcher.rollback(consumed)
        self._check()
        if bits is None:
            return None
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocabulary,
                             bitorder="little").view(np.bool_)

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


class GrammarCompiler:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        """``tokenizer``: transformers'; ``vocabulary``: the model's logits. UsageError without llguidance."""
        try:
            import llguidance.hf
        except ImportError as error:
            raise UsageError("JSON mode and tool calls need the package llguidance: "
                             "pip install 'flowspec-edge[grammar]'") from error
        self._library: Any = llguidance
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._wrapped: dict[frozenset[int], Any] = {}  # by the ids that end a sequence

    def json_schema(self, schema: dict[str, Any], stop_ids: frozenset[int], strict: bool = True) -> Grammar:
        """The answer is JSON for ``schema``; UsageError if that is no schema. ``strict``: UsageError also for
        keywords that llguidance does not know, which are otherwise ignored."""
        return self.compile(f"start: {json_value(schema, strict)}", stop_ids)

    def compile(self, lark: str, stop_ids: frozenset[int]) -> Grammar:
        """``lark``: in llguidance's syntax. UsageError if it is wrong, or too large."""
        limits = self._library.LLParserLimits(verbose_errors=False)
        matcher = self._library.LLMatcher(self._wrap(stop_ids), lark, log_level=0, limits=limits)
        if matcher.is_error():
            raise UsageError(_reason(matcher.get_error()))
        return Grammar(matcher, self._vocabulary)

    def special(self, token: str) -> str | None:
        """A text's form in a Lark grammar if it is one token that plain text cannot spell; else None."""
        ids = self._tokenizer.convert_tokens_to_ids([token])
        wrapped = self._wrap(frozenset())
        known = ids[0] is not None and self._tokenizer.convert_ids_to_tokens(ids) == [token]
        return f"<[{ids[0]}]>" if known and wrapped.is_special_token(ids[0]) else None

    def _wrap(self, stop_ids: frozenset[int]) -> Any:
        """The vocabulary as llguidance reads it; takes a second for a large one."""
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
    :meth:`GrammarCompiler.json_schema`. UsageError if it would take too long to compile."""
    value = f"%json {json.dumps({**schema, 'x-guidance': {**_JSON_OPTIONS, 'lenient': not strict}})}"
    require_tractable(f"start: {value}")
    return value


def _reason(text: str) -> str:
    """Without the position in, and the listing of, a grammar that the user did not write."""
    text = text.partition("failed to compile JSON schema: ")[2] or text
    text = _EXCERPT.split(text)[0]
    return " ".join(text.split())[:_MAX_REASON]

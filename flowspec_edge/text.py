"""Text to token ids and back, the way a stream needs it.

Knows the target's tokenizer.  Does not know where the tokens come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import ModelDir

_UNFINISHED = "\ufffd"  # what decoders put for bytes that are not (yet) a character


class Tokenizer:
    """The tokenizer of a model's target."""

    def __init__(self, model: ModelDir) -> None:
        from transformers import AutoTokenizer  # slow to import

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model.target, local_files_only=True)
        except Exception as error:  # tokenizers raises bare Exceptions for a file it cannot read
            first = str(error).strip().splitlines()[0]
            raise UsageError(f"the tokenizer in {model.target} cannot be loaded: {first}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens added as the model wants; UsageError if it is empty."""
        ids: list[int] = list(self._tokenizer(text, verbose=False)["input_ids"]) if text else []
        if not ids:
            raise UsageError("the prompt is empty; give some text to continue")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True,
                                          clean_up_tokenization_spaces=False))


class TextStream:
    """Turns tokens into text as they come; a character split over tokens waits for its last byte."""

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None]) -> None:
        self._decode, self._write = decode, write
        self._ids: list[int] = []
        self._done = 0  # ids whose text has been written
        self._context = 0  # ids decoded again before them: some tokenizers drop a text's first space

    def push(self, ids: Sequence[int]) -> None:
        """Write what ``ids`` completes."""
        self._ids.extend(ids)
        new = self._new_text()
        if new and not new.endswith(_UNFINISHED):
            self._flush(new)

    def close(self) -> None:
        """Write what is left, complete or not."""
        self._flush(self._new_text())

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._context : self._done])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _flush(self, text: str) -> None:
        if text:
            self._write(text)
        self._context, self._done = self._done, len(self._ids)

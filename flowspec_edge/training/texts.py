"""Training text from files that a user gives: plain text, and JSON lines in the usual shapes.

Knows file formats, what can be wrong with them, and how a part of the text is held out.  Does not
know any model beyond its tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from flowspec_edge.errors import UsageError

HELD_OUT_ONE_IN = 50  # tokens
_SUFFIXES = (".txt", ".py", ".md", ".jsonl")  # what a directory is searched for
_KEYS = 'none of the keys "text", "prompt" and "messages"'


@dataclass(frozen=True)
class Document:
    """One text.  ``templated``: it has the special tokens in it that its model wants."""

    text: str
    templated: bool = False

    @property
    def key(self) -> bytes:
        """The same for the same text."""
        return hashlib.sha256(self.text.encode()).digest()


@dataclass(frozen=True)
class TrainingText:
    """Token ids, int32 vectors, and what is to be said of where they come from."""

    train: Tensor
    held_out: Tensor
    described: list[str]


def data_files(given: Sequence[Path]) -> list[Path]:
    """The files meant by ``given``; directories are searched, hidden files and directories left out.

    UsageError for what is not there and for a directory without a file of a known kind.
    """
    files: list[Path] = []
    for path in given:
        if not path.exists():
            raise UsageError(f"no training text at {path}: give files or directories that are there")
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file()
                           and not any(part.startswith(".") for part in file.relative_to(path).parts))
            if not found:
                raise UsageError(f"{path} has no {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]} file in it; "
                                 "give another directory")
            files += found
        else:
            files.append(path)
    return files


def digest(files: Sequence[Path]) -> str:
    """sha256 over what the files hold, in their order: their names do not matter."""
    sha = hashlib.sha256()
    for file in files:
        sha.update(hashlib.sha256(_bytes(file)).digest())
    return sha.hexdigest()


def documents(files: Sequence[Path], tokenizer: Any) -> Iterator[Document]:
    """All texts of all files, exact duplicates dropped; UsageError that names the file, and the line.

    A line of a .jsonl file has "text"; or "prompt", which "completion" continues word for word, or
    which "answer" answers; or "messages".  The last two go through the tokenizer's chat template
    where it has one, and are else joined by newlines.  Every other file is one text.
    """
    seen: set[bytes] = set()
    for file in files:
        for document in _lines(file, tokenizer) if file.suffix == ".jsonl" else [Document(_text(file))]:
            if document.text.strip() and document.key not in seen:
                seen.add(document.key)
                yield document


def prepare_files(work: Path, files: Sequence[Path], tokenizer: Any, eos: int, window: int, held_out: int
                  ) -> TrainingText:
    """Tokenize, hold a part out, and keep both in ``work``; read back what was made of the same files.

    eos       ends every text
    window    tokens that training needs, held_out those that measuring needs, at the least

    UsageError for files that cannot be used or hold too little text.
    """
    made, wanted = work / "text.json", digest(files)
    if not made.is_file() or json.loads(made.read_text(encoding="utf-8"))["digest"] != wanted:
        made.unlink(missing_ok=True)
        _build(work, files, tokenizer, eos, window, held_out)
        size = sum(file.stat().st_size for file in files)
        names = ", ".join(dict.fromkeys(file.name for file in files[:8])) + (", …" if len(files) > 8 else "")
        facts = {"digest": wanted, "described": [f"{len(files)} file(s), {size} bytes: {names}"]}
        partial = made.with_suffix(".partial")
        partial.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(partial, made)
    train, held = (torch.from_numpy(np.load(work / f"text-{part}.npy")) for part in ("train", "held-out"))
    return TrainingText(train, held, json.loads(made.read_text(encoding="utf-8"))["described"])


def split(texts: list[np.ndarray[Any, Any]], keys: Sequence[bytes], wanted: int
          ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(training tokens, held-out tokens), the latter ``wanted`` many.

    Whole texts are held out, in the order of their ``keys``; of the one that would be too much, its
    end.  So the same texts in another order are split alike.
    """
    held: list[np.ndarray[Any, Any]] = []
    kept = list(texts)
    for index in sorted(range(len(texts)), key=lambda i: keys[i]):
        if not wanted:
            break
        cut = max(0, len(texts[index]) - wanted)
        kept[index], taken = texts[index][:cut], texts[index][cut:]
        held.append(taken)
        wanted -= len(taken)
    return np.concatenate(kept), np.concatenate(held)


def _build(work: Path, files: Sequence[Path], tokenizer: Any, eos: int, window: int, held_out: int) -> None:
    ids: list[np.ndarray[Any, Any]] = []
    keys: list[bytes] = []
    for document in track(documents(files, tokenizer), description="tokenizing"):
        special = not document.templated
        found = tokenizer(document.text, add_special_tokens=special, verbose=False)["input_ids"]
        if found[-1:] != [eos]:
            found.append(eos)
        ids.append(np.asarray(found, dtype=np.int32))
        keys.append(document.key)
    total = sum(len(found) for found in ids)
    if total < window + held_out:
        names = ", ".join(map(str, files[:3])) + (", …" if len(files) > 3 else "")
        raise UsageError(f"too little text to train on: {names} has {total} tokens in all, and {window} for "
                         f"a window and {held_out} to be held out are needed; give more text")
    train, held = split(ids, keys, max(held_out, total // HELD_OUT_ONE_IN))
    np.save(work / "text-train.npy", train)
    np.save(work / "text-held-out.npy", held)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error


def _text(file: Path) -> str:
    try:
        return _bytes(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text (at byte {error.start}); convert it, or leave it out"
                         ) from None


def _lines(file: Path, tokenizer: Any) -> Iterator[Document]:
    for number, line in enumerate(_text(file).split("\n"), 1):
        if line.strip():
            try:
                document = _document(json.loads(line), tokenizer)
                document.text.encode()
            except UnicodeEncodeError:
                problem = "half of a surrogate pair is no character"
            except ValueError as error:
                problem = f"it is not JSON ({error})"
            except _UnusableLine as error:
                problem = str(error)
            else:
                yield document
                continue
            raise UsageError(f"{file}, line {number}: {problem}; mend the line, or leave it out")


class _UnusableLine(Exception):
    """What is wrong with one line's object."""


def _document(row: Any, tokenizer: Any) -> Document:
    if not isinstance(row, dict):
        raise _UnusableLine("it is not an object")
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages or not all(
                isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content"))
                for m in messages):
            raise _UnusableLine('"messages" must be a list of objects with the strings "role" and "content"')
        return _conversation(messages, tokenizer)
    texts = {key: row[key] for key in ("text", "prompt", "completion", "answer") if row.get(key) is not None}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise _UnusableLine(f'"{key}" must be a string')
    if "text" in texts:
        return Document(texts["text"])
    if "prompt" not in texts:
        raise _UnusableLine(f"it has {_KEYS}")
    if "answer" in texts and "completion" not in texts:
        return _conversation([{"role": "user", "content": texts["prompt"]},
                              {"role": "assistant", "content": texts["answer"]}], tokenizer)
    return Document(texts["prompt"] + texts.get("completion", ""))


def _conversation(messages: list[dict[str, str]], tokenizer: Any) -> Document:
    if not tokenizer.chat_template:
        return Document("\n".join(message["content"] for message in messages))
    try:
        return Document(tokenizer.apply_chat_template(messages, tokenize=False), templated=True)
    except Exception as error:  # templates raise their own errors, and jinja's
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _UnusableLine(f"the tokenizer's chat template refuses it ({reason})") from error

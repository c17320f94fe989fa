"""A training's files: the user's text, and output directories.

Text is plain, or JSON lines in the usual formats.  A part of the output gets its final name only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from flowspec_edge.errors import UsageError, first_line
from flowspec_edge.model.untrusted.processes import TemplateRenderer
from flowspec_edge.util.bounded_read import read_bytes, read_json, read_json_object
from flowspec_edge.util.files import make_directory, write_atomically
from flowspec_edge.util.resources import in_package

HELD_OUT_ONE_IN = 50  # tokens
_MOST_BYTES = 1 << 30  # of a file: its text and tokens are held in memory
_TEMPLATES = TemplateRenderer()
_KEYS = 'none of the keys "text", "prompt" and "messages"'


@dataclass(frozen=True)
class Document:
    """A text of the corpus; ``templated``: a chat template has already added the special tokens."""

    text: str
    templated: bool = False

    @property
    def key(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()


@dataclass(frozen=True)
class TrainingText:
    """Token ids as int32 vectors; ``described`` lists the sources."""

    train: Tensor
    held_out: Tensor
    described: list[str]


def digest(files: Sequence[Path]) -> str:
    """Hash the contents in order, whatever the names."""
    sha = hashlib.sha256()
    for file in files:
        sha.update(hashlib.sha256(read_bytes(file, _MOST_BYTES)).digest())
    return sha.hexdigest()


def documents(files: Sequence[Path], tokenizer: Any) -> Iterator[Document]:
    """All texts of all files, without exact duplicates; a UsageError names the file and the line.

    A line of a .jsonl file has "text"; or "prompt" with "completion" (appended as it is) or "answer"; or
    "messages".  The last two use the tokenizer's chat template, or without one are joined by newlines.
    Every other file is one text.
    """
    keys: set[bytes] = set()
    for file in files:
        for document in _lines(file, tokenizer) if file.suffix == ".jsonl" else [Document(_text(file))]:
            if document.text.strip() and document.key not in keys:
                keys.add(document.key)
                yield document


def prepare_files(work: Path, files: Sequence[Path], tokenizer: Any, eos: int, window: int, held_out: int
                  ) -> TrainingText:
    """Tokenize and split into training and held-out text; ``work`` caches the result.

    ``eos`` ends every text; ``window`` and ``held_out`` are minimum token counts.  UsageError for unusable
    files, and for too little text.
    """
    marker, files_digest = work / "text.json", digest(files)
    if not marker.is_file() or read_json_object(marker).get("digest") != files_digest:
        marker.unlink(missing_ok=True)
        _build(work, files, tokenizer, eos, window, held_out)
        size = sum(file.stat().st_size for file in files)
        names = ", ".join(dict.fromkeys(file.name for file in files[:8])) + (", …" if len(files) > 8 else "")
        facts = {"digest": files_digest, "described": [f"{len(files)} file(s), {size} bytes: {names}"]}
        write_atomically(marker, json.dumps(facts))
    train, held_out_ids = (torch.from_numpy(np.load(work / f"text-{part}.npy")) for part in ("train", "held-out"))
    return TrainingText(train, held_out_ids, read_json_object(marker)["described"])


def split(texts: list[np.ndarray[Any, Any]], keys: Sequence[bytes], held_out: int
          ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(training tokens, ``held_out`` held-out tokens), independent of the order of the texts.

    Holds out whole texts in the order of their ``keys``, and the end of the last one.
    """
    held_out_texts: list[np.ndarray[Any, Any]] = []
    training_texts = list(texts)
    for index in sorted(range(len(texts)), key=lambda i: keys[i]):
        if not held_out:
            break
        cut = max(0, len(texts[index]) - held_out)
        training_texts[index], tail = texts[index][:cut], texts[index][cut:]
        held_out_texts.append(tail)
        held_out -= len(tail)
    return np.concatenate(training_texts), np.concatenate(held_out_texts)


def _build(work: Path, files: Sequence[Path], tokenizer: Any, eos: int, window: int, held_out: int) -> None:
    ids: list[np.ndarray[Any, Any]] = []
    keys: list[bytes] = []
    for document in track(documents(files, tokenizer), description="tokenizing"):
        special = not document.templated
        token_ids = tokenizer(document.text, add_special_tokens=special, verbose=False)["input_ids"]
        if token_ids[-1:] != [eos]:
            token_ids.append(eos)
        ids.append(np.asarray(token_ids, dtype=np.int32))
        keys.append(document.key)
    total = sum(len(token_ids) for token_ids in ids)
    if total < window + held_out:
        names = ", ".join(map(str, files[:3])) + (", …" if len(files) > 3 else "")
        raise UsageError(f"too little text to train on: {names} has {total} tokens in all, and {window} for "
                         f"a window and {held_out} to be held out are needed; give more text")
    train, held_out_ids = split(ids, keys, max(held_out, total // HELD_OUT_ONE_IN))
    np.save(work / "text-train.npy", train)
    np.save(work / "text-held-out.npy", held_out_ids)


def _text(file: Path) -> str:
    try:
        return read_bytes(file, _MOST_BYTES).decode("utf-8-sig")
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
            except RecursionError:
                problem = "it nests too deep"
            except ValueError as error:
                problem = f"it is not JSON ({error})"
            except _UnusableLine as error:
                problem = str(error)
            else:
                yield document
                continue
            raise UsageError(f"{file}, line {number}: {problem}; mend the line, or leave it out")


class _UnusableLine(Exception):
    ...


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
        template = tokenizer.get_chat_template()
        return Document(_TEMPLATES.render(template, tokenizer.special_tokens_map, messages), templated=True)
    except (UsageError, ValueError) as error:  # several templates, none of them the default
        raise _UnusableLine(f"the tokenizer's chat template refuses it ({first_line(error)})") from error


def bind(path: Path, settings: dict[str, Any], other_work: str) -> None:
    """Bind a work directory to ``settings``; UsageError if the file ``path`` in it says otherwise."""
    settings = json.loads(json.dumps(settings))  # as a reader gets it: tuples become lists
    if not path.exists():
        write_atomically(path, json.dumps(settings, indent=1))
    elif read_json(path) != settings:
        raise UsageError(f"{path.parent} holds the work of {other_work}; give another --work, or delete it")


def work_beside(out: Path) -> Path:
    """Return the default directory of a training's checkpoints and text: OUT-work, beside the result."""
    return out.with_name(f"{out.name}-work")


def require_user_directory(model: Path) -> None:
    """Raise UsageError if ``model`` came with the package, whose directory is no place for what a user trains."""
    if in_package(model):
        raise UsageError(f"{model} came with flowspec-edge, and a training does not write there: say where "
                         "the result goes with --out DIR")


def check_outside(path: Path, option: str) -> None:
    """Raise UsageError if ``path``, the value of ``option``, is inside the package."""
    if in_package(path):
        raise UsageError(f"{option} {path} is inside flowspec-edge's own directory, which its next release "
                         "replaces: give a directory elsewhere")


def is_finished(path: Path) -> bool:
    """Whether ``path`` holds a part that :func:`make_part`, or its publisher, has completed."""
    return (path / "config.json").is_file()


def claim(console: Console, out: Path, work: Path | None) -> Path | None:
    """Claim the directories of a result and of its checkpoints; return the latter, by default beside the result.

    None, after a line that says so, if the result is there already.  Errors as for :func:`claim_part` and
    :func:`claim_work`.
    """
    if is_finished(out):
        console.print(f"{out} is there already; delete it to have it made again, or give another directory as --out",
                      markup=False)
        return None
    claim_part(out)
    work = work or work_beside(out)
    claim_work(work)
    return work


def claim_part(path: Path) -> None:
    """Raise UsageError, before hours of work, if ``make_part`` cannot write ``path``."""
    check_outside(path, "--out")
    if path.name in ("", ".."):
        raise UsageError(f"{path} is no name for a new directory; give another one")
    if path.exists() and not path.is_dir():
        raise UsageError(f"cannot make the directory {path}: a file is in the way; give another one")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} holds something else, without a config.json; give another directory")
    make_directory(path.parent, "--out")
    make_directory(_partial(path), "--out")
    shutil.rmtree(_partial(path))


def claim_work(path: Path) -> None:
    """Make the directory of a training's checkpoints and text; UsageError if nothing can be written there."""
    check_outside(path, "--work")
    make_directory(path, "--work")


def make_part(console: Console, path: Path, part: Callable[[Path], None]) -> None:
    """Make a part of the output, unless a finished one is there.

    ``part`` writes into a temporary directory, which is renamed to ``path``.
    """
    if is_finished(path):
        console.print(f"{path} is finished already; going on", markup=False)
        return
    partial = _partial(path)
    shutil.rmtree(partial, ignore_errors=True)
    part(partial)
    for file in partial.rglob("*"):
        file.chmod(0o644)  # safetensors makes files that only their owner can read
    os.replace(partial, path)
    console.print(f"{path} is finished", markup=False)


def _partial(path: Path) -> Path:
    return path.with_name(f".partial-{path.name}")

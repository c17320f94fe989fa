"""The default training text: freely licensed Python source that is already installed.

Whole *groups* (a package directory, or a standard-library module) are held out, so that the held-out text
cannot contain a generated copy of a training file.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress, track
from tokenizers import Tokenizer
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.bounded_read import read_json_object

HELD_OUT_ONE_IN = 50
_MIN_BYTES, _MAX_BYTES = 400, 400_000  # per file
_MIN_CORPUS = 5_000_000  # characters; less means that source files are missing
QUICK_CHARACTERS = 400_000  # of training text, to try a recipe

MakeTokenizer = Callable[[list[str]], tuple[Tokenizer, int]]  # texts -> tokenizer, end-of-text id


@dataclass(frozen=True)
class SourcePackage:
    name: str
    licence: str
    skip: tuple[str, ...] = ()


SOURCES = (
    SourcePackage("stdlib", "PSF-2.0", ("site-packages", "test", "lib2to3", "idlelib", "pydoc_data",
                                 "encodings", "dist-packages", "__pycache__", "ensurepip")),
    SourcePackage("transformers", "Apache-2.0", ("__pycache__",)),
)


@dataclass(frozen=True)
class SourceFile:
    """A source file; its ``group`` decides whether it is held out."""

    source: str
    name: str
    group: str
    text: str


def _root(source: SourcePackage) -> Path | None:
    if source.name == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    for base in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        if (Path(base) / source.name).is_dir():
            return Path(base) / source.name
    return None


def documents() -> Iterator[SourceFile]:
    """Every usable file, in a fixed order, without exact duplicates."""
    digests: set[bytes] = set()
    for source in SOURCES:
        root = _root(source)
        if root is None:
            continue
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            if any(part in source.skip for part in parts):
                continue
            if not _MIN_BYTES <= path.stat().st_size <= _MAX_BYTES:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest not in digests:
                digests.add(digest)
                group = "/".join((source.name, *(parts[:-1][:2] or parts)))
                yield SourceFile(source.name, "/".join((source.name, *parts)), group, text)


def is_held_out(group: str) -> bool:
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class TokenizedCorpus:
    """The text to train and to evaluate with, as tokens.

    train, held_out  uint16 vectors (uint32 for vocabularies above 65536), end-of-text after each file
    held_out_bytes   UTF-8 bytes of the held-out text, without end-of-text marks
    """

    train: NDArray[np.unsignedinteger]
    held_out: NDArray[np.unsignedinteger]
    held_out_bytes: int
    tokenizer: Tokenizer
    summary: dict[str, Any]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """int32."""
        return torch.from_numpy(self.train.astype("int32")), torch.from_numpy(self.held_out.astype("int32"))

    def sources(self) -> list[str]:
        return [f"{name} {self.summary['versions'][name]} ({self.summary['licences'][name]})"
                for name in self.summary["train_bytes_by_source"]]


def prepare_for(work: Path, tokenizer: Tokenizer, eos: int, seed: int, limit: int | None = None
                ) -> TokenizedCorpus:
    """Return the text in a model's tokens; UsageError if ``work`` holds another model's."""
    corpus = prepare(work, seed, limit, lambda texts: (tokenizer, eos))
    if _vocabulary(corpus.tokenizer) != _vocabulary(tokenizer):
        raise UsageError(f"{work} holds text in the tokens of another model; give another --work")
    return corpus


def _vocabulary(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.to_str())["model"]


def prepare(work: Path, seed: int, limit: int | None, tokenizer: MakeTokenizer) -> TokenizedCorpus:
    """Collect and tokenize up to ``limit`` characters, or continue with the files in ``work``.

    ``tokenizer`` gets a part of the training text.
    """
    meta_path = work / "corpus.json"
    if not meta_path.exists():
        _build(work, seed, meta_path, limit, tokenizer)
    summary = read_json_object(meta_path)
    return TokenizedCorpus(
        np.load(work / "train.npy", mmap_mode="r"),
        np.load(work / "held_out.npy", mmap_mode="r"),
        int(summary["held_out_bytes"]),
        Tokenizer.from_file(str(work / "tokenizer.json")),
        summary,
    )


def _version(source: str) -> str:
    return sys.version.split()[0] if source == "stdlib" else metadata.version(source)


def _build(work: Path, seed: int, meta_path: Path, limit: int | None, make: MakeTokenizer) -> None:
    work.mkdir(parents=True, exist_ok=True)
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    size = 0
    for document in track(documents(), description="reading source files"):
        if is_held_out(document.group):
            held_out.append(document)
        else:
            train.append(document)
            size += len(document.text)
        if limit is not None and size >= limit and held_out:
            break
    if size < min(_MIN_CORPUS, limit or _MIN_CORPUS) or not held_out:
        raise FlowspecError(
            "too little text to train on: the standard library's .py files were not found under "
            f"{sysconfig.get_path('stdlib')}; use a Python that ships its source")
    order = np.random.default_rng(seed).permutation(len(train))
    train = [train[i] for i in order]
    tokenizer, eos = make([d.text for d in train[: len(train) // 3]])
    tokenizer.save(str(work / "tokenizer.json"))
    np.save(work / "train.npy", _encode(tokenizer, eos, train, "tokenizing"))
    np.save(work / "held_out.npy", _encode(tokenizer, eos, held_out, "tokenizing held-out"))
    by_source: dict[str, int] = {}
    for d in train:
        by_source[d.source] = by_source.get(d.source, 0) + len(d.text.encode())
    meta = {
        "versions": {source: _version(source) for source in by_source},
        "train_files": len(train),
        "train_bytes": sum(by_source.values()),
        "train_bytes_by_source": by_source,
        "licences": {s.name: s.licence for s in SOURCES if s.name in by_source},
        "held_out_files": len(held_out),
        "held_out_groups": sorted({d.group for d in held_out}),
        "held_out_bytes": sum(len(d.text.encode()) for d in held_out),
    }
    meta_path.write_text(json.dumps(meta, indent=1))


def _encode(tokenizer: Tokenizer, eos: int, docs: list[SourceFile], label: str
            ) -> NDArray[np.unsignedinteger]:
    largest = max(tokenizer.get_vocab().values())  # ids may have gaps: not the number of tokens
    dtype = np.uint16 if largest < 1 << 16 else np.uint32
    ids: list[NDArray[np.unsignedinteger]] = []
    with Progress() as progress:
        task = progress.add_task(label, total=len(docs))
        for start in range(0, len(docs), 64):
            batch = docs[start : start + 64]
            for encoding in tokenizer.encode_batch([d.text for d in batch], add_special_tokens=False):
                ids.append(np.asarray([*encoding.ids, eos], dtype=dtype))
            progress.update(task, advance=len(batch))
    return np.concatenate(ids)

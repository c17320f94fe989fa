"""The training text: Python source under free licences that is already on the machine.

Knows where the interpreter's standard library and a few installed packages lie, how files are
held out, and how the byte-level BPE tokenizer is trained, where a model brings none of its own.
Does not know any model.

Files are held out by *group* (a package directory, or a standard-library module), never one by
one, so that a generated twin of a training file cannot turn up in the held-out text.
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError

EOS = "<|endoftext|>"
HELD_OUT_ONE_IN = 50
_MIN_BYTES, _MAX_BYTES = 400, 400_000  # of a file
_MIN_CORPUS = 5_000_000  # characters; less is no training text but an accident

_MakeTokenizer = Callable[[list[str]], tuple[Tokenizer, int]]  # texts to tokenizer and end-of-text id


@dataclass(frozen=True)
class Source:
    """One package whose source is used, and under which licence."""

    name: str
    licence: str
    skip: tuple[str, ...] = ()


SOURCES = (
    Source("stdlib", "PSF-2.0", ("site-packages", "test", "lib2to3", "idlelib", "pydoc_data",
                                 "encodings", "dist-packages", "__pycache__", "ensurepip")),
    Source("transformers", "Apache-2.0", ("__pycache__",)),
)


@dataclass(frozen=True)
class Document:
    """One source file: where it came from, its hold-out group, and its text."""

    source: str
    name: str
    group: str
    text: str


def _root(source: Source) -> Path | None:
    if source.name == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    for base in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        if (Path(base) / source.name).is_dir():
            return Path(base) / source.name
    return None


def documents() -> Iterator[Document]:
    """Every usable file, in a fixed order, exact duplicates dropped."""
    seen: set[bytes] = set()
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
            if digest not in seen:
                seen.add(digest)
                group = "/".join((source.name, *(parts[:-1][:2] or parts)))
                yield Document(source.name, "/".join((source.name, *parts)), group, text)


def is_held_out(group: str) -> bool:
    """Whether a group belongs to the held-out text: a hash of its name decides."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class TokenizedCorpus:
    """Token ids ready for training.

    ``train`` and ``held_out`` are vectors of uint16 (uint32 for vocabularies above 65536),
    documents joined by the end-of-text id; ``held_out_bytes`` is the number of UTF-8 bytes behind
    ``held_out`` (end-of-text not counted).
    """

    train: NDArray[np.unsignedinteger]
    held_out: NDArray[np.unsignedinteger]
    held_out_bytes: int
    tokenizer: Tokenizer
    summary: dict[str, Any]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """``train`` and ``held_out``, int32."""
        return torch.from_numpy(self.train.astype("int32")), torch.from_numpy(self.held_out.astype("int32"))

    def described(self) -> list[str]:
        """Where the text is from: source, version and licence."""
        return [f"{name} {self.summary['versions'][name]} ({self.summary['licences'][name]})"
                for name in self.summary["train_bytes_by_source"]]


def prepare(work: Path, vocab_size: int, seed: int, limit: int | None = None) -> TokenizedCorpus:
    """Collect, train the tokenizer, tokenize; read everything back if ``work`` has it already.

    ``limit``: stop collecting after so many characters of training text, for trying things out.
    """

    def trained(texts: list[str]) -> tuple[Tokenizer, int]:
        tokenizer = train_tokenizer(texts, vocab_size)
        return tokenizer, tokenizer.get_vocab()[EOS]

    return _prepare(work, seed, limit, trained)


def prepare_for(work: Path, tokenizer: Tokenizer, eos: int, seed: int, limit: int | None = None
                ) -> TokenizedCorpus:
    """The same text in the tokens of a model; ``eos`` ends a document.

    UsageError if ``work`` holds the text in other tokens already.
    """
    corpus = _prepare(work, seed, limit, lambda texts: (tokenizer, eos))
    if _vocabulary(corpus.tokenizer) != _vocabulary(tokenizer):
        raise UsageError(f"{work} holds text in the tokens of another model; give another --work")
    return corpus


def _vocabulary(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.to_str())["model"]


def _prepare(work: Path, seed: int, limit: int | None, tokenizer: _MakeTokenizer) -> TokenizedCorpus:
    meta_path = work / "corpus.json"
    if not meta_path.exists():
        _build(work, seed, meta_path, limit, tokenizer)
    summary = json.loads(meta_path.read_text())
    return TokenizedCorpus(
        np.load(work / "train.npy", mmap_mode="r"),
        np.load(work / "held_out.npy", mmap_mode="r"),
        int(summary["held_out_bytes"]),
        Tokenizer.from_file(str(work / "tokenizer.json")),
        summary,
    )


def _version(source: str) -> str:
    return sys.version.split()[0] if source == "stdlib" else metadata.version(source)


def _build(work: Path, seed: int, meta_path: Path, limit: int | None, make: _MakeTokenizer) -> None:
    work.mkdir(parents=True, exist_ok=True)
    train: list[Document] = []
    held: list[Document] = []
    size = 0
    for document in track(documents(), description="reading source files"):
        if is_held_out(document.group):
            held.append(document)
        else:
            train.append(document)
            size += len(document.text)
        if limit is not None and size >= limit and held:
            break
    if size < min(_MIN_CORPUS, limit or _MIN_CORPUS) or not held:
        raise FlowspecError(
            "too little text to train on: the standard library's .py files were not found under "
            f"{sysconfig.get_path('stdlib')}; use a Python that ships its source"
        )
    order = np.random.default_rng(seed).permutation(len(train))
    train = [train[i] for i in order]
    tokenizer, eos = make([d.text for d in train[: len(train) // 3]])
    tokenizer.save(str(work / "tokenizer.json"))
    np.save(work / "train.npy", _encode(tokenizer, eos, train, "tokenizing"))
    np.save(work / "held_out.npy", _encode(tokenizer, eos, held, "tokenizing held-out"))
    by_source: dict[str, int] = {}
    for d in train:
        by_source[d.source] = by_source.get(d.source, 0) + len(d.text.encode())
    meta = {
        "versions": {source: _version(source) for source in by_source},
        "train_files": len(train),
        "train_bytes": sum(by_source.values()),
        "train_bytes_by_source": by_source,
        "licences": {s.name: s.licence for s in SOURCES if s.name in by_source},
        "held_out_files": len(held),
        "held_out_groups": sorted({d.group for d in held}),
        "held_out_bytes": sum(len(d.text.encode()) for d in held),
    }
    meta_path.write_text(json.dumps(meta, indent=1))


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: every byte string has an encoding, none is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer: Tokenizer, eos: int, docs: list[Document], label: str
            ) -> NDArray[np.unsignedinteger]:
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    ids: list[NDArray[np.unsignedinteger]] = []
    with Progress() as progress:
        task = progress.add_task(label, total=len(docs))
        for start in range(0, len(docs), 64):
            batch = docs[start : start + 64]
            for encoding in tokenizer.encode_batch([d.text for d in batch], add_special_tokens=False):
                ids.append(np.asarray([*encoding.ids, eos], dtype=dtype))
            progress.update(task, advance=len(batch))
    return np.concatenate(ids)

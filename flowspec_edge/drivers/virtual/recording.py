"""What a target model and its draft head said, in a file: all that virtual time asks of a model.

A simulation needs the text of a request, and the head's children of a path below a root.  Both are fixed by the
model, the prompt and the noise, whatever the cluster and the strategy are.  A recording holds them: texts, and at every
position of an answer the head's expansion of the likeliest nodes below that root.

The file is a zip archive of a JSON header and of arrays, each with its checksum.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import UsageError, first_line
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.tree.draft_api import ABSENT

FORMAT = 1
_HEADER = "recording.json"
_UNIT = 4096  # a score is kept in steps of 1/4096 nat
_LOWEST = 2**16 - 1  # the step of an absent child; one step less is all that is less likely than e^-16
_MOST_BYTES = 2**31  # of an array; more is no recording


@dataclass(frozen=True, eq=False)
class Expansion:
    """The head's children below one root, node by node; node 0 is the root.

    parents      [n] int32: the node's parent among the nodes, which comes before it; the root's is -1
    node_tokens  [n] int32: the node's token; the root's is ``ABSENT``. It may be one that the head did not name
    tokens       [n, k] int32: each node's children, best first, ``ABSENT`` where there is none
    scores       [n, k] float64, their log confidences given the node; -inf where there is none
    """

    parents: NDArray[np.int32]
    node_tokens: NDArray[np.int32]
    tokens: NDArray[np.int32]
    scores: NDArray[np.float64]

    @cached_property
    def index(self) -> dict[tuple[int, int], int]:
        """Nodes by their parent and token."""
        return {(parent, token): node for node, (parent, token) in
                enumerate(zip(self.parents[1:].tolist(), self.node_tokens[1:].tolist(), strict=True), 1)}

    @cached_property
    def by_token(self) -> dict[int, int]:
        """The last node with each token."""
        return {token: node for node, token in enumerate(self.node_tokens[1:].tolist(), 1)}


@dataclass(frozen=True, eq=False)
class RecordedText:
    """An answer.

    task, name  of the prompt
    reason      why it ended; "length": at its last token, "stop": at ``stop``, which is no part of the answer
    roots       by token of the answer: the head's expansion when the text ends with it; the last token of an
                answer that is cut off by its length may be without
    """

    task: str
    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    reason: Literal["stop", "length"]
    stop: int | None
    sampling: Sampling
    roots: tuple[Expansion, ...]

    def __post_init__(self) -> None:
        if not (self.prompt and self.answer and
                len(self.answer) - (self.reason == "length") <= len(self.roots) <= len(self.answer)):
            raise UsageError(f"the text {self.name!r} has {len(self.prompt)} tokens of prompt, {len(self.answer)} of "
                             f"answer and {len(self.roots)} roots")
        if (self.reason == "stop") != (self.stop is not None):
            raise UsageError(f"the text {self.name!r} ended by {self.reason}, with the stop token {self.stop}")


@dataclass(frozen=True, eq=False)
class Recording:
    """Texts of one model with one draft head.

    model       its name
    layers      of the model
    vocabulary  of the target
    stop_ids    end-of-sequence tokens
    draft       the kind of the head, whose time a profile knows
    rank, tau   how children were ranked at temperatures above 0 (``Params``)
    provenance  digests, dtype, licence, prompts and the program's version
    """

    model: str
    layers: int
    vocabulary: int
    stop_ids: frozenset[int]
    draft: str
    rank: str
    tau: float
    texts: tuple[RecordedText, ...]
    provenance: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @property
    def positions(self) -> int:
        return sum(len(text.roots) for text in self.texts)

    @property
    def nodes(self) -> int:
        return sum(len(root.parents) for text in self.texts for root in text.roots)

    @property
    def children(self) -> int:
        return next((int(root.tokens.shape[1]) for text in self.texts for root in text.roots), 0)

    @property
    def temperatures(self) -> list[float]:
        return sorted({text.sampling.temperature for text in self.texts})

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(text.task for text in self.texts))

    def at(self, temperature: float) -> list[RecordedText]:
        """Return the texts at a temperature.

        UsageError if there are none.
        """
        texts = [text for text in self.texts if text.sampling.temperature == temperature]
        if not texts:
            have = " and ".join(f"{value:g}" for value in self.temperatures)
            raise UsageError(f"{self.display_name} has no text at temperature {temperature:g}: it has {have}")
        return texts

    @property
    def display_name(self) -> str:
        """What messages call it."""
        return str(self.path) if self.path else f"the recording of {self.model}"

    def save(self, path: Path) -> None:
        """Write the file; an earlier one is replaced when the new one is complete."""
        from flowspec_edge.util.files import write_output

        write_output(path, self.packed())

    def packed(self) -> bytes:
        """Return the file's bytes, which depend on the content alone."""
        roots = [root for text in self.texts for root in text.roots]
        steps = _steps(np.concatenate([root.scores for root in roots]))
        tokens = np.concatenate([root.tokens for root in roots]).astype(np.int64)
        arrays = {
            "text": np.concatenate([np.array([*text.prompt, *text.answer], np.int32) for text in self.texts]),
            "counts": np.array([len(root.parents) for root in roots], np.uint16),
            "parents": np.concatenate([root.parents for root in roots]).astype(np.int16),
            # Neighbours in a column are alike, and small: planes of bytes compress where whole numbers do not.
            **_planes("own", (np.concatenate([root.node_tokens for root in roots]).astype(np.int64)[:, None] - ABSENT
                              ).astype(np.uint32), 3),
            **_planes("token", (tokens - ABSENT).astype(np.uint32), 3),
            **_planes("step", np.diff(steps, axis=1, prepend=0).astype(np.uint32), 2),
        }
        header = {
            "format": FORMAT, "model": self.model, "layers": self.layers, "vocabulary": self.vocabulary,
            "stop_ids": sorted(self.stop_ids), "draft": self.draft, "rank": self.rank, "tau": self.tau,
            "made": self.provenance, "children": self.children,
            "texts": [{"task": text.task, "name": text.name, "prompt": len(text.prompt), "answer": len(text.answer),
                       "roots": len(text.roots), "reason": text.reason, "stop": text.stop,
                       "sampling": asdict(text.sampling)}
                      for text in self.texts],
        }
        packed = BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as archive:
            _put(archive, _HEADER, json.dumps(header, indent=1).encode())
            for name, array in arrays.items():
                _put(archive, f"{name}.npy", _bytes_of(array))
        return packed.getvalue()


def load_recording(path: Path) -> Recording:
    """Read a recording.

    UsageError for a file that is missing, cut short, altered, of another version, or not consistent.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read(_HEADER))
            version = header.get("format") if isinstance(header, dict) else None
            if version != FORMAT:
                raise UsageError(f"{path} is a recording of format {version}; this release reads format {FORMAT}: make "
                                 "it again with: flowspec record")
            arrays = {name: _array(archive, f"{name}.npy") for name in
                      ("text", "counts", "parents", *(f"own-{i}" for i in range(3)),
                       *(f"token-{i}" for i in range(3)), *(f"step-{i}" for i in range(2)))}
            return _recording(path, header, arrays)
    except FileNotFoundError:
        raise UsageError(f"there is no recording {path}; make one with: flowspec record --out {path}") from None
    except UsageError:
        raise
    except Exception as error:  # zipfile, lzma and numpy each have errors of their own for damaged files
        raise UsageError(f"the recording {path} is incomplete or damaged ({type(error).__name__}: "
                         f"{first_line(error)}): copy it again, or make it again with: flowspec record") from error


def _recording(path: Path, header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Recording:
    children, vocabulary = int(header["children"]), int(header["vocabulary"])
    counts = arrays["counts"].astype(np.int64)
    tokens = _joined([arrays[f"token-{i}"] for i in range(3)]) + ABSENT
    steps = np.cumsum(_joined([arrays[f"step-{i}"] for i in range(2)]), axis=1)
    scores = np.where(steps >= _LOWEST, -np.inf, -steps / _UNIT)
    parents = arrays["parents"].astype(np.int32)
    own_tokens = _joined([arrays[f"own-{i}"] for i in range(3)]) + ABSENT
    nodes = int(counts.sum())
    if not (children > 0 and tokens.shape == scores.shape == (nodes, children)
            and parents.shape == (nodes,) and own_tokens.shape == (nodes, 1) and (counts > 0).all()):
        raise ValueError("its arrays have other sizes than its header says")
    if not max(tokens.max(), own_tokens.max()) < vocabulary:
        raise ValueError(f"a token is outside the vocabulary of {vocabulary}")
    within = np.arange(nodes) - np.repeat(np.cumsum(counts) - counts, counts)
    if ((parents >= within) | (parents < -1) | ((parents == -1) != (within == 0))).any():
        raise ValueError("its trees are no trees")
    ends = np.cumsum(counts)
    expansions = [Expansion(parents[a:b], own_tokens[a:b, 0].astype(np.int32), tokens[a:b].astype(np.int32),
                            scores[a:b])
                  for a, b in zip((ends - counts).tolist(), ends.tolist(), strict=True)]
    text, texts, at, root = arrays["text"], [], 0, 0
    if len(text) and not 0 <= text.min() <= text.max() < vocabulary:
        raise ValueError(f"a token is outside the vocabulary of {vocabulary}")
    for entry in header["texts"]:
        prompt, answer, count = int(entry["prompt"]), int(entry["answer"]), int(entry["roots"])
        token_ids = text[at : at + prompt + answer].tolist()
        texts.append(RecordedText(
            str(entry["task"]), str(entry["name"]), tuple(token_ids[:prompt]), tuple(token_ids[prompt:]),
            entry["reason"], entry["stop"], Sampling(**entry["sampling"]), tuple(expansions[root : root + count])))
        at, root = at + prompt + answer, root + count
    if not texts or at != len(text) or root != len(expansions):
        raise ValueError("its texts have other lengths than its header says")
    return Recording(str(header["model"]), int(header["layers"]), vocabulary, frozenset(map(int, header["stop_ids"])),
                     str(header["draft"]), str(header["rank"]), float(header["tau"]), tuple(texts),
                     dict(header["made"]), path)


def _steps(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers that do not fall along a row; a best child comes first, so only rounding could break that."""
    with np.errstate(invalid="ignore"):
        steps = np.where(np.isfinite(scores), np.clip(np.rint(-scores * _UNIT), 0, _LOWEST - 1), _LOWEST)
    return np.maximum.accumulate(steps.astype(np.int64), axis=1)


def rounded(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores as a file gives them back."""
    steps = _steps(scores)
    return np.where(steps >= _LOWEST, -np.inf, -steps / _UNIT)


def _planes(name: str, values: NDArray[np.uint32], count: int) -> dict[str, NDArray[np.uint8]]:
    return {f"{name}-{i}": (values >> (8 * i)).astype(np.uint8) for i in range(count)}


def _joined(planes: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    if any(plane.dtype != np.uint8 or plane.ndim != 2 for plane in planes):
        raise ValueError("its arrays have other types")
    joined = np.zeros(planes[0].shape, np.int64)
    for i, plane in enumerate(planes):
        joined |= plane.astype(np.int64) << (8 * i)
    return joined


def _bytes_of(array: NDArray[Any]) -> bytes:
    packed = BytesIO()
    np.lib.format.write_array(packed, array)
    return packed.getvalue()


def _put(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Write a file of the archive with a fixed date, so that the same content makes the same file."""
    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_LZMA)


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    if archive.getinfo(name).file_size > _MOST_BYTES:
        raise ValueError(f"{name} is too large")
    array: NDArray[Any] = np.lib.format.read_array(BytesIO(archive.read(name)))
    return array

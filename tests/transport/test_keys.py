"""Key files: what is written, who may read it, what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import zmq

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.transport import keys


def test_a_saved_pair_comes_back_and_only_the_owner_can_read_it(tmp_path: Path) -> None:
    pair, path = keys.generate(), tmp_path / "key"
    keys.save(pair, path)
    assert keys.load(path) == pair
    assert zmq.curve_public(pair.secret) == pair.public
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    keys.save(keys.generate(), tmp_path / "key")
    with pytest.raises(UsageError, match="not overwritten"):
        keys.save(keys.generate(), tmp_path / "key")


def test_the_secret_stays_out_of_logs() -> None:
    pair = keys.generate()
    assert pair.secret.decode() not in repr(pair)


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644])
def test_a_key_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    keys.save(keys.generate(), path)
    path.chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        keys.load(path)


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


PAIR = {name: half.decode() for name, half in asdict(keys.generate()).items()}


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "no json", '{"public": 1, "secret": 2}', '{"public": "short", "secret": "short"}', "\xff",
    "[" * 100_000, *(json.dumps({**PAIR, "newer": newer}) for newer in (
        1, [1], [{}], [{"public": "short", "secret": "short"}]))])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(FlowspecError, match="is not a key file"):
        keys.load(_write(tmp_path / "key", text))


def test_a_file_without_end_is_one_clear_error(tmp_path: Path) -> None:
    path = _write(tmp_path / "key", "")
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse: more than fits into memory
    with pytest.raises(FlowspecError, match="is not a key file"):
        keys.load(path)


def test_halves_of_two_pairs_are_found_out(tmp_path: Path) -> None:
    halves = {"public": keys.generate().public.decode(), "secret": keys.generate().secret.decode()}
    with pytest.raises(FlowspecError, match="do not belong together"):
        keys.load(_write(tmp_path / "key", json.dumps(halves)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json"):
        keys.load(tmp_path / "none.json")


def test_a_release_names_its_pair_of_a_set(tmp_path: Path) -> None:
    path = tmp_path / "curve"
    old, new = keys.generate(), keys.generate()
    keys.save(old, path, newer=[new])
    assert keys.load_all(path) == [old, new]
    assert keys.load(path) == keys.load(path, old.public.decode()) == old
    assert keys.load(path, new.public.decode()) == new
    # As programs of earlier releases read it, which know no sets: they need the oldest pair.
    assert json.loads(path.read_text())["secret"] == old.secret.decode()
    with pytest.raises(FlowspecError, match="lacks the key pair of this release: flowspec deploy up"):
        keys.load(path, keys.generate().public.decode())

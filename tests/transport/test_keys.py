"""Key files: what is written, who may read it, what is refused."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json", '{"public": 1, "secret": 2}',
                                  '{"public": "short", "secret": "short"}', "\xff", "[" * 100_000])
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


def test_a_release_names_the_pair_that_it_needs(tmp_path: Path) -> None:
    """A service's credentials: the pair, and the one before a rotation, which is empty without one."""
    path, before = tmp_path / "curve", tmp_path / "curve-before"
    new, old = keys.generate(), keys.generate()
    keys.save(new, path)
    assert keys.own_file(path, "") == keys.own_file(path, new.public.decode()) == path
    for without in (None, "\n"):
        if without:
            before.write_text(without)
        with pytest.raises(FlowspecError, match="is not the key pair of this release: flowspec deploy up"):
            keys.own_file(path, old.public.decode())
    keys.save(old, before, replace=True)
    assert keys.own_file(path, old.public.decode()) == before
    assert keys.own_file(path, new.public.decode()) == path

"""The cache gives back what it was given for a file in the same state, and nothing that others may have put there."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from semblend_trt.connector import digest_cache
from semblend_trt.connector.digest_cache import DigestCache
from semblend_trt.connector.file_digests import FileState

DIGEST = "0f" * 32
USER_FOLDER = digest_cache.user_folder  # the fixture for all tests puts another in its place


@pytest.fixture
def state(tmp_path: Path) -> FileState:
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    return FileState.of(file)


@pytest.fixture
def cache(tmp_path: Path, state: FileState) -> DigestCache:
    kept = DigestCache(tmp_path / "home" / "digests")
    kept.keep(state, DIGEST)
    return kept


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "home" / "digests"


def entry_of(tmp_path: Path) -> Path:
    (entry,) = folder_of(tmp_path).iterdir()
    return entry


def test_what_was_kept_is_found_and_only_its_owner_may_look(
    cache: DigestCache, state: FileState, tmp_path: Path
) -> None:
    assert cache.find(state) == DIGEST
    assert stat.S_IMODE(folder_of(tmp_path).stat().st_mode) == 0o700
    assert stat.S_IMODE(entry_of(tmp_path).stat().st_mode) == 0o600


@pytest.mark.parametrize("name", [field.name for field in fields(FileState)])
def test_another_state_is_not_found(cache: DigestCache, state: FileState, name: str) -> None:
    value: Any = getattr(state, name)
    other = replace(state, **{name: value + "x" if isinstance(value, str) else value + 1})
    assert cache.find(other) is None


def test_a_new_state_takes_the_place_of_the_old_one(cache: DigestCache, state: FileState, tmp_path: Path) -> None:
    newer = replace(state, mtime_ns=state.mtime_ns + 1)
    cache.keep(newer, DIGEST[::-1])
    assert (cache.find(state), cache.find(newer)) == (None, DIGEST[::-1])
    assert entry_of(tmp_path).is_file()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"digest": 3}', b"[" * 20_000, b" " * 20_000],
    ids=range(9),
)
def test_what_cannot_be_parsed_is_not_read(
    cache: DigestCache, state: FileState, tmp_path: Path, content: bytes
) -> None:
    entry_of(tmp_path).write_bytes(content)
    assert cache.find(state) is None
    cache.keep(state, DIGEST)
    assert cache.find(state) == DIGEST


@pytest.mark.parametrize("digest", ["", "0f", "G" * 64, "../" * 21 + "x", 3, None, [DIGEST]])
def test_what_is_no_digest_is_not_read(cache: DigestCache, state: FileState, tmp_path: Path, digest: Any) -> None:
    values = json.loads(entry_of(tmp_path).read_text())
    entry_of(tmp_path).write_text(json.dumps({**values, "digest": digest}))
    assert cache.find(state) is None


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_left_alone(
    cache: DigestCache, state: FileState, tmp_path: Path, mode: int
) -> None:
    folder_of(tmp_path).chmod(mode)
    before = entry_of(tmp_path).read_bytes()
    assert cache.find(state) is None
    cache.keep(state, DIGEST[::-1])
    assert entry_of(tmp_path).read_bytes() == before


def test_an_entry_that_others_can_write_is_not_read(cache: DigestCache, state: FileState, tmp_path: Path) -> None:
    entry_of(tmp_path).chmod(0o620)
    assert cache.find(state) is None


def test_another_users_folder_is_left_alone(
    cache: DigestCache, state: FileState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    before = entry_of(tmp_path).read_bytes()
    assert cache.find(state) is None
    cache.keep(state, DIGEST[::-1])
    assert entry_of(tmp_path).read_bytes() == before


def test_links_and_pipes_are_not_followed(cache: DigestCache, state: FileState, tmp_path: Path) -> None:
    linked = DigestCache(tmp_path / "link")
    (tmp_path / "link").symlink_to(folder_of(tmp_path))
    assert linked.find(state) is None
    entry = entry_of(tmp_path)
    os.link(entry, tmp_path / "second-name")
    assert cache.find(state) is None
    (tmp_path / "second-name").unlink()
    assert cache.find(state) == DIGEST
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert cache.find(state) is None
    entry.unlink()
    os.mkfifo(entry)
    assert cache.find(state) is None


def test_a_place_that_cannot_be_made_costs_nothing_else(state: FileState, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    nowhere = DigestCache(tmp_path / "file" / "digests")
    nowhere.keep(state, DIGEST)
    assert nowhere.find(state) is None


def test_the_setting_moves_it_or_switches_it_off(
    state: FileState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert DigestCache.from_setting(Path("off")) is None
    monkeypatch.setattr(digest_cache, "user_folder", USER_FOLDER)
    for path, place in ((None, tmp_path / "xdg" / "semblend-trt"), (tmp_path / "mine", tmp_path / "mine")):
        cache = DigestCache.from_setting(path)
        assert cache is not None
        cache.keep(state, DIGEST)
        assert len(list(place.iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert USER_FOLDER() == tmp_path / "home" / ".cache" / "semblend-trt"
    monkeypatch.setenv("HOME", "here")
    assert USER_FOLDER() is None

"""A digest covers every byte, however the reading is shared out, and is computed once for files that do not change."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from semblend_trt.connector import file_digests
from semblend_trt.connector.digest_cache import DigestCache
from semblend_trt.connector.file_digests import FileState, digest_of_files

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = 1000


@pytest.fixture(autouse=True)
def _small_and_forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 1,000 bytes, and files that may be remembered as soon as they are written."""
    monkeypatch.setattr(file_digests, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(file_digests, "READ_BYTES", 300)
    monkeypatch.setattr(file_digests, "SETTLED_NS", -1)
    monkeypatch.setattr(file_digests, "_known", {})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of every chunk that is read."""
    seen: list[str] = []
    read = file_digests._chunk

    def watched(state: FileState, start: int, progress: Any) -> bytes:
        seen.append(state.path)
        return read(state, start, progress)

    monkeypatch.setattr(file_digests, "_chunk", watched)
    return seen


def written(path: Path, content: bytes) -> dict[str, Path]:
    path.write_bytes(content)
    return {path.name: path}


@pytest.mark.parametrize("size", [0, 1, 299, 300, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7])
def test_each_byte_and_the_size_count(tmp_path: Path, size: int) -> None:
    content = bytes(index % 251 for index in range(size))
    base = digest_of_files(written(tmp_path / "a", content))
    assert digest_of_files(written(tmp_path / "a", content + b"\0")) != base
    for changed in {0, size // 2, size - 1} if size else ():
        other = bytearray(content)
        other[changed] ^= 1
        assert digest_of_files(written(tmp_path / "a", bytes(other))) != base
    assert digest_of_files(written(tmp_path / "a", content)) == base


def test_chunks_of_one_file_cannot_change_places(tmp_path: Path) -> None:
    first, second = b"a" * CHUNK, b"b" * CHUNK
    assert digest_of_files(written(tmp_path / "x", first + second)) != digest_of_files(
        written(tmp_path / "x", second + first)
    )


def test_names_belong_to_their_content(tmp_path: Path) -> None:
    one, two = written(tmp_path / "1", b"one")["1"], written(tmp_path / "2", b"two")["2"]
    assert digest_of_files({"a": one, "b": two}) == digest_of_files({"b": two, "a": one})
    assert digest_of_files({"a": one, "b": two}) != digest_of_files({"a": two, "b": one})
    assert digest_of_files({"a": one}) != digest_of_files({"a": one, "b": one})


def test_what_was_read_once_is_not_read_again(tmp_path: Path, reads: list[str]) -> None:
    files = written(tmp_path / "a", b"x" * 2500)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    first = digest_of_files(files)
    assert len(reads) == 3
    assert digest_of_files(files) == first
    digest_of_files({"a": link, "b": tmp_path / "a"})
    assert len(reads) == 3
    assert digest_of_files(written(tmp_path / "a", b"y" * 2500)) != first
    assert len(reads) == 6


def test_engines_that_start_together_read_once(tmp_path: Path, reads: list[str]) -> None:
    files = written(tmp_path / "a", b"x" * 2500)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(digest_of_files(files))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found)), len(reads)) == (4, 1, 3)


def test_a_file_that_was_just_written_is_read_again(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "SETTLED_NS", 10**18)
    cache = DigestCache(tmp_path / "cache")
    files = written(tmp_path / "a", b"x")
    assert digest_of_files(files, cache) == digest_of_files(files, cache)
    assert len(reads) == 2
    assert not (tmp_path / "cache").exists()


def test_the_next_process_takes_it_from_the_cache(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, files = DigestCache(tmp_path / "cache"), written(tmp_path / "a", b"x" * 100)
    first = digest_of_files(files, cache)
    monkeypatch.setattr(file_digests, "_known", {})
    assert digest_of_files(files, cache) == first
    assert len(reads) == 1


def test_a_write_that_keeps_size_and_mtime_shows(tmp_path: Path) -> None:
    files = written(tmp_path / "a", b"x" * 100)
    before, first = os.stat(tmp_path / "a"), digest_of_files(files)
    while os.stat(tmp_path / "a").st_ctime_ns == before.st_ctime_ns:
        (tmp_path / "a").write_bytes(b"y" * 100)
        os.utime(tmp_path / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(tmp_path / "a").st_mtime_ns == before.st_mtime_ns
    assert digest_of_files(files) != first


@pytest.mark.parametrize("content", [b"short", b"z" * 2500], ids=["cut", "rewritten"])
def test_a_file_that_changes_while_it_is_read_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    read, files = file_digests._chunk, written(tmp_path / "a", b"x" * 2500)

    def write_between(state: FileState, start: int, progress: Any) -> bytes:
        if start:
            (tmp_path / "a").write_bytes(content)
            os.utime(tmp_path / "a", ns=(0, 0))
        return read(state, start, progress)

    monkeypatch.setattr(file_digests, "_chunk", write_between)
    with pytest.raises(OSError, match=r"shorter|changed"):
        digest_of_files(files)
    assert not file_digests._known


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_has_no_digest(tmp_path: Path) -> None:
    files = written(tmp_path / "a", b"x")
    (tmp_path / "a").chmod(0)
    with pytest.raises(PermissionError):
        digest_of_files(files)


def test_a_long_reading_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_digests, "PROGRESS_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, file_digests.__name__):
        digest_of_files(written(tmp_path / "a", b"x" * 2500))
    assert len(caplog.messages) == 3
    assert "0.0 of 0.0 GB read" in caplog.messages[-1]

"""The index against a plain search over the same vectors, across namespaces, and through its file."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from semblend_trt.discovery import vector_shelf
from semblend_trt.discovery.semantic_index import Hit, SemanticIndex
from semblend_trt.discovery.semantic_index_file import ShelfRecord, write_index
from semblend_trt.discovery.vector_shelf import VectorShelf
from semblend_trt.errors import ConfigurationError

DIM = 24


def unit(seed: int, count: int = 1) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def filled(count: int, key: str = "space") -> tuple[SemanticIndex, np.ndarray]:
    index, vectors = SemanticIndex("test", DIM), unit(1, count)
    index.add_all(key, [f"donor-{number}" for number in range(count)], vectors)
    return index, vectors


class AgainstPlainSearch(RuleBasedStateMachine):
    """Adds, replaces and removes in any order; small shelves are exact but for rounding, so every answer is."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SemanticIndex("test", DIM)
        self.held: dict[str, tuple[str, np.ndarray]] = {}

    @rule(key=st.sampled_from("ab"), name=st.integers(0, 30), seed=st.integers(0, 10_000))
    def add(self, key, name, seed):
        self.index.add(key, str(name), unit(seed)[0])
        self.held[str(name)] = (key, unit(seed)[0])

    @rule(name=st.integers(0, 30))
    def remove(self, name):
        assert self.index.remove(str(name)) == (self.held.pop(str(name), None) is not None)

    @rule(key=st.sampled_from("abc"), seed=st.integers(0, 10_000), count=st.integers(1, 8))
    def find(self, key, seed, count):
        query = unit(seed)[0]
        expected = sorted((float(vector @ query) for owner, vector in self.held.values() if owner == key), reverse=True)
        found = self.index.find(key, query, count)
        np.testing.assert_allclose([hit.similarity for hit in found], expected[:count], atol=1e-3)
        assert all(self.held[hit.entry_id][0] == key for hit in found)

    @invariant()
    def as_many_as_held(self):
        assert len(self.index) == len(self.held)


AgainstPlainSearch.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAgainstPlainSearch = AgainstPlainSearch.TestCase


def test_another_namespace_finds_nothing():
    index, vectors = filled(10)
    assert index.find("space", vectors[3], 1) == [Hit("donor-3", pytest.approx(1.0, abs=1e-3))]
    assert index.find("space, salted", vectors[3], 5) == []


def test_a_large_namespace_finds_what_a_plain_search_finds(monkeypatch):
    monkeypatch.setattr(vector_shelf, "EXACT_ENTRIES", 500)
    index, vectors = SemanticIndex("test", DIM), unit(2, 3000)
    for start in range(0, 3000, 100):
        index.add_all("space", [str(number) for number in range(start, start + 100)], vectors[start : start + 100])
    gone = set(range(0, 3000, 7))
    for number in sorted(gone):
        assert index.remove(str(number))
    assert len(index) == 3000 - len(gone)
    queries = unit(3, 100)
    kept = np.array([number for number in range(3000) if number not in gone])
    right = 0
    for query in queries:
        expected = kept[np.argsort(-(vectors[kept] @ query))[:10]]
        found = [int(hit.entry_id) for hit in index.find("space", query, 10)]
        assert not gone.intersection(found)
        right += len(set(found) & set(expected.tolist()))
    assert right / 1000 > 0.99
    for number in kept[:50]:
        assert index.find("space", vectors[number], 1)[0].entry_id == str(number)


def test_a_large_namespace_comes_back_from_its_file(monkeypatch, tmp_path):
    monkeypatch.setattr(vector_shelf, "EXACT_ENTRIES", 200)
    index, vectors = filled(600)
    index.add("other", "single", vectors[0])
    index.save(tmp_path / "folder" / "index")
    again = SemanticIndex.load(tmp_path / "folder" / "index", "test")
    assert len(again) == 601
    for number in range(0, 600, 50):
        assert again.find("space", vectors[number], 4) == index.find("space", vectors[number], 4)
    assert again.remove("donor-5")
    again.add("space", "fresh", unit(99)[0])
    assert again.find("space", unit(99)[0], 1)[0].entry_id == "fresh"
    assert "donor-5" not in {hit.entry_id for hit in again.find("space", vectors[5], 5)}
    assert [each.name for each in (tmp_path / "folder").iterdir()] == ["index"]


@pytest.mark.parametrize("at", [0, 9, 20, 200, -1])
def test_a_changed_byte_is_noticed(tmp_path, at):
    path = tmp_path / "index"
    filled(20)[0].save(path)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=str(path)):
        SemanticIndex.load(path, "test")


@pytest.mark.parametrize("length", [0, 7, 47, 60, -1])
def test_a_file_cut_short_is_noticed(tmp_path, length):
    path = tmp_path / "index"
    filled(20)[0].save(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigurationError, match=str(path)):
        SemanticIndex.load(path, "test")


def test_a_file_of_another_embedder_version_or_namespace_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "index"
    index = filled(5)[0]
    index.save(path)
    assert len(SemanticIndex.load(path, "test", {"space", "more"})) == 5
    with pytest.raises(ConfigurationError, match="made by test, not by static"):
        SemanticIndex.load(path, "static")
    with pytest.raises(ConfigurationError, match="namespace space"):
        SemanticIndex.load(path, "test", set())
    with monkeypatch.context() as earlier:
        earlier.setattr("semblend_trt.discovery.semantic_index_file.VERSION", 1)
        index.save(path)
    with pytest.raises(ConfigurationError, match="version 1, not 2; delete it"):
        SemanticIndex.load(path, "test")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        SemanticIndex.load(tmp_path / "absent", "test")


def test_a_file_whose_entries_do_not_fit_is_refused(tmp_path):
    path = tmp_path / "index"
    shelf = VectorShelf(DIM)
    shelf.add(["a", "b"], unit(1, 2))
    for keys, entry_ids in ((["space"], ["a"]), (["space", "more"], ["a", "b"])):
        write_index(path, "test", DIM, [ShelfRecord(key, entry_ids, shelf.to_bytes()) for key in keys])
        with pytest.raises(ConfigurationError, match=r"entries named|two namespaces"):
            SemanticIndex.load(path, "test")


def test_a_failed_save_leaves_the_earlier_file(monkeypatch, tmp_path):
    path = tmp_path / "index"
    filled(5)[0].save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        filled(6)[0].save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["index"]


def test_a_symlink_is_followed_and_the_file_is_its_owners(tmp_path):
    target, link = tmp_path / "far" / "index", tmp_path / "link"
    link.symlink_to(target)
    for count in (5, 6):
        filled(count)[0].save(link)
        assert link.is_symlink()
        assert len(SemanticIndex.load(target, "test")) == count
        assert target.stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    # Opened for both, so that nobody waits if the pipe is replaced.
    descriptor = os.open(pipe, os.O_RDWR)
    reader = threading.Thread(target=lambda: read.append(os.read(descriptor, 100)))
    reader.start()
    write_index(pipe, "test", DIM, [ShelfRecord("space", [], b"")])
    is_pipe = pipe.is_fifo()
    if not is_pipe:
        os.write(descriptor, b"nothing came")
    reader.join(60)
    os.close(descriptor)
    assert is_pipe
    assert read[0].startswith(b"SBLNDVEC")


@pytest.mark.parametrize(
    "vector", [np.zeros(DIM), np.full(DIM, np.nan), np.full(DIM, np.inf), np.ones(DIM), np.ones(3)]
)
def test_a_vector_that_no_embedder_made_is_refused(vector):
    index = filled(3)[0]
    with pytest.raises(ValueError, match=r"unit length|shape"):
        index.add("space", "bad", vector.astype(np.float32))
    with pytest.raises(ValueError, match=r"unit length|shape"):
        index.find("space", vector.astype(np.float32), 1)
    assert len(index) == 3


def test_an_odd_size_is_refused():
    with pytest.raises(ValueError, match="vectors of 383 numbers"):
        SemanticIndex("test", 383)


def test_ids_must_fit_the_vectors():
    index = SemanticIndex("test", DIM)
    with pytest.raises(ValueError, match="1 ids for 2 vectors"):
        index.add_all("space", ["a"], unit(0, 2))
    with pytest.raises(ValueError, match="an id of its own"):
        index.add_all("space", ["a", "a"], unit(0, 2))
    with pytest.raises(ValueError, match="count 0"):
        index.find("space", unit(0)[0], 0)


def test_threads_may_add_remove_and_find_at_once(monkeypatch):
    monkeypatch.setattr(vector_shelf, "EXACT_ENTRIES", 100)
    index = SemanticIndex("test", DIM)
    failures = []

    def work(worker: int) -> None:
        vectors = unit(worker, 200)
        try:
            for number, vector in enumerate(vectors):
                index.add("space", f"{worker}-{number}", vector)
                if number % 3 == 0:
                    assert index.remove(f"{worker}-{number}")
                else:
                    assert index.find("space", vector, 1)[0].entry_id == f"{worker}-{number}"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(index) == 3 * 133

"""The shelf of codes against a plain search: on text, through every change, and through its bytes."""

from __future__ import annotations

import gzip
from pathlib import Path

import faiss
import numpy as np
import pytest

from semblend_trt.discovery import vector_shelf
from semblend_trt.discovery.embedders.static import StaticEmbedder
from semblend_trt.discovery.vector_shelf import VectorShelf

ROOT = Path(__file__).resolve().parents[3]
EXCERPT = ROOT / "validation" / "assets" / "excerpt.txt"
BOOKS = ROOT.parent / "shared" / "data" / "text" / "books_public_domain.txt.gz"
DIM = 32


def unit(seed: int, count: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def names(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@pytest.fixture(params=["together", "clustered"])
def coded(monkeypatch, request) -> tuple[VectorShelf, np.ndarray]:
    """A shelf of codes, together or in ten clusters that are all searched, and its vectors. A seventh of it can be
    compared after the codes."""
    monkeypatch.setattr(vector_shelf, "EXACT_ENTRIES", 700)
    monkeypatch.setattr(vector_shelf, "CLUSTER_ENTRIES", 100)
    shelf, vectors = VectorShelf(DIM), unit(1, 1000)
    with monkeypatch.context() as few:
        few.setattr(vector_shelf, "COMPARED", 1000 if request.param == "together" else 800)
        shelf.add(names(1000), vectors)
    assert shelf._is_clustered == (request.param == "clustered")
    return shelf, vectors


def recall(shelf: VectorShelf, vectors: np.ndarray, queries: np.ndarray) -> float:
    """Of the ten nearest of every query, the share found, where what is as near as the tenth counts."""
    right = 0
    for query in queries:
        least = np.sort(vectors @ query)[-10] - 1e-6
        found = {int(entry_id) for entry_id, _ in shelf.find(query, 10)}
        right += int((vectors[sorted(found)] @ query >= least).sum())
    return right / (10 * len(queries))


def passages(text: str, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Static vectors of `count` passages, and of 100 behind them."""
    cut = [text[at * length : (at + 1) * length] for at in range(count + 100)]
    vectors = StaticEmbedder().embed(cut)
    return vectors[:count], vectors[count:]


def test_codes_find_passages_of_the_excerpt(monkeypatch):
    monkeypatch.setattr(vector_shelf, "EXACT_ENTRIES", 1000)
    vectors, queries = passages(EXCERPT.read_text("utf-8"), 100, 1500)
    shelf = VectorShelf(384)
    shelf.add(names(1500), vectors)
    # 150 of 1,500 are compared after the codes; taken without them, they would hold a tenth of the neighbours.
    assert recall(shelf, vectors, queries) >= 0.98
    monkeypatch.setattr(vector_shelf, "CANDIDATES_PER_HIT", 1)
    monkeypatch.setattr(vector_shelf, "LEAST_CANDIDATES", 10)
    assert 0.4 < recall(shelf, vectors, queries) < 0.95


def test_codes_of_all_find_passages_of_books_and_those_of_some_clusters_do_not(monkeypatch):
    if not BOOKS.is_file():
        pytest.skip("../shared not present")
    with gzip.open(BOOKS, "rt", encoding="utf-8") as file:
        vectors, queries = passages(file.read(5_200_000), 300, 17_000)
    shelf = VectorShelf(384)
    shelf.add(names(17_000), vectors)
    assert recall(shelf, vectors, queries) >= 0.98
    # These passages do not cluster: neighbours stand in the clusters that are left out as well.
    monkeypatch.setattr(vector_shelf, "COMPARED", 10_000)
    shelf = VectorShelf(384)
    shelf.add(names(17_000), vectors)
    assert recall(shelf, vectors, queries) < 0.95


def test_any_change_leaves_what_a_plain_search_finds(coded):
    shelf, vectors = coded
    rng = np.random.default_rng(4)
    held = dict(zip(names(1000), vectors, strict=True))
    fresh = iter(unit(5, 2000))
    for step in range(400):
        if rng.random() < 0.6 and held:
            entry_id = sorted(held)[rng.integers(len(held))]
            shelf.remove(entry_id)
            del held[entry_id]
        else:
            count = int(rng.integers(1, 4))
            added = {f"{step}-{number}": next(fresh) for number in range(count)}
            shelf.add(list(added), np.stack(list(added.values())))
            held |= added
        assert len(shelf) == len(held)
    entry_ids, now = list(held), np.stack(list(held.values()))
    for query in unit(6, 50):
        found = shelf.find(query, 5)
        assert {entry_id for entry_id, _ in found} == {entry_ids[at] for at in np.argsort(-(now @ query))[:5]}
        for entry_id, similarity in found:
            assert similarity == pytest.approx(float(held[entry_id] @ query), abs=1e-3)


def test_growth_makes_more_clusters_and_keeps_every_entry(monkeypatch):
    monkeypatch.setattr(vector_shelf, "EXACT_ENTRIES", 700)
    monkeypatch.setattr(vector_shelf, "CLUSTER_ENTRIES", 100)
    monkeypatch.setattr(vector_shelf, "COMPARED", 1000)
    shelf, vectors, clusters = VectorShelf(DIM), unit(7, 5500), []
    for start in range(0, 5500, 500):
        shelf.add(names(5500)[start : start + 500], vectors[start : start + 500])
        clusters.append(shelf._codes.nlist if shelf._is_clustered else 0 if shelf._codes is not None else None)
    # Codes beyond 700, clusters beyond 1,000, and again at 6,500, the first number above 4 * 1,500.
    assert clusters == [None, 0, *[15] * 9]
    shelf.add([f"more-{number}" for number in range(1000)], unit(8, 1000))
    assert shelf._codes.nlist == 65
    assert shelf._codes.ntotal == shelf._vectors.ntotal == len(shelf) == 6500
    for number in range(0, 5500, 100):
        assert shelf.find(vectors[number], 1)[0][0] == str(number)


def test_codes_far_into_a_long_list_are_taken_out(monkeypatch):
    monkeypatch.setattr(vector_shelf, "EXACT_ENTRIES", 700)
    shelf, vectors = VectorShelf(DIM), unit(9, 12_000)
    shelf.add(names(12_000), vectors)
    for number in (11_990, 5, 9_000):
        shelf.remove(str(number))
    for number in (11_989, 11_998, 11_999, 6, 9_001):  # three of the last took the places of those that went
        assert shelf.find(vectors[number], 1)[0][0] == str(number)
    assert {shelf.find(vectors[number], 1)[0][0] for number in (5, 9_000, 11_990)}.isdisjoint({"5", "9000", "11990"})


def test_a_shelf_of_codes_empties_and_fills_again(coded):
    shelf, vectors = coded
    for number in range(1000):
        shelf.remove(str(number))
        if number == 990:
            assert {entry_id for entry_id, _ in shelf.find(vectors[0], 50)} == set(names(1000)[991:])
    assert len(shelf) == 0
    shelf.add(["again"], vectors[:1])
    assert [entry_id for entry_id, _ in shelf.find(vectors[0], 5)] == ["again"]


@pytest.mark.parametrize("count", [5, 1000])
def test_bytes_bring_a_shelf_back_that_can_be_changed(coded, count):
    shelf, vectors = coded
    if count < 1000:
        shelf = VectorShelf(DIM)
        shelf.add(names(count), vectors[:count])
    shelf.remove("3")
    again = VectorShelf.from_bytes(DIM, shelf.entry_ids, shelf.to_bytes())
    for query in unit(8, 20):
        assert again.find(query, 5) == shelf.find(query, 5)
    again.remove("0")
    again.add(["3"], vectors[3:4])
    assert again.find(vectors[3], 1)[0] == ("3", pytest.approx(1.0, abs=1e-3))
    assert len(again) == count - 1
    assert again._most_entries() == shelf._most_entries()


def test_bytes_that_do_not_fit_are_refused():
    shelf = VectorShelf(DIM)
    shelf.add(names(5), unit(1, 5))
    content = shelf.to_bytes()
    with pytest.raises(ValueError, match="no vector index"):
        VectorShelf.from_bytes(DIM, names(5), content[:40])
    with pytest.raises(ValueError, match=f"vectors of {DIM} numbers, not {DIM + 2}"):
        VectorShelf.from_bytes(DIM + 2, names(5), content)
    for entry_ids in (names(4), ["0", "1", "2", "3", "3"]):
        with pytest.raises(ValueError, match="entries named for 5 vectors"):
            VectorShelf.from_bytes(DIM, entry_ids, content)
    other = faiss.IndexFlatIP(DIM)
    other.add(unit(1, 5))
    with pytest.raises(ValueError, match="half precision"):
        VectorShelf.from_bytes(DIM, names(5), bytes(faiss.serialize_index(other).data))

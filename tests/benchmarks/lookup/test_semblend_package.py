"""The case that both sides get, and ours of the two; the package's side where an environment with it is named."""

import os
import sys

import numpy as np
import pytest

from benchmarks.lookup import semblend_package
from benchmarks.lookup.semblend_package import DOCUMENTS, KINDS, LENGTH, Case, make_case, own_lookups, run_package
from benchmarks.lookup.span_corpus import DOCUMENT_TOKENS, Corpus, read_corpus

PACKAGE_PYTHON = os.environ.get("SEMBLEND_PACKAGE_PYTHON")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus(None, DOCUMENTS, 400_000)


@pytest.fixture(scope="module")
def case(corpus: Corpus) -> Case:
    return make_case(corpus, 44, 6)


def holds(text: np.ndarray, document: np.ndarray, least: int, most: int) -> bool:
    return any(np.array_equal(text[at : at + DOCUMENT_TOKENS], document) for at in range(least, most + 1))


def test_prompts_hold_a_document_behind_other_text_at_the_start_or_not_at_all(corpus: Corpus, case: Case) -> None:
    assert case.prompts.shape == (6, LENGTH)
    for number, (prompt, document) in enumerate(zip(case.prompts, case.prompt_documents, strict=True)):
        kind = KINDS[number % 3]
        if kind == "unrelated":
            assert document < 0
            assert not any(holds(prompt, each, 0, 512) for each in corpus.documents[:3])
        else:
            places = (0, 0) if kind == "first" else (32, 512)
            assert holds(prompt, corpus.documents[document], *places)


def test_every_other_donor_holds_a_document(corpus: Corpus, case: Case) -> None:
    assert case.donors.shape == (44, LENGTH)
    assert case.donor_documents[::2].tolist() == [number % DOCUMENTS for number in range(22)]
    assert (case.donor_documents[1::2] < 0).all()
    assert holds(case.donors[0], corpus.documents[0], 0, 0)
    assert holds(case.donors[2], corpus.documents[1], 32, 512)


def test_ours_finds_the_documents_of_all_donors_and_no_others(case: Case) -> None:
    told = own_lookups(case, [2, 44])
    assert set(told["lookups"]) == {"ours 2", "ours 44"}
    assert told["lookups"]["ours 44"]["found"] == [True, True, False, True, True, False]
    assert len(told["lookups"]["ours 2"]["times"]) == 6
    assert len(told["registered"]) == 44


def test_an_interpreter_without_the_package_ends_the_program_with_its_error(
    monkeypatch: pytest.MonkeyPatch, corpus: Corpus
) -> None:
    monkeypatch.setattr(semblend_package, "MADE_TOKENS", 400_000)
    monkeypatch.setattr(
        sys, "argv", ["semblend_package", "--python", sys.executable, "--donors", "4", "--prompts", "3"]
    )
    with pytest.raises(SystemExit, match="could not run the package: ModuleNotFoundError: No module named 'semblend"):
        semblend_package.main()


@pytest.mark.skipif(PACKAGE_PYTHON is None, reason="SEMBLEND_PACKAGE_PYTHON names no interpreter with the package")
@pytest.mark.parametrize("arm", ["embedding", "jaccard"])
def test_the_package_runs(case: Case, arm: str) -> None:
    told = run_package(str(PACKAGE_PYTHON), arm, case, [44])
    assert told["version"].startswith("0.3.")
    assert f"{arm} 44" in told["lookups"]
    lookups = told["lookups"][f"{arm} 44"]
    assert len(lookups["times"]) == 6
    if arm == "embedding":
        # It finds a shifted document, of which no prefix can be used.
        assert lookups["found"] == [True, True, False, True, True, False]
        assert [prefix >= DOCUMENT_TOKENS for prefix in lookups["prefixes"]] == [False, True, False, False, True, False]

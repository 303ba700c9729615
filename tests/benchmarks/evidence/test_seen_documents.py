"""The rows of reused documents, on few prompts about few documents."""

from benchmarks.evidence import seen_documents
from tests.benchmarks.dry_runs import dry_rows
from validation.prompts import SHIPPED


def test_the_rows_compare_generations_with_exact_donors_and_with_cold(tmp_path):
    rows = dry_rows(seen_documents, tmp_path, "--queries", "8", "--documents", "10", "--name", "dry")
    without, with_them = (rows[f"reuse_of_seen_documents{kind}_dry"] for kind in ("_exact_donors", ""))
    assert 0 <= without.value <= with_them.value <= 1
    assert "of 8 seen documents, of 8 in the last 1 of 8 prompts" in with_them.baseline
    assert -1 <= rows["reuse_of_seen_documents_em_vs_cold_dry"].value <= 1


def test_documents_stand_where_the_prompt_says():
    queries = seen_documents.queries_of(3, 9, SHIPPED, list)
    for case, places in queries:
        shown = [case.prompt[place.start : place.stop] for place in places.values()]
        assert len(shown) == seen_documents.EACH
        assert all(text.startswith("<|doc|>Stock list of ") for text in shown)
        assert any(case.reference in text for text in shown)
    assert len({document for _, places in queries for document in places}) == 9

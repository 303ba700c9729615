"""docs/models.md has the answers of the code, and the row counts them."""

import pytest

from benchmarks.evidence import models
from tests.pages import Page
from validation.results import rows_of

PAGE = "docs/models.md"


@pytest.mark.promise(
    "engines",
    "docs/models.md has the code's own answers to the published configurations of popular models, and vLLM's "
    "configuration of those served is refused for nothing",
)
def test_the_page_has_the_answers_of_the_code():
    told = f"{PAGE} is out of date; make it with `python -m benchmarks.evidence.models --page {PAGE}`"
    assert models.with_table(Page(PAGE).text) == Page(PAGE).text, told


def test_the_row_counts_what_the_page_says_is_served(tmp_path):
    answers = [row[-1] for row in Page(PAGE).rows[1:]]
    assert len(answers) == len(models.published())
    assert all(answer.startswith(("served", "refused, `")) for answer in answers)
    models.main(["--json", str(tmp_path)])
    (row,) = rows_of(tmp_path / "models.json")
    assert row.value == sum(answer.startswith("served") for answer in answers)
    for model in models.published():
        assert model.source
        assert {"architectures", "model_type"} <= model.config.keys()


def test_a_page_without_a_place_for_the_table_is_refused():
    with pytest.raises(ValueError, match="put them there"):
        models.with_table("# Models\n")

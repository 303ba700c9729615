"""docs/models.md has the answers of the code."""

import pytest

from benchmarks.evidence import models
from tests.pages import Page

PAGE = "docs/models.md"


@pytest.mark.promise(
    "engines",
    "docs/models.md has the code's own answers to the published configurations of popular models, and vLLM's "
    "configuration of those served is refused for nothing",
)
def test_the_page_has_the_answers_of_the_code():
    told = f"{PAGE} is out of date; make it with `python -m benchmarks.evidence.models --page {PAGE}`"
    assert models.with_table(Page(PAGE).text) == Page(PAGE).text, told
    assert all(each.source and {"architectures", "model_type"} <= each.config.keys() for each in models.published())
    with pytest.raises(ValueError, match="put them there"):
        models.with_table("# Models\n")

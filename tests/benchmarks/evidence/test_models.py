"""docs/models.md has the answers of the code, and the row counts them."""

import pytest

from benchmarks.evidence import models
from semblend_trt.doctor.model import KnownModel
from tests.benchmarks.dry_runs import dry_rows
from tests.pages import Page

PAGE = "docs/models.md"


def test_the_page_has_the_answers_of_the_code():
    told = f"{PAGE} is out of date; make it with `python -m benchmarks.evidence.models --page {PAGE}`"
    assert models.with_table(Page(PAGE).text) == Page(PAGE).text, told


def test_the_row_counts_what_the_page_says_is_served(tmp_path):
    answers = [row[-1] for row in Page(PAGE).rows[1:]]
    assert len(answers) == len(models.published())
    assert all(answer.startswith(("served", "refused, `")) for answer in answers)
    most = len(answers) - 1
    (row,) = dry_rows(models, tmp_path, "--most", str(most)).values()
    assert row.value == sum(answer.startswith("served") for answer in answers[:most])


@pytest.mark.parametrize("model", models.published(), ids=lambda model: model.name)
def test_what_is_shown_of_a_served_model_is_what_its_kv_is_moved_by(model):
    answer = model.answer()
    if not isinstance(answer, KnownModel):
        assert answer.reason, answer.text
        return
    facts = answer.facts
    if facts.kv_factor == 1:
        latent, turning = facts.rotation.first_channel, facts.rotation.rotary_dim
        kind = facts.rope_parameters["rope_type"]
        assert models._attention(model.text) == "latent (MLA)"
        assert models._kv(model.text) == f"{latent} + {turning} values"
        assert models._rope(model.text) == f"{kind}, {turning} channels"
        return
    windows = [each for each in facts.windows if each is not None]
    told = f"window of {windows[0]:,} in {len(windows)} of {facts.num_layers} layers" if windows else "full"
    if facts.chunk is not None:
        told = f"chunks of {facts.chunk:,} in {len(list(filter(None, facts.chunks)))} of {facts.num_layers} layers"
    assert models._attention(model.text) == told
    assert models._kv(model.text) == f"{facts.kv_heads} heads of {facts.head_dim}"
    kind, *more = models._rope(model.text).split(", ")
    assert kind == facts.rope_parameters["rope_type"]
    share = next((each for each in more if "%" in each), "100%")
    assert float(share.partition("%")[0]) * facts.head_dim == 100 * facts.rotation.rotary_dim
    still = [layer for layer in range(facts.num_layers) if facts.rotation.of_layer(layer).is_still]
    turning = [kind for kind in facts.rotation.kinds if not kind.is_still]
    assert len(turning) == (2 if "another theta in windows" in more else 1)
    assert still == (list(range(3, facts.num_layers, 4)) if "none in each 4th layer" in more else [])


def test_every_model_has_a_source_and_its_types():
    for model in models.published():
        assert model.source
        assert {"architectures", "model_type"} <= model.config.keys()


def test_a_page_without_a_place_for_the_table_is_refused():
    with pytest.raises(ValueError, match="put them there"):
        models.with_table("# Models\n")

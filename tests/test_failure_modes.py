"""docs/failure-modes.md, vllm.md and sglang.md name every reason for which the code refuses or drops, and no other;
failure-modes.md names every known defect, and each has tests that fail on it."""

import re

import pytest

from semblend_trt import audit
from semblend_trt.donors.disk_tier import FILE_REASONS
from semblend_trt.donors.offload import OffloadEventKind
from semblend_trt.fleet.placement import RESULTS
from semblend_trt.fleet.publisher import DROP_REASONS, RESYNC_REASONS
from semblend_trt.reasons import FAULTS, OTHER_REASON, REASONS
from tests.pages import Page, code_in, marks
from tests.reasons import filled

PAGES = [Page("docs/failure-modes.md"), Page("docs/vllm.md"), Page("docs/sglang.md")]
# The names in the last columns of their tables.
TOLD = {name for page in PAGES for row in page.rows for name in code_in(row[-1]) if name.isidentifier()}
FAILED_MOVES = {"write_failed", "write_skipped", "fetch_failed", "lift_failed", "file_refused", "disk_unavailable"}
# How a prompt may be placed without its text.
PLACED = {*RESULTS} - {"held"}
# Of a connection to NATS, and of a worker that a reader does not follow.
OTHER_COUNTS = {"failed", "dropped", "refused", "id_twice"}


@pytest.mark.promise("commands", "Every reason and fault is in `docs/failure-modes.md` or `docs/vllm.md`")
def test_the_pages_have_every_reason_and_no_other():
    """What is listed here needs a row that counts as it, or an entry in the table of reasons."""
    assert {*OffloadEventKind} > FAILED_MOVES
    events = {*DROP_REASONS, *RESYNC_REASONS, *audit.DROP_REASONS, *FAILED_MOVES}
    assert TOLD ^ {*REASONS, *FAULTS, *FILE_REASONS, *events, *PLACED, *OTHER_COUNTS} == set()
    assert f"`{OTHER_REASON}`" in PAGES[0].text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_reasons_are_made_from_the_code(page):
    """`python -m tests.reasons` writes them."""
    assert page.text == filled(page.text)


def test_every_defect_is_on_the_page_and_has_its_tests():
    cells = [row[0] for row in PAGES[0].rows if re.fullmatch(r"\d+(, \d+)*", row[0])]
    assert sorted(int(number) for cell in cells for number in cell.split(", ")) == [*range(1, 38)]
    assert {number for _, *numbers in marks("known_defect") for number in numbers} == {*range(1, 38)}
